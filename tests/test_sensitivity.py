"""Sensitivity: errors are those of serving, the worst layers and steps are found, and the proposal keeps its budget in a run of its own."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn

from models import Dit, dit, reference_sdpa, skip_config, tokens
from pipelines import run as run_pipeline
from pipelines import wan22
from skip_attn_compile import Calibration, SkipConfig, backend, sensitivity, timestep, watch
from skip_attn_compile.frontier import Point, Sensitivity
from skip_attn_compile.gate import Gate
from skip_attn_compile.layers import LayerName
from skip_attn_compile.ops import problem_of
from skip_attn_compile.sensitivity import search
from skip_attn_compile.trial import Difference
from tiny_wan.sampling import load_model, sample

CONFIG = skip_config(0.5, tile_order="own_first")
ALL = {"config": CONFIG, "progress": False}


def with_a_loud_block(number: int, blocks: int = 3) -> Dit:
    """Attention of one block counts twenty times."""
    model = dit(blocks)
    model.blocks[number].attn1.to_out.weight.mul_(20)
    return model


def served(model: nn.Module, config: SkipConfig, run: Callable[[nn.Module], Tensor]) -> tuple[float, float]:
    """(relative error, PSNR at the dense output's range) of the compiled model."""
    dense = run(model)
    torch.compiler.reset()
    skipped = run(torch.compile(model, backend=backend(config, inner="eager", model=model)))
    mean_square = (dense - skipped).square().mean()
    return float((mean_square / dense.square().mean()).sqrt()), float(10 * torch.log10((dense.max() - dense.min()) ** 2 / mean_square))


def test_errors_are_those_of_serving_and_the_loud_layer_is_left_dense() -> None:
    model = with_a_loud_block(1)
    run = lambda m: m(tokens(seed=3))
    quiet = served(model, skip_config(0.5, tile_order="own_first", ignore=("blocks.1.*",)), run)[1]
    loud = served(model, CONFIG, run)[1]
    assert loud < quiet - 6
    found = sensitivity(model, lambda: run(model), psnr=quiet - 3, **ALL)
    assert [row.layer.full for row in found.layers] == [f"blocks.{n}.attn1" for n in range(3)]
    for row in found.layers:
        alone = skip_config(0.5, tile_order="own_first", include=(row.layer.full,))
        assert (row.error, row.psnr) == pytest.approx(served(model, alone, run), rel=1e-3)
    assert max(found.layers, key=lambda row: row.cost).layer.full == "blocks.1.attn1"
    assert found.ignore == ("blocks.1.attn1",)
    assert found.disabled_until_timestep == 0.0
    assert found.proposal.psnr == pytest.approx(served(model, found.config(), run)[1], abs=0.01)
    assert found.proposal.psnr >= quiet - 3
    assert not model._forward_pre_hooks
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("additive", [False, True])
def test_a_target_under_a_key_mask_is_that_of_serving(additive: bool) -> None:
    """Each sample has its own number of keys, and so its own lambda."""
    model = dit(2, cross=True)
    mask = (torch.arange(512) < torch.tensor([[512], [200]]))[:, None, None]
    mask = torch.where(mask, 0.0, -math.inf) if additive else mask
    run = lambda m: m(tokens(2), tokens(2, seed=9), mask)
    config = skip_config(None, target_sparsity=0.5, calibration=Calibration(20.0, 4.0), ignore=("*.attn1",))
    found = sensitivity(model, lambda: run(model), config=config, psnr=0.0, progress=False)
    assert {row.layer.full for row in found.layers} == {"blocks.0.attn2", "blocks.1.attn2"}
    assert found.proposal.share > 0.01
    assert (found.proposal.error, found.proposal.psnr) == pytest.approx(served(model, config, run), rel=1e-3)


def test_a_blocks_error_is_that_of_its_output_on_dense_inputs() -> None:
    model = dit(2, cross=True)
    x, context = tokens(), tokens(seed=9)
    found = sensitivity(model, lambda: model(x, context), alone=False, **ALL)
    assert {row.layer.full for row in found.layers} == {f"blocks.{n}.attn{m}" for n in range(2) for m in (1, 2)}
    between = model.blocks[0](x, context)
    dense = model.blocks[1](between, context)
    for attention, thresholds in (("attn1", (0.5, 0.0)), ("attn2", (0.0, 0.5))):
        with reference_sdpa(*thresholds, tile_order="own_first") as counts:
            sparse = model.blocks[1](between, context)
        (row,) = [row for row in found.layers if row.layer.full == f"blocks.1.{attention}"]
        assert row.block_error == pytest.approx(float((dense - sparse).norm() / dense.norm()), rel=1e-3)
        assert (row.visited, row.skipped) == counts[thresholds.index(0.5)]
        assert row.error is None
        assert row.psnr is None


def test_a_block_that_changes_its_input_has_no_error_of_its_own() -> None:
    model = dit(2)

    def add_one(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].add_(1.0)

    change = model.blocks[0].register_forward_pre_hook(add_one)
    found = sensitivity(model, lambda: model(tokens()), **ALL)
    change.remove()
    assert found.layers[0].block_error is None
    assert found.layers[0].error > 0
    assert found.layers[1].block_error > 0


def test_a_call_of_a_block_without_attention_has_no_error_to_count() -> None:
    """At the last step each block runs its feed-forward layer alone."""
    model = dit(1)
    (block,) = model.blocks

    def run(both: bool) -> Tensor:
        output = model(tokens())
        if both:
            attention, block.attn1 = block.attn1, torch.nn.Identity()
            output = model(output)
            block.attn1 = attention
        return output

    found = [sensitivity(model, lambda both=both: run(both), alone=False, **ALL) for both in (False, True)]
    assert found[0].layers[0].block_error == found[1].layers[0].block_error > 0


def test_what_the_configured_implementation_does_not_take_is_kept_as_in_serving(caplog: pytest.LogCaptureFixture) -> None:
    pipe = wan22()
    config = skip_config(0.9, tile_order="own_first")
    elsewhere = dataclasses.replace(config, implementation="triton")
    configs = {"transformer": elsewhere, "transformer_2": config}
    found = sensitivity(pipe, lambda: run_pipeline(pipe, steps=2), config=configs, alone=False, progress=False)
    assert {row.layer.component for row in found.layers} == {"transformer_2"}
    assert "attention calls were left as they are: triton runs on cuda, not on cpu" in caplog.text
    model = dit(1)
    with pytest.raises(ValueError, match="no attention call that may skip, for this reason: triton runs on cuda"):
        sensitivity(model, lambda: model(tokens()), config=elsewhere, progress=False)


def test_what_only_the_slow_reference_would_take_on_a_gpu_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator itself would run it, and what it skips would count as speed-up."""
    old = {"device_type": "cuda", "capability": (7, 5)}
    monkeypatch.setattr(watch, "problem_of", lambda *call: problem_of(*call)._replace(**old))
    model = dit(1)
    with pytest.raises(ValueError, match="no attention call that may skip, for this reason: .*reference serves cuda only when asked"):
        sensitivity(model, lambda: model(tokens()), **ALL)


def test_an_empty_tensor_in_the_output_is_passed_over() -> None:
    model = dit(1)
    with_empty = lambda: (model(tokens()), torch.empty(0, 4))
    assert sensitivity(model, with_empty, **ALL) == sensitivity(model, lambda: model(tokens()), **ALL)


def sampler(model: nn.Module, seed: int, early: float) -> Tensor:
    """Four steps, the first of which counts `early` times."""
    x = tokens(seed=seed)
    for t in (1.0, 0.75, 0.5, 0.25):
        with timestep(t):
            x = x + (early if t == 1.0 else 1.0) * 0.1 * model(x)
    return x


def test_loud_steps_are_left_to_the_gate() -> None:
    model = dit(2)
    run = lambda m: sampler(m, 0, 30.0)
    gated = served(model, skip_config(0.5, tile_order="own_first", disabled_until_timestep=0.8), run)[1]
    assert gated > served(model, CONFIG, run)[1] + 6
    found = sensitivity(model, lambda: run(model), psnr=gated - 3, **ALL)
    assert 0.75 <= found.disabled_until_timestep < 1.0
    assert found.ignore == ()
    assert [step.t for step in found.steps] == [1.0, 0.75, 0.5, 0.25]
    assert found.proposal.share == pytest.approx(0.75 * found.points[1].share, abs=0.05)
    assert found.config(skip_config(0.1, disabled_until_timestep=0.5)).disabled_until_timestep == 0.5, "the stronger gate"
    again = sensitivity(model, lambda: run(model), psnr=gated - 3, gates=(0.3, 0.8), alone=False, **ALL)
    assert again.disabled_until_timestep == 0.8
    assert {point.disabled_until_timestep for point in again.points} == {0.0, 0.8}, "0.3 would skip less than what is in hand"


def test_a_configs_own_gate_holds() -> None:
    model = dit(2)
    config = skip_config(0.5, tile_order="own_first", disabled_until_timestep=0.6)
    found = sensitivity(model, lambda: sampler(model, 0, 1.0), config=config, psnr=0.0, progress=False)
    assert [step.share > 0 for step in found.steps] == [False, False, True, True]
    assert found.config().disabled_until_timestep == found.disabled_until_timestep == 0.6
    assert "for PSNR >= 0 dB: disabled_until_timestep=0.6, ignore=()" in str(found)
    assert {point.disabled_until_timestep for point in found.points} == {0.6}


def test_gates_that_differ_are_shown_by_component() -> None:
    configs = {"a": skip_config(0.5, disabled_until_timestep=0.9), "b": CONFIG}
    shown = lambda gate: str(Sensitivity((), (), (Point((), gate, 0.3, 1.0, 0.0, 31.0),), 30.0, 1.0, configs))
    assert "disabled_until_timestep={'a': 0.9, 'b': 0.0}, ignore=()" in shown(0.0)
    assert "disabled_until_timestep=0.5, ignore=()" in shown(0.5)


def test_the_speedup_is_the_flop_limit_of_the_tiles_skipped() -> None:
    model = dit(2)
    found = sensitivity(model, lambda: model(tokens()), alone=False, attention_share=0.5, psnr=0.0, **ALL)
    share = sum(row.skipped for row in found.layers) / sum(row.visited for row in found.layers)
    assert 0.05 < share < 0.9
    assert found.proposal.share == pytest.approx(share, rel=0.2), "the trajectory is a little different"
    assert found.proposal.speedup == 1 / (1 - 0.5 * found.proposal.share / 2)
    assert [point.psnr for point in found.frontier] == sorted(point.psnr for point in found.frontier)
    assert found.frontier[-1] == found.points[0], "the dense run"
    assert found.to_dict()["proposal"]["ignore"] == []
    assert found.to_dict()["points"][0]["psnr"] is None, "strict JSON has no infinity"
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == found.to_dict()


def test_where_nothing_keeps_the_budget_all_is_dense() -> None:
    model = dit(2)
    found = sensitivity(model, lambda: model(tokens()), alone=False, psnr=200.0, **ALL)
    assert set(found.ignore) == {"blocks.0.attn1", "blocks.1.attn1"}
    assert found.proposal.psnr == math.inf
    assert "nothing can be skipped within PSNR >= 200 dB: lower the threshold or the target" in str(found)


@pytest.mark.parametrize("layers", [1, 2, 5, 40])
@pytest.mark.parametrize("needed", [0, 1, 4, 39, 40])
def test_bisection_finds_the_fewest_dense_layers(layers: int, needed: int) -> None:
    measured: list[Point] = []
    share = lambda dense, cutoff: (1 - dense / layers) * (cutoff or 1.0)

    def measure(dense: int, cutoff: float) -> Point:
        psnr = 31.0 if dense >= min(needed, layers) - (0 if not cutoff else 20 * (1 - cutoff)) else 29.0
        measured.append(Point((), cutoff, share(dense, cutoff), 1.0, 0.0, psnr))
        return measured[-1]

    search(layers, [0.0, 0.9, 0.5], share, measure, 30.0)
    searched = tuple(measured)
    everything = [measure(dense, cutoff) for dense, cutoff in itertools.product(range(layers), (0.0, 0.9, 0.5))]
    best = lambda points: max((point.share for point in points if point.psnr >= 30), default=0.0)
    assert best(searched) == best(everything)
    assert len(searched) <= 3 * (1 + math.ceil(math.log2(layers)))
    assert len(set(searched)) == len(searched)


def test_the_proposal_is_the_best_that_was_measured() -> None:
    """A gate that should skip more than what is in hand, and does not."""
    layers = (LayerName("", "a"), LayerName("", "b"))
    points = [Point(layers, 0.0, 0.0, 1.0, 0.0, math.inf)]

    def measure(dense: int, cutoff: float) -> Point:
        keeps = dense or cutoff
        points.append(Point(layers[:dense], cutoff, 0.3 if dense else 0.25, 1.0, 0.0, 31.0 if keeps else 29.0))
        return points[-1]

    search(2, [0.0, 0.5], lambda dense, cutoff: 0.4 if cutoff else 0.5, measure, 30.0)
    assert [(point.share, point.psnr) for point in points[1:]] == [(0.25, 29.0), (0.3, 31.0), (0.25, 31.0)]
    found = Sensitivity((), (), tuple(points), 30.0, 1.0, {"": CONFIG})
    assert found.proposal == points[2]
    assert found.ignore == ("a",)
    assert Sensitivity((), (), tuple(points), 40.0, 1.0, {"": CONFIG}).proposal == points[0], "the dense run"


def test_what_is_not_finite_keeps_no_budget() -> None:
    """min() would drop a NaN."""
    assert Difference.of(torch.ones(4), torch.tensor([1.0, math.nan, 1.0, 1.0])).psnr(1.0) == -math.inf
    model = dit(2)
    calls = itertools.count()

    def run() -> Tensor:
        output = model(tokens())
        return output if next(calls) == 0 else output / 0

    found = sensitivity(model, run, psnr=-100.0, **ALL)
    assert set(found.ignore) == {"blocks.0.attn1", "blocks.1.attn1"}
    assert found.points[1].error == math.inf


@dataclasses.dataclass
class Output:
    sample: Tensor
    name: str


def test_what_a_record_holds_is_compared() -> None:
    model = dit(2)
    part = lambda: model(tokens())[..., :4]
    assert sensitivity(model, lambda: Output(part(), "a"), **ALL) == sensitivity(model, part, **ALL)


def test_bytes_of_a_picture_are_compared() -> None:
    model = dit(2)
    pixels = lambda y: (y * 40 + 128).clamp(0, 255).to(torch.uint8)
    found = sensitivity(model, lambda: pixels(model(tokens())), **ALL)
    compiled = torch.compile(model, backend=backend(CONFIG, inner="eager"))
    dense, skipped = pixels(model(tokens())).float(), pixels(compiled(tokens())).float()
    mean_square = float((dense - skipped).square().mean())
    assert found.points[1].psnr == pytest.approx(10 * math.log10(float(dense.max() - dense.min()) ** 2 / mean_square), abs=0.1)


def test_a_wrong_base_for_the_proposal_is_named() -> None:
    model = dit(1)
    found = sensitivity(model, lambda: model(tokens()), **ALL)
    for base in (3, "x", {"transformer": CONFIG}, {"": 3}, {}):
        with pytest.raises(ValueError, match="base must be a SkipConfig, got"):
            found.config(base)
    assert found.config(CONFIG) == found.config()


def test_an_output_that_was_zero_has_an_error_too() -> None:
    assert Difference.of(torch.zeros(4), torch.ones(4)).relative == math.inf


def test_a_compiled_model_is_measured_eagerly() -> None:
    model = dit(2)
    compiled = torch.compile(model, backend=backend(skip_config(0.9), inner="eager"))
    assert sensitivity(model, lambda: compiled(tokens()), **ALL) == sensitivity(model, lambda: model(tokens()), **ALL)


def test_calls_that_cannot_skip_count_as_no_layer(caplog: pytest.LogCaptureFixture) -> None:
    model = dit(1, cross=True)
    mask = torch.ones(1, 1, 512, 512, dtype=torch.bool).tril()
    config = skip_config(0.5, ignore=("attn3",))
    found = sensitivity(model, lambda: model(tokens(), tokens(seed=9), mask), config=config, progress=False)
    assert [row.layer.full for row in found.layers] == ["blocks.0.attn1"]
    assert "ignore pattern 'attn3' matched no attention layer; nearest: " in caplog.text
    cross = skip_config(0.5, include=("*.attn2",))
    with pytest.raises(ValueError, match="no attention call that may skip, for this reason: .*mask.* is not a key mask"):
        sensitivity(model, lambda: model(tokens(), tokens(seed=9), mask), config=cross, progress=False)
    model.requires_grad_(True)
    with pytest.raises(ValueError, match="for this reason: .*(a gradient is needed|requires grad)"):
        sensitivity(model, lambda: model(tokens(), tokens(seed=9)), **ALL)


def test_what_a_run_gives_is_compared_whatever_it_is() -> None:
    model = dit(2)

    def nothing(seed: int) -> None:
        model(tokens(seed=seed))

    def images(seed: int) -> dict[str, list[object]]:
        return {"images": [model(tokens(seed=seed)).numpy()], "names": ["a"]}

    tensors = sensitivity(model, lambda seed: (model(tokens(seed=seed)),), range(2), **ALL)
    for run in (nothing, images):
        assert sensitivity(model, run, range(2), **ALL).points == tensors.points


def test_a_pipeline_of_two_experts() -> None:
    pipe = wan22()
    config = skip_config(0.9, tile_order="own_first", ignore=("*.attn2",))
    found = sensitivity(pipe, lambda seed: run_pipeline(pipe, steps=4, seed=seed), [0], config=config, psnr=200.0, progress=False)
    names = {f"{expert}.blocks.{n}.attn1" for expert in ("transformer", "transformer_2") for n in range(2)}
    assert {row.layer.full for row in found.layers} == names
    assert len(found.steps) == 4
    configs = found.config()
    assert configs["transformer_2"].ignore == ("*.attn2", *(n.removeprefix("transformer_2.") for n in found.ignore if "_2" in n))
    one = sensitivity(pipe, lambda: run_pipeline(pipe, steps=2), config={"transformer_2": config}, alone=False, progress=False)
    assert {row.layer.component for row in one.layers} == {"transformer_2"}
    assert list(one.config()) == ["transformer_2"]


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    model, state, ran = with_a_loud_block(1), tmp_path / "state.json", []

    def run(seed: int, stop_at: int | None = None) -> Tensor:
        ran.append(seed)
        if len(ran) == stop_at:
            raise KeyboardInterrupt
        return model(tokens(seed=seed))

    whole = sensitivity(model, run, range(2), psnr=30, **ALL)
    runs = len(ran)
    ran.clear()
    with pytest.raises(KeyboardInterrupt):
        sensitivity(model, lambda seed: run(seed, stop_at=8), range(2), psnr=30, state=state, **ALL)
    assert len(json.loads(state.read_text())["outcomes"]) == 2, "six whole runs, of which one is the dense one"
    assert sensitivity(model, run, range(2), psnr=30, state=state, **ALL) == whole
    assert len(ran) == 8 + runs - 4
    ran.clear()
    assert sensitivity(model, run, range(2), psnr=30, state=state, **ALL) == whole
    assert ran == [0, 1], "only the dense run"
    ran.clear()
    assert sensitivity(model, run, range(2), psnr=0, state=state, **ALL).ignore == ()
    assert ran == [0, 1], "another budget asks for nothing new here"


def test_a_state_of_other_runs_is_refused(tmp_path: Path) -> None:
    model, state = dit(2), tmp_path / "state.json"
    run = lambda: model(tokens())
    sensitivity(model, run, state=state, **ALL)
    written = state.read_text()
    elsewhere = "give another state file, or remove it"
    with pytest.raises(ValueError, match=f"state.json holds runs with items 1, here it is 2; {elsewhere}"):
        sensitivity(model, lambda _: run(), [1, 2], state=state, **ALL)
    with pytest.raises(ValueError, match="holds runs with configs .*threshold=0.5.*, here it is .*threshold=0.4"):
        sensitivity(model, run, state=state, config=skip_config(0.4, tile_order="own_first"), progress=False)
    with pytest.raises(ValueError, match="holds runs with peak None, here it is 2.0"):
        sensitivity(model, run, state=state, peak=2.0, **ALL)
    with pytest.raises(ValueError, match="holds runs with tiles 128, here it is 32"):
        sensitivity(model, lambda: model(tokens(length=256)), state=state, **ALL)
    with pytest.raises(ValueError, match="holds runs with first inputs .*, here it is"):
        sensitivity(model, lambda: model(tokens(seed=1)), state=state, **ALL)
    conditioned = dit(2, cross=True)
    noise, other_state = tokens(), tmp_path / "other.json"
    sensitivity(conditioned, lambda: conditioned(noise, tokens(seed=1)), state=other_state, peak=numpy.float32(2), **ALL)
    sensitivity(conditioned, lambda: conditioned(noise, tokens(seed=1)), state=other_state, peak=2, **ALL)
    with pytest.raises(ValueError, match="holds runs of something else, the dense run gives another output: inputs, weights or sampling"):
        sensitivity(conditioned, lambda: conditioned(noise, tokens(seed=2)), state=other_state, peak=2, **ALL)
    tuned = dit(2, seed=1)
    with pytest.raises(ValueError, match="holds runs with models .*Dit, 11,872 parameters, weights .*, here it is .*11,872"):
        sensitivity(tuned, lambda: tuned(tokens()), state=state, **ALL)
    smaller = dit(1)
    with pytest.raises(ValueError, match="holds runs with models .*11,872 parameters.*, here it is .*6,464 parameters"):
        sensitivity(smaller, lambda: smaller(tokens()), state=state, **ALL)
    assert state.read_text() == written


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"skip_attn_compile_sensitivity": 9}', '{"skip_attn_compile_sensitivity": 1, "about": {}, "outcomes": [[1]]}'],
)
def test_a_state_that_sensitivity_did_not_write_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"state must be a file that sensitivity\(state=...\) wrote, got .*state.json', which is not: .*give another"
    ):
        sensitivity(dit(1), pytest.fail, ["it ran"], state=tmp_path / "state.json", **ALL)
    assert (tmp_path / "state.json").read_text() == text


@pytest.mark.parametrize("odd", [math.nan, 1.001])
def test_noise_levels_that_a_device_tells_are_in_range_or_unknown(odd: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, levels = dit(2), itertools.cycle(map(torch.tensor, (odd, odd, 0.5, 0.5)))  # a call has two layers
    monkeypatch.setattr(Gate, "running_level", lambda _: next(levels))
    found = sensitivity(model, lambda: model(model(tokens())), psnr=0.0, alone=False, **ALL)
    assert [step.t for step in found.steps] == ([0.5, None] if math.isnan(odd) else [1.0, 0.5])


def test_what_cannot_be_measured_is_said() -> None:
    model = dit(1)
    seeds = itertools.count()
    run = lambda: model(tokens())
    for arguments, text in [
        ((model, lambda: model(tokens(seed=next(seeds)))), "same input for the same item, and item 0 began with another; seed its noise"),
        ((model, lambda: None), "run must return the tensors to compare, or call the model, and did neither"),
        ((model, run, None, 1024), "no attention call that may skip: .* or they have fewer than min_kv_len keys"),
        (("model", run), "sensitivity needs a diffusers pipeline, got str"),
        ((model, 3), "sensitivity needs run, a function that drives the model, got 3"),
        ((model, run, "a cat"), r"items must be a sequence, .* got 'a cat'"),
        ((model, run, []), "items must hold at least one, got none"),
        ((model, lambda: model(tokens()) * math.nan), "run must give finite numbers where all is dense"),
        (
            (model, lambda: model(tokens())[:, next(seeds) :]),
            r"the same item each time, and item 0 gave \(1, \d+, 32\), not \(1, \d+, 32\)",
        ),
        ((model, lambda: [model(tokens())] * next(seeds)), "must give as much for the same item each time"),
    ]:
        config = skip_config(0.5, min_kv_len=arguments[3] if len(arguments) > 3 else 0)
        with pytest.raises(ValueError, match=text):
            sensitivity(*arguments[:3], config=config, progress=False)
    for keywords, text in [
        ({"psnr": math.nan}, "psnr must be a number of dB"),
        ({"peak": 0}, "peak a number > 0"),
        ({"attention_share": 1.5}, r"attention_share must be in \(0, 1\]"),
        ({"config": 0.1}, "sensitivity needs a SkipConfig"),
        ({"gates": (0.5,)}, "gates need the noise level of every call"),
        ({"gates": (2.0,)}, "gates"),
        ({"config": skip_config(0.5, implementation="flashinfer")}, "got flashinfer, which counts none; measure with"),
        ({"gates": 0.5}, "gates must be a sequence of noise levels, got 0.5"),
        ({"config": {"transformer": CONFIG}}, "'transformer', which is no denoiser of Dit; a model takes one SkipConfig"),
    ]:
        with pytest.raises(ValueError, match=text):
            sensitivity(model, run, **{**ALL, **keywords})
    assert not model._forward_pre_hooks


def test_the_proposal_for_a_trained_model_keeps_its_budget_when_it_serves() -> None:
    model = load_model()
    words = torch.tensor([[3, 11, 7, 12]])
    run = lambda m: sample(m, words, steps=2, frames=4, seed=5)
    config = SkipConfig(target_sparsity=0.3, calibration=Calibration(45.0, 10.1), tile_order="own_first")
    found = sensitivity(model, lambda: run(model), config=config, psnr=34.0, alone=False, gates=(), progress=False)
    worst = max(found.layers, key=lambda row: row.cost)
    assert worst.layer.full == "blocks.0.attn1"
    assert found.ignore[0] == "blocks.0.attn1"
    assert found.points[1].psnr < 34 <= found.proposal.psnr
    assert 0 < found.proposal.share < found.points[1].share
    assert served(model, found.config(), run)[1] == pytest.approx(found.proposal.psnr, abs=0.3)
