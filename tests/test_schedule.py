"""How many steps a cutoff makes dense: the fixtures of the design, and real schedulers against a count by hand."""

import copy
import inspect
import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from skip_attn_compile.schedule import (
    _UNIFORM_SIGMAS,
    ScheduleRow,
    cutoff_for_dense_steps,
    dense_steps,
    noise_levels,
    schedule_table,
)
from skip_attn_compile.timestep import float32

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # diffusers' schedulers and a newer numpy


def shifted(s, n):
    """t = s u / (1 + (s - 1) u), u uniform from 1 to 0 in n + 1 points, the first n."""
    return [s * u / (1 + (s - 1) * u) for u in (1 - i / n for i in range(n))]


@pytest.mark.parametrize(("cutoff", "dense"), [(1.0, 0), (0.99, 6), (0.97, 14), (0.95, 19), (0.90, 28), (0.86, 33), (0.0, 0)])
def test_dense_steps_of_the_shifted_schedule(cutoff, dense):
    t = shifted(12, 49)
    for form in (t, tuple(t), np.array(t), np.array(t, dtype=np.float32), torch.tensor(t), [torch.tensor(x) for x in t], iter(t)):
        assert dense_steps(form, cutoff) == dense


def test_equal_is_sparse_in_float32():
    t = [1.0, 0.97, 0.97 + 1e-12, float(np.nextafter(np.float32(0.97), np.float32(1))), 0.5]
    assert dense_steps(t, 0.97) == 2


def test_raw_timesteps_are_divided():
    t = [999, 970, 969, 0]
    assert dense_steps(t, 0.97, num_train_timesteps=1000) == 1
    assert dense_steps(t, 0.969, num_train_timesteps=1000) == 2
    assert dense_steps([1000], 0.99, num_train_timesteps=1000) == 1
    assert dense_steps([], 0.5) == 0


@pytest.mark.parametrize("t", [[0.5, 999], [-0.1], [1.001], [math.nan], ["0.5"], [None], [True], torch.tensor([999, 0])], ids=str)
def test_level_outside_its_range_names_num_train_timesteps(t):
    for plan in (lambda: dense_steps(t, 0.5), lambda: cutoff_for_dense_steps(t, 1)):
        with pytest.raises(ValueError, match=r"t must be noise levels in \[0, 1\], got .*num_train_timesteps="):
            plan()


@pytest.mark.parametrize("value", [1001, -1, math.inf, "1"])
def test_raw_timestep_outside_its_range_is_named(value):
    with pytest.raises(ValueError, match=r"raw timesteps in \[0, num_train_timesteps=1000\], got"):
        dense_steps([500, value], 0.5, num_train_timesteps=1000)


@pytest.mark.parametrize("t", [0.5, "0.5", None, torch.tensor(0.5)], ids=repr)
def test_t_must_be_a_sequence(t):
    with pytest.raises(ValueError, match="t must be a sequence of noise levels"):
        dense_steps(t, 0.5)


@pytest.mark.parametrize("cutoff", [-0.1, 1.1, 970, math.nan, None, True, "0.5"])
def test_bad_cutoff_is_named(cutoff):
    with pytest.raises(ValueError, match=r"D must be a noise level in \[0, 1\], 1 = pure noise and 0 = no gate, got "):
        dense_steps([0.5], cutoff)


@pytest.mark.parametrize("bad", [0, -1000, math.nan, "1000"])
def test_bad_num_train_timesteps_is_named(bad):
    with pytest.raises(ValueError, match="num_train_timesteps must be a number > 0"):
        dense_steps([0.5], 0.5, num_train_timesteps=bad)


# The cutoff for a number of dense steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "t", [shifted(12, 49), shifted(1, 30), shifted(5, 4)[::-1], [1.0], [0.3, 0.7, 0.5]], ids=["12", "1", "rising", "one", "any"]
)
def test_cutoff_gives_exactly_k_dense_steps(t):
    cutoffs = [cutoff_for_dense_steps(t, k) for k in range(len(t) + 1)]
    assert [dense_steps(t, cutoff) for cutoff in cutoffs] == list(range(len(t) + 1))
    assert cutoffs[0] == 0.0  # the gate switched off
    assert all(0 < cutoff < 1 for cutoff in cutoffs[1:])


def test_cutoff_is_short_and_survives_rounded_timesteps():
    t = shifted(5, 30)
    for k in range(1, 31):
        cutoff = cutoff_for_dense_steps(t, k)
        assert len(str(cutoff)) <= 6
        assert dense_steps([math.floor(1000 * x) for x in t], cutoff, num_train_timesteps=1000) == k
    assert cutoff_for_dense_steps([0.9, 0.5], 1) == 0.7


def test_cutoff_of_raw_timesteps():
    cutoff = cutoff_for_dense_steps([999, 900, 800], 2, num_train_timesteps=1000)
    assert 0.8 <= cutoff < 0.9


def test_cutoff_between_neighbouring_floats():
    upper = float(np.nextafter(np.float32(0.5), np.float32(1)))
    assert dense_steps([upper, 0.5], cutoff_for_dense_steps([upper, 0.5], 1)) == 1


@pytest.mark.parametrize(
    ("t", "k", "possible"),
    [
        ([0.9, 0.9, 0.5, 0.5, 0.5, 0.1], 1, "0, 2, 5-6"),
        ([0.9, 0.9, 0.5, 0.5, 0.5, 0.1], 4, "0, 2, 5-6"),
        ([0.9, 0.5, 0.0], 3, "0-2"),  # the clean sample is never above a cutoff
        ([0.9, 0.5], 3, "0-2"),
        ([0.9, 0.5], -1, "0-2"),
        ([0.9, 0.5], 1.0, "0-2"),
        ([0.9, 0.5], True, "0-2"),
        ([0.5, 0.5 + 1e-12], 1, "0, 2"),  # one float32
        ([], 1, "0"),
    ],
)
def test_impossible_k_says_which_are_possible(t, k, possible):
    with pytest.raises(ValueError, match=f"k must be one of {possible} for these {len(t)} levels, got {k}"):
        cutoff_for_dense_steps(t, k)


# Real schedulers ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def diffusers():
    return pytest.importorskip("diffusers")


CUTOFFS = (1.0, 0.97, 0.9, 0.75, 0.5, 0.0)


def counts(t):
    return [(cutoff, n := sum(x > cutoff for x in t) if cutoff else 0, len(t) - n) for cutoff in CUTOFFS]


def test_unipc_with_flow_sigmas_uses_the_float_sigma(diffusers):
    scheduler = diffusers.UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=5.0, prediction_type="flow_prediction")
    table = schedule_table(scheduler, 30, CUTOFFS)
    u = np.linspace(1, 1 / 1000, 31)[:-1]
    assert table.rows == counts(5 * u / (1 + 4 * u))
    assert table.rows[1] == ScheduleRow(0.97, 5, 25) == (0.97, 5, 25)
    # integer timesteps (999, 993, ...) lie below their sigmas
    scheduler.set_timesteps(30)
    assert all(x / 1000 < t for x, t in zip(scheduler.timesteps.tolist(), table.t, strict=True))


def test_flow_match_euler_with_shift(diffusers):
    table = schedule_table(diffusers.FlowMatchEulerDiscreteScheduler(shift=12.0), 49, CUTOFFS, sigmas=[1 - i / 49 for i in range(49)])
    assert table.rows == counts(shifted(12, 49))
    assert [row.dense_steps for row in table.rows[:3]] == [0, 14, 28]


def test_flow_match_euler_with_dynamic_shift(diffusers):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    uniform = [1 - i / 28 for i in range(28)]
    table = schedule_table(scheduler, 28, CUTOFFS, mu=1.15, sigmas=uniform)
    assert table.rows == counts(shifted(math.exp(1.15), 28))
    with pytest.raises(ValueError, match=r"mu must be given: FlowMatchEulerDiscreteScheduler .*use_dynamic_shifting.*mu=1.15"):
        schedule_table(scheduler, 28, CUTOFFS, sigmas=uniform)


def test_pipelines_pass_their_uniform_sigmas(diffusers):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    flux = type("MyFlux", (type("FluxPipeline", (), {}),), {"scheduler": scheduler})()
    assert schedule_table(flux, 28, CUTOFFS, mu=1.15).rows == counts(shifted(math.exp(1.15), 28))
    assert schedule_table(flux, 2, CUTOFFS, mu=0.0, sigmas=[0.8, 0.6]).t == pytest.approx([0.8, 0.6])
    other = SimpleNamespace(scheduler=diffusers.FlowMatchEulerDiscreteScheduler())
    assert schedule_table(other, 4, CUTOFFS).t[-1] == pytest.approx(0.001)  # the scheduler's own


UNIFORM = re.compile(
    r"^[^#\n]*linspace\(1(\.0)?, (1(\.0)? / num_inference_steps, num_inference_steps|0(\.0)?, num_inference_steps \+ 1)[,)]", re.M
)


@pytest.mark.parametrize("name", _UNIFORM_SIGMAS.split())
def test_pipeline_does_pass_uniform_sigmas(diffusers, name):
    diffusers_module = sys.modules[getattr(diffusers, f"{name}Pipeline").__module__]
    assert UNIFORM.search(inspect.getsource(diffusers_module))


def test_dpm_solver(diffusers):
    table = schedule_table(diffusers.DPMSolverMultistepScheduler(), 20, CUTOFFS)
    assert table.rows == counts(np.linspace(0, 999, 21).round()[:0:-1] / 1000)


def test_dpm_solver_with_flow_sigmas(diffusers):
    scheduler = diffusers.DPMSolverMultistepScheduler(use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction")
    u = np.linspace(0.999, 0, 21)[:-1]
    assert schedule_table(scheduler, 20, CUTOFFS).rows == counts(3 * u / (1 + 2 * u))


def test_ddim(diffusers):
    table = schedule_table(diffusers.DDIMScheduler(), 50, CUTOFFS)
    assert table.rows == counts([i * 20 / 1000 for i in reversed(range(50))])


def test_cogvideox_dpm(diffusers):
    table = schedule_table(diffusers.CogVideoXDPMScheduler(timestep_spacing="trailing"), 50, CUTOFFS)
    assert table.rows == counts([(1000 - 20 * i - 1) / 1000 for i in range(50)])


def test_mochi_counts_upwards(diffusers):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    table = schedule_table(scheduler, 4, CUTOFFS, sigmas=[1.0, 0.9, 0.7, 0.3])
    assert table.t == pytest.approx([1.0, 0.9, 0.7, 0.3])


@pytest.mark.parametrize("name", ["HeunDiscreteScheduler", "KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler"])
def test_second_order_steps_count_once(diffusers, name):
    scheduler = getattr(diffusers, name)()
    table = schedule_table(scheduler, 10, CUTOFFS)
    assert table.t == pytest.approx(np.linspace(999, 0, 10) / 1000, abs=1e-3)
    assert table.rows == counts(np.linspace(999, 0, 10) / 1000)
    scheduler.set_timesteps(10)
    assert len(noise_levels(scheduler)) == len(scheduler.timesteps) == 19  # one for each model call


def test_flow_match_heun_steps_count_once(diffusers):
    scheduler = diffusers.FlowMatchHeunDiscreteScheduler(shift=3.0)
    u = np.linspace(1, 3 * 0.001 / (1 + 2 * 0.001), 10)  # its smallest sigma is shifted twice
    table = schedule_table(scheduler, 10, CUTOFFS)
    assert table.t == pytest.approx(3 * u / (1 + 2 * u), abs=1e-6)


def test_pndm_repeats_its_warm_up(diffusers):
    table = schedule_table(diffusers.PNDMScheduler(skip_prk_steps=True), 10, CUTOFFS)
    assert table.t == pytest.approx([0.9, 0.8, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0])


def test_edm_and_angles(diffusers):
    edm = diffusers.EDMEulerScheduler(sigma_max=80.0, sigma_min=0.002)
    assert schedule_table(edm, 5, CUTOFFS).t[0] == pytest.approx(80 / 81)
    svd = diffusers.EulerDiscreteScheduler(
        prediction_type="v_prediction", timestep_type="continuous", use_karras_sigmas=True, sigma_max=700.0, sigma_min=0.002
    )
    assert schedule_table(svd, 5, CUTOFFS).t[0] == pytest.approx(700 / 701)
    cosmos2 = diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    cosmos2.register_to_config(sigma_max=80.0, sigma_min=0.002)  # as Cosmos2TextToImagePipeline does
    assert schedule_table(cosmos2, 5, CUTOFFS).t[0] == pytest.approx(80 / 81)
    cosmos25 = diffusers.UniPCMultistepScheduler(
        use_flow_sigmas=True, use_karras_sigmas=True, prediction_type="flow_prediction", sigma_max=200.0, sigma_min=0.01
    )
    assert schedule_table(cosmos25, 5, CUTOFFS).t[0] == pytest.approx(200 / 201)
    angles = schedule_table(diffusers.SCMScheduler(), 3, CUTOFFS, max_timesteps=math.pi / 2, intermediate_timesteps=None)
    assert angles.t == pytest.approx([1, 0.633975, 0.366025], abs=1e-5)  # tan / (1 + tan) of 90, 60, 30 degrees


def test_levels_without_an_end(diffusers):
    assert schedule_table(diffusers.DDPMWuerstchenScheduler(), 4, CUTOFFS).t == pytest.approx([1, 0.75, 0.5, 0.25])


def test_scheduler_is_not_changed(diffusers):
    scheduler = diffusers.UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=5.0, prediction_type="flow_prediction")
    scheduler.set_timesteps(7)
    before = copy.deepcopy(vars(scheduler))
    schedule_table(SimpleNamespace(scheduler=scheduler), 30, CUTOFFS)
    assert vars(scheduler).keys() == before.keys()
    for name, value in vars(scheduler).items():
        same = torch.equal(value, before[name]) if isinstance(value, torch.Tensor) else value == before[name]
        assert same, name
    dpm = diffusers.DPMSolverMultistepScheduler(use_flow_sigmas=True, use_dynamic_shifting=True, prediction_type="flow_prediction")
    schedule_table(dpm, 5, CUTOFFS, mu=2.0)  # this set_timesteps writes to its config
    assert dpm.config.flow_shift == 1.0


def test_shift_set_after_construction_counts(diffusers):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_shift(12.0)
    assert schedule_table(scheduler, 49, [0.97], sigmas=[1 - i / 49 for i in range(49)]).rows == [(0.97, 14, 35)]


def test_str_is_the_table(diffusers):
    scheduler = diffusers.UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=5.0, prediction_type="flow_prediction")
    text = str(schedule_table(scheduler, 30, [1, 0.97, 0.0]))
    assert text == (
        "UniPCMultistepScheduler, 30 steps, t = 1.0000 ... 0.1508\n"
        "cutoff  dense  sparse\n"
        "     1      0      30\n"
        "  0.97      5      25\n"
        "     0      0      30"
    )


@pytest.mark.parametrize(
    ("arguments", "keywords", "match"),
    [
        ((object(), 4, [0.5]), {}, "needs a diffusers pipeline with a scheduler, or a scheduler, got <object"),
        ((SimpleNamespace(scheduler=None), 4, [0.5]), {}, "got SimpleNamespace with scheduler None"),
        ((dict, 4, [0.5]), {}, "got <class 'dict'>"),
        ((None, 0, [0.5]), {}, "num_inference_steps must be an integer >= 1, got 0"),
        ((None, 4.0, [0.5]), {}, "num_inference_steps must be an integer >= 1, got 4.0"),
        ((None, 4, 0.5), {}, r"cutoffs must be a sequence .* got 0.5; write cutoffs=\(0.5,\)"),
        ((None, 4, [0.5, 970]), {}, r"cutoffs must be a noise level in \[0, 1\], 1 = pure noise and 0 = no gate, got 970"),
        ((None, 4, [0.5]), {"shift": 3}, "set_timesteps takes num_inference_steps, device, sigmas, mu, timesteps, got shift="),
        ((None, 4, [0.5]), {"sigmas": [1.0, 0.5]}, "num_inference_steps must be the number of sigmas or timesteps, 2, got 4"),
    ],
    ids=["object", "no scheduler", "class", "0", "4.0", "number", "970", "keyword", "length"],
)
def test_bad_request_is_named(diffusers, arguments, keywords, match):
    scheduler = arguments[0] or diffusers.FlowMatchEulerDiscreteScheduler()
    with pytest.raises(ValueError, match=match):
        schedule_table(scheduler, *arguments[1:], **keywords)


def test_unknown_schedule_is_an_error(diffusers):
    with pytest.raises(ValueError, match=r"CMStochasticIterativeScheduler must have timesteps .*dense_steps"):
        schedule_table(diffusers.CMStochasticIterativeScheduler(), 4, [0.5])


def test_levels_are_what_the_gate_compares(diffusers):
    scheduler = diffusers.DDIMScheduler()
    scheduler.set_timesteps(50)
    assert noise_levels(scheduler) == [float32(x / 1000) for x in scheduler.timesteps.tolist()]
