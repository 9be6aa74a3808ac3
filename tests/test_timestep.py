"""t is a noise level: what a user may set, what each family's argument means, and the exact gate on it."""

import asyncio
import inspect
import struct
import threading
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from skip_attn_compile.timestep import SPECS, TimestepSpec, current, float32, is_dense, spec_of, timestep

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # diffusers' schedulers and a newer numpy

ABOVE_97 = 0.97 + 6e-8  # one float32 above float32(0.97)


def current_level():
    reading = current()
    return None if reading is None else reading.level


def test_timestep_is_gone_at_exit_and_nests():
    assert current_level() is None
    with timestep(0.9):
        assert current_level() == float32(0.9)
        with timestep(0.25):
            assert current_level() == 0.25
        assert current_level() == float32(0.9)
    assert current_level() is None


def test_timestep_is_gone_after_an_exception():
    with pytest.raises(KeyError), timestep(0.5):
        raise KeyError
    assert current_level() is None


def test_threads_do_not_see_each_other():
    seen, both_inside = {}, threading.Barrier(2)

    def run(t):
        seen[t, "before"] = current_level()
        with timestep(t):
            both_inside.wait(10)
            seen[t] = current_level()

    threads = [threading.Thread(target=run, args=(t,)) for t in (0.25, 0.75)]
    with timestep(1.0):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {0.25: 0.25, 0.75: 0.75, (0.25, "before"): None, (0.75, "before"): None}


def test_async_tasks_do_not_see_each_other():
    async def run(t):
        with timestep(t):
            await asyncio.sleep(0)
            return current_level()

    async def main():
        return await asyncio.gather(run(0.25), run(0.75)), current_level()

    assert asyncio.run(main()) == ([0.25, 0.75], None)


@pytest.mark.parametrize("t", [0, 1, 0.5, np.float32(0.5), np.int64(1), Fraction(1, 2), 1 + 1e-9], ids=repr)
def test_host_numbers_become_float32_values(t):
    with timestep(t):
        assert type(current_level()) is float
        assert current_level() == struct.unpack("f", struct.pack("f", float(t)))[0]


@pytest.mark.parametrize(
    "t", [999, 1.001, -0.1, float("nan"), float("inf"), 10**400, True, "0.5", None, [0.5], 1j], ids=lambda t: repr(t)[:12]
)
def test_bad_number_is_named(t):
    with pytest.raises(ValueError, match=r"timestep must be noise levels in \[0, 1\].*num_train_timesteps") as error, timestep(t):
        pass
    assert repr(t) in str(error.value)
    assert current_level() is None


@pytest.mark.parametrize(
    "t",
    [torch.tensor(999), torch.tensor([0.5, 1.5]), torch.tensor([0.5, -0.1]), torch.tensor([0.5, torch.nan])],
    ids=["999", "1.5", "-.1", "nan"],
)
def test_bad_host_tensor_is_named(t):
    with pytest.raises(ValueError, match=r"values from .* to .*num_train_timesteps"), timestep(t):
        pass


@pytest.mark.parametrize("t", [torch.empty(0), torch.tensor(True), torch.tensor(0.5j)], ids=["empty", "bool", "complex"])
def test_tensor_without_real_numbers_is_named(t):
    with pytest.raises(ValueError, match="at least one real number"), timestep(t):
        pass


def test_largest_level_of_a_tensor_counts():
    with timestep(torch.tensor([[0.0, 0.75], [0.5, 0.0]], requires_grad=True)):
        assert current_level() == 0.75
    with timestep(torch.tensor(0.97, dtype=torch.bfloat16)):
        assert current_level() == 0.96875


def test_device_tensors_are_never_read():
    """A meta tensor has no value: reading it, as a synchronisation would, raises."""
    on_device = torch.empty(2, 3, device="meta", dtype=torch.bfloat16)
    with timestep(on_device):
        level = current_level()
    spec_levels = [spec.noise_level(on_device) for spec in SPECS.values() if isinstance(spec, TimestepSpec)]
    for t in (level, *spec_levels):
        assert (t.device.type, t.dtype, t.shape) == ("meta", torch.float32, ())
    decision = is_dense(on_device, 0.5)
    assert (decision.device.type, decision.dtype, decision.shape) == ("meta", torch.bool, ())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_levels_are_those_of_the_host_without_a_sync():
    values = {
        spec: torch.arange(0, 1001) for spec in (TimestepSpec("t", 1000), TimestepSpec("t", 1000, True), TimestepSpec("t", 1000, offset=-1))
    }
    host = {spec: [spec.noise_level(int(x)) for x in xs] for spec, xs in values.items()}
    on_gpu = {spec: list(xs.cuda()) for spec, xs in values.items()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        levels = {spec: [spec.noise_level(x) for x in xs] for spec, xs in on_gpu.items()}
        dense = is_dense(levels[TimestepSpec("t", 1000)][970], 0.97)
        with timestep(levels[TimestepSpec("t", 1000)][970]):
            explicit = current_level()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {spec: [level.item() for level in found] for spec, found in levels.items()} == host
    assert not dense.item()
    assert explicit.item() == float32(0.97)


# The gate ----------------------------------------------------------------------------------------------------------------------


class Unreadable:
    def __getattribute__(self, name):
        raise AssertionError(f"t was read: {name}")


def test_cutoff_zero_never_reads_t():
    assert is_dense(Unreadable(), 0.0) is False
    assert is_dense(torch.tensor(1.0), 0.0) is False


@pytest.mark.parametrize(
    ("t", "cutoff", "dense"),
    [
        (0.97, 0.97, False),  # equal is sparse
        (float32(0.97), 0.97, False),
        (0.97 + 1e-12, 0.97, False),  # the same float32
        (ABOVE_97, 0.97, True),
        (0.97, ABOVE_97, False),
        (1, 1.0, False),
        (0.0, 1e-3, False),
        (1.0, 0.97, True),
    ],
)
def test_gate_is_exact(t, cutoff, dense):
    assert is_dense(t, cutoff) is dense
    for dtype in (torch.float32, torch.float64):
        decision = is_dense(torch.tensor([0.0, t], dtype=dtype), cutoff)
        assert decision.shape == ()
        assert decision.dtype == torch.bool
        assert decision.item() is dense


def test_low_precision_t_does_not_round_the_cutoff():
    t = torch.tensor(0.97, dtype=torch.bfloat16)  # 0.96875
    assert not is_dense(t, 0.97)
    assert is_dense(t, 0.968)  # 0.968 rounds to 0.96875 in bfloat16


# What a model's argument means -------------------------------------------------------------------------------------------------


def test_levels_are_the_same_from_every_form():
    raw, upwards = TimestepSpec("t", 1000), TimestepSpec("t", 1000, inverted=True)
    for x in range(1001):
        level = raw.noise_level(x)
        assert level == float32(x / 1000)
        for dtype in (torch.int64, torch.float32, torch.float64):
            assert raw.noise_level(torch.tensor([x], dtype=dtype)) == level
        assert upwards.noise_level(x) == upwards.noise_level(torch.tensor(x)) == float32(1 - level)
        assert type(level) is float


def test_largest_level_counts_after_inversion():
    tokens = torch.tensor([[1000.0, 250.0], [900.0, 1000.0]])
    assert TimestepSpec("t", 1000).noise_level(tokens) == 1.0
    assert TimestepSpec("t", 1000, inverted=True).noise_level(tokens) == 0.75
    assert TimestepSpec("t").noise_level(torch.empty(0)) == 1.0


def test_levels_ignore_the_default_device():
    with torch.device("meta"):
        assert TimestepSpec("t", 1000).noise_level(500) == 0.5


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({}, "argument must be"),
        ({"argument": "a b"}, "argument must be .* 'a b'"),
        ({"argument": 1}, "argument must be"),
        ({"argument": "t", "scale": 0}, "scale must be finite and > 0.* got 0"),
        ({"argument": "t", "scale": -1000}, "scale must be"),
        ({"argument": "t", "scale": float("nan")}, "scale must be"),
        ({"argument": "t", "scale": True}, "scale must be"),
        ({"argument": "t", "inverted": 1}, "inverted must be True or False, got 1"),
        ({"argument": "t", "offset": "1"}, "offset must be a finite number"),
        ({"argument": "t", "transform": "log"}, "transform must be one of linear, edm, got 'log'"),
        ({"argument": "t", "inverse": True}, "has no field 'inverse'; did you mean inverted"),
    ],
)
def test_bad_spec_is_named(kwargs, match):
    with pytest.raises(ValueError, match=match):
        TimestepSpec(**kwargs)


def named(name, config=None):
    """A module whose class has this name, with a config such as diffusers' models have."""
    model = type(name, (nn.Module,), {})()
    if config is not None:
        model.config = config
    return model


def test_spec_is_found_by_class_base_and_wrapper():
    model = named("WanTransformer3DModel")
    derived = type("MyWan", (type(model),), {})()
    expected = TimestepSpec("timestep", 1000)
    assert spec_of(model) == spec_of(derived) == spec_of(torch.compile(model)) == expected


def test_unknown_models_have_no_spec():
    assert spec_of(nn.Linear(1, 1)) is None
    assert spec_of(named("WanTransformer4DModel")) is None


@pytest.mark.parametrize("name", sorted(SPECS))
def test_forward_of_the_class_has_the_argument(name):
    diffusers = pytest.importorskip("diffusers")
    for config in CONFIGS.get(name, [None]):
        spec = spec_of(named(name, config))
        assert spec.argument in inspect.signature(getattr(diffusers, name).forward).parameters
        assert set(config or ()) <= set(inspect.signature(getattr(diffusers, name).__init__).parameters)


# One line of each family's pipeline in diffusers 0.42: what reaches the model at step i of a real scheduler, and the noise level there.


def flow(**config):
    def make(diffusers):
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, **config)
        scheduler.set_timesteps(sigmas=[1.0, 0.8, 0.6, 0.4, 0.2, 0.1])
        return scheduler

    return make


def set_up(name, **config):
    def make(diffusers):
        scheduler = getattr(diffusers, name)(**config)
        scheduler.set_timesteps(6)
        return scheduler

    return make


sigma = lambda s, i: s.sigmas[i]
clean_sigma = lambda s, i: 1 - s.sigmas[i]
edm_sigma = lambda s, i: s.sigmas[i] / (1 + s.sigmas[i])
ddim = set_up("DDIMScheduler")
unipc = set_up("UniPCMultistepScheduler", use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction")

# family: (scheduler, argument that the pipeline passes, noise level)
FAMILIES = {
    "t / 1000": (flow(), lambda s, i: (s.timesteps[i] / 1000).expand(2), sigma),
    "t": (flow(), lambda s, i: s.timesteps[i].expand(2), sigma),
    "integer t": (unipc, lambda s, i: s.timesteps[i].expand(2), lambda s, i: s.timesteps[i] / 1000),  # truncated
    "per-token t": (flow(), lambda s, i: (torch.tensor([0.0, 1.0, 1.0]) * s.timesteps[i]).expand(2, 3), sigma),
    "t - 1": (flow(), lambda s, i: s.timesteps[i].expand(2) - 1, sigma),
    "index": (ddim, lambda s, i: s.timesteps[i].expand(2), lambda s, i: s.timesteps[i] / 1000),
    "1 - t / 1000": (flow(), lambda s, i: 1 - s.timesteps[i].expand(2) / s.config.num_train_timesteps, sigma),
    "(1000 - t) / 1000": (flow(), lambda s, i: (1000 - s.timesteps[i].expand(2)) / 1000, sigma),
    "inverted": (flow(invert_sigmas=True), lambda s, i: s.timesteps[i].expand(2), clean_sigma),
    "inverted / 1000": (flow(invert_sigmas=True), lambda s, i: (s.timesteps[i] / 1000).expand(2), clean_sigma),
    "inverted of 1": (flow(invert_sigmas=True, num_train_timesteps=1), lambda s, i: s.timesteps[i].expand(2), clean_sigma),
    "minimax": (set_up("MiniMaxH3Scheduler"), lambda s, i: torch.cat([s.timesteps[i : i + 1], torch.ones(1)]), sigma),
    "edm": (set_up("EDMEulerScheduler", sigma_max=80.0, sigma_min=0.002), lambda s, i: s.timesteps[i].expand(2), edm_sigma),
    "edm / (1 + edm)": (
        set_up("EDMEulerScheduler", sigma_max=80.0),
        lambda s, i: (s.sigmas[i] / (s.sigmas[i] + 1)).expand(2, 1, 3, 1, 1),
        edm_sigma,
    ),
    "continuous": (
        set_up("EulerDiscreteScheduler", prediction_type="v_prediction", timestep_type="continuous", use_karras_sigmas=True),
        lambda s, i: s.timesteps[i],
        edm_sigma,
    ),
    # CosineDPMSolverMultistepScheduler needs torchsde: its sigmas and its precondition_noise, written out
    "atan": (
        lambda diffusers: SimpleNamespace(sigmas=torch.logspace(2.7, -0.5, 6)),
        lambda s, i: s.sigmas[i : i + 1].atan() / torch.pi * 2,
        lambda s, i: s.sigmas[i].atan() / torch.pi * 2,
    ),
    "ratio": (set_up("DDPMWuerstchenScheduler"), lambda s, i: s.timesteps[i].expand(2), lambda s, i: 1 - i / 6),
    "angle": (
        lambda diffusers: scm(diffusers),
        lambda s, i: s.timesteps[i].sin() / (s.timesteps[i].cos() + s.timesteps[i].sin()),
        lambda s, i: s.timesteps[i].tan() / (1 + s.timesteps[i].tan()),
    ),
    "t * .001": (flow(), lambda s, i: s.timesteps[i].expand(2) * 0.001, sigma),
    "sigma * 1000": (flow(), lambda s, i: torch.full((2, 5), s.sigmas[i].item() * 1000), sigma),
}


def scm(diffusers):
    scheduler = diffusers.SCMScheduler()
    scheduler.set_timesteps(6, intermediate_timesteps=None)
    return scheduler


CONFIGS = {
    "CosmosTransformer3DModel": [{"extra_pos_embed_type": "learnable"}, {"extra_pos_embed_type": None}],
    "SanaTransformer2DModel": [
        {"timestep_scale": 1.0, "guidance_embeds": False},
        {"timestep_scale": 0.001, "guidance_embeds": False},
        {"timestep_scale": 1.0, "guidance_embeds": True},
    ],
    "SanaWMLTX2RefinerTransformer3DModel": [{"timestep_scale_multiplier": 1000}],
}

ROWS = {
    "t / 1000": """AuraFlowTransformer2DModel BriaFibo2Transformer2DModel ChromaTransformer2DModel Flux2Transformer2DModel
        Flux3Transformer2DModel FluxTransformer2DModel Krea2Transformer2DModel LongCatImageTransformer2DModel
        NucleusMoEImageTransformer2DModel OvisImageTransformer2DModel PRXTransformer2DModel QwenImage21Transformer2DModel
        QwenImageTransformer2DModel AceStepTransformer1DModel""",
    "t": """BriaFiboTransformer2DModel BriaTransformer2DModel CogView4Transformer2DModel DreamLiteUNetModel EasyAnimateTransformer3DModel
        ErnieImageTransformer2DModel HeliosTransformer3DModel HiDreamImageTransformer2DModel HunyuanImageTransformer2DModel
        HunyuanVideo15Transformer3DModel HunyuanVideoFramepackTransformer3DModel HunyuanVideoTransformer3DModel
        JoyImageEditPlusTransformer3DModel JoyImageEditTransformer3DModel Kandinsky5Transformer3DModel Kandinsky6SRTransformer3DModel
        Kandinsky6Transformer3DModel MotifVideoTransformer3DModel SD3Transformer2DModel SanaVideoTransformer3DModel StableAudio3DiTModel
        SanaTransformer2DModel/0""",
    "integer t": """ChronoEditTransformer3DModel Cosmos3OmniTransformer WanAnimate2Transformer3DModel WanAnimateTransformer3DModel
        WanVACETransformer3DModel SkyReelsV2Transformer3DModel""",
    "per-token t": """AnyFlowFARTransformer3DModel AnyFlowTransformer3DModel LTX2VideoTransformer3DModel LTXVideoTransformer3DModel
        SanaWMTransformer3DModel WanTransformer3DModel""",
    "t - 1": "GlmImageTransformer2DModel",
    "index": """AllegroTransformer3DModel CogVideoXTransformer3DModel CogView3PlusTransformer2DModel ConsisIDTransformer3DModel
        DiTTransformer2DModel HunyuanDiT2DModel I2VGenXLUNet Kandinsky3UNet LatteTransformer3DModel PixArtTransformer2DModel
        UNet2DConditionModel UNet2DModel UNet3DConditionModel UNetMotionModel""",
    "1 - t / 1000": "Ideogram4Transformer2DModel Lumina2Transformer2DModel LuminaNextDiT2DModel",
    "(1000 - t) / 1000": "ZImageTransformer2DModel",
    "inverted": "MochiTransformer3DModel",
    "inverted / 1000": "LongCatAudioDiTTransformer",
    "inverted of 1": "OmniGenTransformer2DModel MiniMaxMusic3Transformer1DModel",
    "minimax": "MiniMaxH3Transformer3DModel",
    "edm": "CosmosTransformer3DModel/0",
    "edm / (1 + edm)": "CosmosTransformer3DModel/1",
    "continuous": "UNetSpatioTemporalConditionModel",
    "atan": "StableAudioDiTModel",
    "ratio": "StableCascadeUNet",
    "angle": "SanaTransformer2DModel/2",
    "t * .001": "SanaTransformer2DModel/1",
    "sigma * 1000": "SanaWMLTX2RefinerTransformer3DModel/0",
}
CASES = [(row.partition("/")[0], row.partition("/")[2], family) for family, rows in ROWS.items() for row in rows.split()]


@pytest.mark.parametrize(("name", "config", "family"), CASES)
def test_row_reads_what_the_pipeline_passes(name, config, family):
    make, argument, noise = FAMILIES[family]
    scheduler = make(pytest.importorskip("diffusers"))
    spec = spec_of(named(name, CONFIGS[name][int(config)] if config else None))
    levels = [spec.noise_level(argument(scheduler, i)) for i in range(6)]
    assert levels == pytest.approx([float(noise(scheduler, i)) for i in range(6)], abs=2e-6)
    assert levels == sorted(levels, reverse=True)
    assert levels[0] > levels[-1]


def test_every_row_has_a_case():
    assert {name for name, _, _ in CASES} == set(SPECS)
    assert {(name, config) for name, config, _ in CASES if config} == {(n, str(i)) for n, cs in CONFIGS.items() for i in range(len(cs))}
