"""Calibration: a known law is found again, counts are those of serving, targets are met on other inputs."""

import dataclasses
import functools
import gc
import json
import logging
import math
import re
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.modules.module as module_hooks
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, WanPipeline
from torch import Tensor, nn

from models import TOKENS, chroma, dit, hunyuan_video_15, ltx, skip_config, tokens
from pipelines import run as run_pipeline
from pipelines import wan22
from skip_attn_compile import (
    Calibration,
    Measurement,
    Rule,
    SkipConfig,
    backend,
    calibrate,
    compile_pipeline,
    kernels,
    observe,
    sensitivity,
    timestep,
    watch,
)
from skip_attn_compile.fit import MeasuredCurve, fit_curves
from skip_attn_compile.gate import Gate
from skip_attn_compile.observe import length_bin
from skip_attn_compile.ops import problem_of
from skip_attn_compile.picture import figure
from skip_attn_compile.schedule import cutoff_for_dense_steps
from skip_attn_compile.timestep import float32, is_dense
from tiny_wan.digits import token_table
from tiny_wan.sampling import load_model, sample

THRESHOLDS = tuple(10 ** (-6 + 6 * n / 31) for n in range(32))
SETUP = {"tile": (64, 128), "tile_order": "ascending"}


def law(a: float, b: float, kv_len: int, noise: float = 0.0) -> MeasuredCurve:
    shares = (math.log(t * kv_len / a) / b + noise * (-1) ** n for n, t in enumerate(THRESHOLDS))
    return MeasuredCurve(kv_len, THRESHOLDS, tuple(min(max(s, 0.0), 1.0) for s in shares))


# The fit


@pytest.mark.parametrize("target", [None, 0.3, 0.7])
@pytest.mark.parametrize(("a", "b"), [(2822.62, 4.388), (7.93, 8.61), (0.5, 14.0)])
def test_a_known_law_is_found_again_within_one_percent(a: float, b: float, target: float | None) -> None:
    found = fit_curves([law(a, b, 75600, 1e-4), law(a, b, 8192, 1e-4)], target=target, **SETUP)
    assert found.calibration.a == pytest.approx(a, rel=0.01)
    assert found.calibration.b == pytest.approx(b, rel=0.01)
    assert found.r2 > 0.999
    assert max(map(abs, found.residuals)) < 0.002
    assert found.calibration.kv_lens == (8192, 75600)
    assert (found.calibration.tile, found.calibration.tile_order) == ((64, 128), "ascending")
    low, high = found.calibration.sparsity_range
    assert 0.02 <= low < high <= 0.95
    if target is not None:
        assert target - 0.2 <= low < target < high <= target + 0.2


def test_a_curve_that_follows_no_law_is_met_near_the_target() -> None:
    bent = MeasuredCurve(4096, THRESHOLDS, tuple(0.6 * (n / 31) ** 4 for n in range(32)))
    assert max(abs(fit_curves([bent], target=s, **SETUP).deviation(bent, s)) for s in (0.1, 0.3, 0.5)) < 0.02
    assert max(abs(fit_curves([bent], **SETUP).deviation(bent, s)) for s in (0.1, 0.3, 0.5)) > 0.03


def test_reach_is_what_lambda_one_skips() -> None:
    assert fit_curves([law(2822.62, 4.388, 75600)], **SETUP).reach == pytest.approx(math.log(75600 / 2822.62) / 4.388)


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        (
            [0.0] * 32,
            "at least 5 points with shares of 2% to 95%, got 0 .*even lambda = 1 skips next to nothing: calibrate at longer sequences",
        ),
        ([0.99] * 32, "every lambda skips nearly all: add smaller thresholds"),
        ([0.0] * 28 + [0.1, 0.2, 0.3, 0.4], "got 4 .*give more thresholds between those measured"),
        ([0.5] * 32, "needs shares that grow with lambda, got 32 points whose shares do not"),
    ],
)
def test_what_cannot_carry_a_curve_is_refused_with_what_to_collect(shares: list[float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fit_curves([MeasuredCurve(4096, THRESHOLDS, tuple(shares))], **SETUP)
    with pytest.raises(ValueError, match="got 0"):
        fit_curves([], **SETUP)


# The run

ALL = {"min_kv_len": 0, "progress": False}


def test_counts_are_those_of_serving_at_each_threshold() -> None:
    model = dit(2, cross=True)
    thresholds = (1e-3, 0.1, 0.5, 1.0)
    measurement = calibrate(
        model, lambda seed: model(tokens(seed=seed), tokens(seed=9)), [0], thresholds=thresholds, tile_order="own_first", **ALL
    )
    before = model(tokens(), tokens(seed=9))
    for number, threshold in enumerate(thresholds):
        be = backend(skip_config(threshold, tile_order="own_first"), inner="eager")
        torch.compile(model, backend=be)(tokens(), tokens(seed=9))
        served = {site.name: (site.visited, site.skipped) for site in be.report().sites}
        assert {cell.layer: (c[0], c[1 + number]) for cell, c in measurement.fitted.items()} == served
        torch.compiler.reset()
    assert [curve.kv_len for curve in measurement.curves("")] == [TOKENS]
    assert torch.equal(model(tokens(), tokens(seed=9)), before), "the model is as it was"
    assert not model._forward_pre_hooks


class MakesItsMask(nn.Module):
    """The mask of a family of diffusers, made of m [B, S] inside the model."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.make = dit(2, cross=True), make

    def forward(self, x: Tensor, context: Tensor, m: Tensor) -> Tensor:
        return self.inner(x, context, self.make(m))


@pytest.mark.parametrize("make", [ltx, hunyuan_video_15, chroma])
def test_masks_that_models_write_out_are_measured_as_they_are_served(make: Callable[[Tensor], Tensor]) -> None:
    model = MakesItsMask(make)
    inputs = tokens(2), tokens(2, seed=9), torch.arange(512) < torch.tensor([[512], [200]])
    config = skip_config(0.5, include=("*.attn2",))
    measurement = calibrate(model, lambda: model(*inputs), thresholds=(0.5,), include=config.include, **ALL)
    be = backend(config, inner="eager")
    torch.compile(model, backend=be)(*inputs)
    served = {site.name: [site.visited, site.skipped] for site in be.report().sites if site.visited}
    assert len(served) == 2
    assert {cell.layer: counts[:2] for cell, counts in measurement.fitted.items()} == served
    assert all(skipped > 0 for _, skipped in served.values())


class Mha(nn.Module):
    """PyTorch's own attention module, as `nn.TransformerEncoderLayer` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(32, 2, batch_first=True).eval().requires_grad_(False)
        self.attn.in_proj_bias[:32] = 3.0
        self.attn.in_proj_weight[32:64] *= 8
        self.attn.in_proj_weight[:32] *= 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


def test_calls_inside_multi_head_attention_are_measured_as_they_are_served() -> None:
    model = Mha()
    out: list[Tensor] = []
    measurement = calibrate(model, lambda: out.append(model(tokens())), thresholds=(0.5,), **ALL)
    be = backend(skip_config(0.5), inner="eager")
    torch.compile(model, backend=be)(tokens())
    served = {site.name: [site.visited, site.skipped] for site in be.report().sites}
    assert {cell.layer: counts[:2] for cell, counts in measurement.fitted.items()} == served
    assert served["attn"][1] > 0
    torch.testing.assert_close(out[0], model(tokens()))


def test_a_layer_keeps_its_name_from_call_to_call_inside_a_wrapper() -> None:
    model = nn.DataParallel(dit(2))
    measurement = calibrate(model, lambda seed: model(tokens(seed=seed)), range(3), **ALL)
    assert {cell.layer for cell in (*measurement.fitted, *measurement.held_out)} == {"blocks.0.attn1", "blocks.1.attn1"}


def test_what_was_compiled_runs_eagerly_and_only_meanwhile() -> None:
    graphs: list[object] = []

    def compiler(gm: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(gm)
        return gm.forward

    model, other = dit(2), dit(1)
    compiled = torch.compile(model, backend=compiler)

    def run(seed: int) -> None:  # in a thread of its own, so that one watcher ends inside the other
        inner = threading.Thread(target=lambda: calibrate(other, lambda: other(tokens()), **ALL))
        inner.start()
        inner.join()
        compiled(tokens(seed=seed))

    assert calibrate(model, run, range(2), **ALL) == calibrate(model, lambda seed: model(tokens(seed=seed)), range(2), **ALL)
    assert not graphs
    compiled(tokens())
    assert graphs


def test_a_general_mask_is_left_alone_and_told(caplog: pytest.LogCaptureFixture) -> None:
    model = dit(1, cross=True)
    mask = torch.ones(1, 1, 512, 512, dtype=torch.bool).tril()
    measurement = calibrate(model, lambda: model(tokens(), tokens(seed=9), mask), **ALL)
    assert measurement.layers("") == ["blocks.0.attn1"]
    assert "1 attention calls were not measured: mask [1, 1, 512, 512] is not a key mask" in caplog.text


class Sdpa(nn.Module):
    """A call that a model might make."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...], **options: object) -> None:
        super().__init__()
        self.options = options
        self.qkv = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes]

    def forward(self) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*self.qkv, **self.options)


Q = (2, 4, 128, 16)


@pytest.mark.parametrize(
    "model",
    [
        Sdpa((Q, Q, (1, 4, 128, 16))),
        Sdpa((Q, Q, (2, 1, 128, 16))),
        Sdpa((Q, (2, 1, 128, 16), (2, 1, 128, 16))),
        Sdpa((Q, Q, Q), attn_mask=torch.zeros(1, 1, 1, 128, requires_grad=True)),
        Sdpa((Q, Q, Q), dropout_p=0.5),
        Sdpa((Q[1:], Q[1:], Q[1:])),
        Sdpa((Q, Q, Q), attn_mask=torch.ones(128, 128)),
    ],
    ids=["batch of value", "heads of value", "no enable_gqa", "mask with a gradient", "dropout", "rank", "general mask"],
)
def test_what_serving_keeps_is_kept_for_its_reasons(model: Sdpa, caplog: pytest.LogCaptureFixture) -> None:
    be = backend(skip_config(0.5), inner="eager")
    torch.compile(model, backend=be)()
    (site,) = be.report().sites
    assert site.decision == "kept"
    out: list[Tensor] = []
    with pytest.raises(ValueError, match="measured no attention call, for this reason") as raised:
        calibrate(model, lambda: out.append(model()), **ALL)
    assert out
    assert str(raised.value).endswith("; ".join(r for r in site.reasons if "takes" not in r and "attach" not in r))


def test_what_no_implementation_would_serve_is_not_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    limited = dataclasses.replace(kernels.implementations()[-1], max_head_dim=8)
    monkeypatch.setattr(kernels, "implementations", lambda: (limited,))
    model = dit(2)
    with pytest.raises(ValueError, match="for this reason: reference takes head_dim up to 8, not 16 and 16$"):
        calibrate(model, lambda: model(tokens()), **ALL)
    old = {"device_type": "cuda", "capability": (7, 5)}
    monkeypatch.undo()
    monkeypatch.setattr(watch, "problem_of", lambda *call: problem_of(*call)._replace(**old))
    with pytest.raises(ValueError, match="reference serves cuda only when asked for by name$"):
        calibrate(model, lambda: model(tokens()), **ALL)


def test_no_hook_is_left_behind_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the models nor on all modules, also where the second of two cannot be watched."""
    pipe, attach = wan22(), Gate.attach
    models = pipe.transformer, pipe.transformer_2
    hooks = lambda: [len(x) for x in (module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks)]
    before = hooks()

    def fail_at_the_second(gate: Gate, model: nn.Module, *options: object) -> None:
        attach(gate, model, *options)
        if model is models[1]:
            raise RuntimeError("cannot be watched")

    with pytest.raises(RuntimeError, match="stopped"):
        calibrate(pipe, stop, **ALL)
    monkeypatch.setattr(Gate, "attach", fail_at_the_second)
    for measure in (calibrate, functools.partial(sensitivity, config=skip_config(0.5), progress=False)):
        with pytest.raises(RuntimeError, match="cannot be watched"):
            measure(pipe, lambda: run_pipeline(pipe, steps=1))
        assert not any(model._forward_pre_hooks or model._forward_hooks for model in models)
    assert hooks() == before


def test_only_what_is_asked_for_is_measured() -> None:
    model = dit(3)
    measurement = calibrate(model, lambda: model(tokens()), ignore=("blocks.0.*",), include=("blocks.*",), **ALL)
    assert measurement.layers("") == ["blocks.1.attn1", "blocks.2.attn1"]
    with pytest.raises(ValueError, match="measured no attention call: the model made none with at least 1024 keys"):
        calibrate(model, lambda: model(tokens()), progress=False)


def test_each_length_has_its_own_points_and_deviations() -> None:
    model = dit(2)
    measurement = calibrate(model, lambda length: model(tokens(length=length, seed=length)), (512, 512, 1024, 1024), **ALL)
    assert [curve.kv_len for curve in measurement.curves("")] == [512, 1024]
    assert measurement.fit("").calibration.kv_lens == (512, 1024)
    targets = [0.02, 0.05]
    deviations = measurement.deviations("", targets)
    assert list(deviations) == [512, 1024]
    for curve in measurement.curves("", held_out=True):
        asked = [measurement.fit("", target=target).calibration.threshold_at(target, curve.kv_len) for target in targets]
        assert deviations[curve.kv_len] == [curve.share_at(a) - t for a, t in zip(asked, targets, strict=True)]
    assert re.search(r"holds for s = .* at L = 512, 1,024\n", str(measurement))
    assert re.search(r"\n512 keys .*\n1,024 keys ", str(measurement))


def test_a_run_that_measures_nothing_is_refused_and_leaves_no_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, state = dit(1).requires_grad_(True), tmp_path / "state.json"
    run = lambda seed: model(tokens(seed=seed))
    with pytest.raises(ValueError, match="no attention call, for this reason: an input requires grad, and skip-softmax"):
        calibrate(model, run, range(2), state=state, **ALL)
    told = "made no attention call that could be measured; an input requires grad, and skip-softmax attention has no backward"
    assert [record.getMessage() for record in caplog.records] == [f"item 0 {told}", f"item 1 {told}"]
    assert not state.exists()
    assert calibrate(model, torch.no_grad()(run), range(2), state=state, **ALL).items == 2


def test_items_that_are_too_short_spoil_nothing(tmp_path: Path) -> None:
    model, state = dit(1), tmp_path / "state.json"
    lengths, long = [128, 512, 128, 512], {"min_kv_len": 256, "progress": False}
    run = lambda n: model(tokens(length=lengths[n], seed=n))
    with pytest.raises(RuntimeError, match="stopped"):
        calibrate(model, lambda n: run(n) if n < 1 else stop(), range(4), state=state, **long)
    assert not state.exists(), "nothing was measured yet"
    measurement = calibrate(model, run, range(4), state=state, **long)
    assert (measurement.items, [curve.kv_len for curve in measurement.curves("")]) == (4, [512])
    assert measurement.held_out


def stop() -> None:
    raise RuntimeError("stopped")


def test_short_and_long_items_in_turn_are_fitted_and_held_out_each(tmp_path: Path) -> None:
    model, state = dit(2), tmp_path / "state.json"
    lengths = [512, 1024] * 2
    run = lambda n: model(tokens(length=lengths[n], seed=n))
    measurement = calibrate(model, run, range(4), **ALL)
    for held_out in (False, True):
        assert [curve.kv_len for curve in measurement.curves("", held_out=held_out)] == [512, 1024]
    calibrate(model, run, range(3), state=state, **ALL)
    assert calibrate(model, run, range(4), state=state, **ALL) == measurement


def test_what_was_not_measured_is_told(caplog: pytest.LogCaptureFixture) -> None:
    pipe = wan22()
    lengths = {0: 512, 1: 128}
    model = dit(1)
    calibrate(model, lambda n: model(tokens(length=lengths[n])), lengths, min_kv_len=256, progress=False, ignore=("blcks.*", "x"))
    calibrate(pipe, lambda: run_pipeline(pipe, steps=2), **ALL, ignore=("transformer_2.*",))
    assert [record.getMessage() for record in caplog.records] == [
        "ignore pattern 'blcks.*' matched no attention layer; nearest: blocks.0.attn1",
        "ignore pattern 'x' matched no attention layer",
        "item 1 made no attention call that could be measured",
        "transformer_2 made no attention call that could be measured; it gets no curve",
    ]


def test_wrong_wishes_for_a_config_are_named() -> None:
    model = dit(2)
    measurement = calibrate(model, lambda seed: model(tokens(seed=seed)), range(2), **ALL)
    for target in (math.nan, math.inf, -0.1, 2, "x", None, True):
        with pytest.raises(ValueError, match=r"target_sparsity must be in \[0, 1\], the share of tiles to skip, got"):
            measurement.config(target)
    for fields, text in [
        ({"disabled_until_timestep": math.nan}, "disabled_until_timestep must be a noise level"),
        ({"disabled_until_timestep": "x"}, "disabled_until_timestep must be a noise level"),
        ({"tile_order": "own_first"}, "tile_order is what was measured, got 'own_first'; calibrate anew"),
        ({"calibration": None}, "calibration is what was measured"),
        ({"rules": Rule("x", dense=True)}, "rules must be a sequence of Rule"),
    ]:
        with pytest.raises(ValueError, match=text):
            measurement.config(0.1, **fields)


def test_reach_is_said_of_the_largest_lambda_that_was_measured() -> None:
    model = dit(2)
    measurement = calibrate(model, lambda: model(tokens()), thresholds=(0.02, 0.03, 0.05, 0.08, 0.1, 0.2), **ALL)
    with pytest.raises(ValueError, match=r"beyond reach: lambda = 0.2, the most that was measured, skips 2\d.\d%"):
        measurement.config(0.9)
    assert "\nlambda = 0.2 skips 2" in str(measurement)


def test_a_failed_item_is_not_counted() -> None:
    model = dit(1)

    def run(item: int) -> None:
        model(tokens())
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        calibrate(model, run, [1], **ALL)
    assert not model._forward_pre_hooks


def test_wrong_arguments_are_named() -> None:
    model = dit(1)
    run = lambda: model(tokens())
    for keywords, text in [
        ({"thresholds": [0.5, 0.1]}, r"ascending lambdas in \(0, 1\], got \[0.5, 0.1\]"),
        ({"thresholds": [0.0, 0.1]}, "ascending lambdas"),
        ({"thresholds": [n / 40 for n in range(1, 41)]}, "1 to 32 ascending lambdas"),
        ({"tile_order": "own"}, "tile_order must be one of"),
        ({"tile": (64,)}, "tile"),
        ({"thresholds": 0.5}, "ascending lambdas"),
        ({"thresholds": ["x"]}, "ascending lambdas"),
        ({"include": "blocks.*"}, r"include must be a sequence of patterns, got the string 'blocks.\*'"),
        ({"ignore": None}, "ignore must be a sequence of patterns, got None"),
        ({"items": "a cat"}, r"items must be a sequence, .* got 'a cat'; write items=\['a cat'\]"),
        ({"items": 3}, "items must be a sequence"),
        ({"items": []}, "items must hold at least one, got none"),
        ({"run": 3}, "calibrate needs run, a function that drives the model, got 3"),
    ]:
        with pytest.raises(ValueError, match=text):
            calibrate(model, **{"run": run, "progress": False, **keywords})
    given = calibrate(model, run, include=iter(("blocks.*",)), ignore=iter(("x", "y")), **ALL).setup
    assert (given.include, given.ignore) == (("blocks.*",), ("x", "y"))
    with pytest.raises(ValueError, match="calibrate needs a diffusers pipeline, got str"):
        calibrate("model", run)
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="needs an uncompiled model, Dit is compiled; measure first"):
        calibrate(model, run)


def test_progress_needs_no_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    model = dit(1)
    calibrate(model, lambda seed: model(tokens(seed=seed)), range(2), min_kv_len=0)
    assert re.findall(r"calibration: (\d) of 2, \d+ s\n", capsys.readouterr().err) == ["1", "2"]
    calibrate(model, lambda seed: model(tokens(seed=seed)), range(2), **ALL)
    assert capsys.readouterr().err == ""


def test_memory_does_not_grow_with_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_MOST_CALLS", 3)
    model = dit(2)
    waiting: list[int] = []

    def loop() -> None:
        for seed in range(4):
            model(tokens(seed=seed))
            waiting.append(sum(type(x) is observe._Call for x in gc.get_objects()))

    measurement = calibrate(model, loop, **ALL)
    assert max(waiting) < 3, "of eight calls"
    one = calibrate(model, lambda: model(tokens(seed=0)), **ALL)
    assert {cell: counts[0] for cell, counts in measurement.fitted.items()} == {c: 4 * n[0] for c, n in one.fitted.items()}


def test_memory_does_not_grow_with_the_items(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A loop that draws t at random, and prompts of 200 to 239 tokens under a key mask."""
    monkeypatch.setattr(observe, "_MOST_LEVELS", 4)
    model, state = dit(1, cross=True), tmp_path / "state.json"
    levels = [0.9, 0.5, 0.1, 0.3, *(0.7000001 + 1e-5 * n for n in range(36))]

    def run(n: int) -> None:
        with timestep(levels[n]):
            model(tokens(), tokens(seed=n), (torch.arange(TOKENS) < 200 + n).view(1, 1, 1, -1))

    measurement = calibrate(model, run, range(40), include=("*.attn2",), **ALL)
    cells = (*measurement.fitted, *measurement.held_out)
    assert {cell.t for cell in cells} == {float32(t) for t in (0.9, 0.5, 0.1, 0.3, 0.701)}
    assert [curve.kv_len for curve in measurement.curves("")] == [219], "the mean of every second one"
    assert measurement.cutoff_left("", 0.7) == 0.7
    assert len(cells) == 6
    for count in (10, 40):
        calibrate(model, run, range(count), include=("*.attn2",), state=state, **ALL)
    assert Measurement.load(state) == measurement


def test_lengths_share_a_curve_where_they_are_close() -> None:
    bins = [length_bin(n, 128) for n in range(1, 250_000)]
    assert bins == sorted(bins)
    assert bins[-1] < 115
    assert [length_bin(n, 128) for n in (1, 128, 129, 2560, 2561)] == [1, 1, 2, 20, 21]
    assert all(length_bin(n, 128) < length_bin(round(1.06 * n), 128) for n in range(2560, 250_000, 999))


# Targets


def test_a_pipeline_of_two_experts_gets_a_curve_each_by_step() -> None:
    pipe = wan22()
    run = lambda seed: run_pipeline(pipe, steps=6, seed=seed)
    thresholds = [n / 32 for n in range(1, 33)]  # random weights skip little, and only at large lambdas
    measurement = calibrate(pipe, run, [0, 1], thresholds=thresholds, tile_order="own_first", ignore=("*.attn2",), **ALL)
    assert measurement.components == ["transformer", "transformer_2"]
    levels = {
        name: sorted(c.t for c in measurement.fitted if c.component == name and c.layer == "blocks.0.attn1")
        for name in measurement.components
    }
    assert min(levels["transformer"]) > max(levels["transformer_2"]), "the experts share the schedule"
    assert len(levels["transformer"]) + len(levels["transformer_2"]) == 6
    everywhere = measurement.curves("transformer")
    late = measurement.curves("transformer", cutoff=0.9)
    assert everywhere != late
    configs = measurement.config(0.04, disabled_until_timestep=0.9, min_kv_len=0)
    assert list(configs) == ["transformer", "transformer_2"]
    assert all(config.ignore == ("*.attn2",) for config in configs.values()), "what was not measured is not served"
    assert all(config.disabled_until_timestep == 0.9 and config.tile_order == "own_first" for config in configs.values())
    for name, written in measurement.to_checkpoint(0.04, min_kv_len=0).items():
        read = SkipConfig.from_checkpoint(json.loads(json.dumps(written)))
        assert read.calibration == measurement.fit(name, target=0.04).calibration
        assert read.calibration.tile_order == "own_first"


def test_a_gate_leaves_the_calls_that_it_leaves_when_it_serves() -> None:
    """Levels that are closer together than any rounding: flow shift 12 at 100 steps."""
    model = dit(1)
    levels = [12 * s / (1 + 11 * s) for s in (1 - n / 100 for n in range(5))]
    gate = cutoff_for_dense_steps(levels, 3)
    assert [round(t, 3) for t in levels[:3]] == [1.0, 0.999, gate]

    def run(seed: int) -> None:
        for t in levels:
            with timestep(t):
                model(tokens(seed=seed))

    measurement = calibrate(model, run, [0], **ALL)
    assert [cell.t for cell in measurement.fitted] == [float32(t) for t in levels]
    whole = {t: counts for (_, t), counts in zip(measurement.shares("", Calibration(20, 3), 0.1), measurement.fitted.values(), strict=True)}
    left = [whole[float32(t)] for t in levels if not is_dense(t, gate)]
    assert len(left) == 2
    assert measurement.curves("", cutoff=gate)[0].shares == tuple(sum(c[n] for c in left) / sum(c[0] for c in left) for n in range(1, 33))
    assert measurement.cutoff_left("", gate) == gate
    assert measurement.cutoff_left("", 0.5) == 0.0


def test_a_picture_hatches_the_steps_that_serving_keeps_dense() -> None:
    """float32(.1) is above .1, and not above float32(.1)."""
    model = dit(1)

    def run() -> None:
        for t in (0.5, 0.1):
            with timestep(t):
                model(tokens())

    measurement = calibrate(model, run, **ALL)
    hatched = lambda cutoff: [patch.get_width() for patch in figure(measurement, 0.1, cutoff).axes[1].patches]
    assert (hatched(0.0), hatched(0.1), hatched(0.05)) == ([], [1.0], [2.0])


WORDS = torch.tensor([[3, 11, 7, 12]])


@functools.cache
def trained(tile_order: str) -> tuple[nn.Module, Measurement]:
    """Two videos of eight frames, 2,048 tokens; one is fitted, the other held out."""
    model = load_model()
    run = lambda seed: sample(model, WORDS, steps=2, frames=8, seed=seed)
    return model, calibrate(model, run, range(2), tile_order=tile_order, progress=False)


def two_experts() -> DiffusionPipeline:
    """The trained model twice, in a pipeline that changes from one to the other."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    experts = {"transformer": load_model(), "transformer_2": load_model()}
    return WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, boundary_ratio=0.8, **experts)


def sample_experts(pipe: DiffusionPipeline, seed: int) -> Tensor:
    """Latents of four frames, in four steps."""
    pipe.set_progress_bar_config(disable=True)
    generator, size = torch.Generator().manual_seed(seed), {"height": 512, "width": 512, "num_frames": 13}
    text = {"prompt_embeds": token_table()[WORDS], "guidance_scale": 1.0}
    return pipe(**text, **size, num_inference_steps=4, output_type="latent", generator=generator, return_dict=False)[0]


@pytest.mark.parametrize(("tile_order", "targets"), [("ascending", (0.1, 0.2, 0.3, 0.4)), ("own_first", (0.1, 0.2, 0.3, 0.4, 0.5))])
def test_targets_are_met_on_other_videos_within_three_points(tile_order: str, targets: tuple[float, ...]) -> None:
    model, measurement = trained(tile_order)
    for deviations in measurement.deviations("", targets).values():
        assert max(map(abs, deviations)) < 0.015
    be = backend(measurement.config(targets[-1]), inner="eager", model=model)
    sample(torch.compile(model, backend=be), WORDS, steps=2, frames=8, seed=7)
    assert be.report().sparsity == pytest.approx(targets[-1], abs=0.03), "the hardest, close to what lambda = 1 skips"
    assert not any("fitted" in reason for site in be.report().sites for reason in site.reasons)


def test_a_pipeline_of_two_experts_meets_its_targets_on_another_seed() -> None:
    pipe = two_experts()
    measurement = calibrate(pipe, lambda seed: sample_experts(pipe, seed), range(2), tile_order="own_first", progress=False)
    for component in ("transformer", "transformer_2"):
        for deviations in measurement.deviations(component, [0.1, 0.2, 0.3]).values():
            assert max(map(abs, deviations)) < 0.02
    handle = compile_pipeline(pipe, measurement.config(0.25), inner="eager")
    sample_experts(pipe, 7)
    for component in ("transformer", "transformer_2"):
        assert handle.backends[component].report().sparsity == pytest.approx(0.25, abs=0.03)


def test_a_target_beyond_reach_is_refused_with_what_is_reachable() -> None:
    _, measurement = trained("own_first")
    reach = measurement.fit("").reach
    assert 0.4 < reach < 0.7
    with pytest.raises(
        ValueError, match=rf"target_sparsity=0.8 is beyond reach: lambda = 1, the most there is, skips {reach:.1%}.*ask for at most"
    ):
        measurement.config(0.8)
    assert "lambda = 1 skips" in str(measurement)
    assert "achieved minus target on held-out items" in str(measurement)


def test_a_curve_for_each_layer_where_that_is_nearer() -> None:
    _, measurement = trained("own_first")
    assert measurement.config(0.3).rules == ()
    always, chosen = measurement.config(0.3, per_layer=True), measurement.config(0.3, per_layer=None)
    assert {rule.pattern for rule in chosen.rules} <= {rule.pattern for rule in always.rules} <= {f"blocks.{n}.attn1" for n in range(8)}
    assert len(always.rules) >= 4


def test_layers_get_no_curve_of_their_own_where_nothing_judges_it(caplog: pytest.LogCaptureFixture) -> None:
    _, whole = trained("own_first")
    fitted_only = dataclasses.replace(whole, held_out={})
    assert fitted_only.config(0.3, per_layer=None).rules == ()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("per_layer=None gives no layer a curve of its own: no item was held out")
    assert fitted_only.config(0.3, per_layer=True).rules


# Export


def test_an_export_serves_the_same_and_names_what_was_measured() -> None:
    _, measurement = trained("own_first")
    (written,) = measurement.to_checkpoint(0.3, disabled_until_timestep=0.9).values()
    (group,) = json.loads(json.dumps(written))["sparse_attention_config"]["config_groups"].values()
    assert group["targets"] == ["WanAttention"]
    config = measurement.config(0.3, disabled_until_timestep=0.9)
    assert SkipConfig.from_checkpoint(json.loads(json.dumps(written))) == config
    for length in (2048, 75600):
        a, b = (group["threshold_scale_factor"]["coefficients"][name] for name in "ab")
        assert config.calibration.threshold_at(0.3, length) == a * math.exp(b * group["target_sparsity"]) / length


def curve_for_vllm_omni(inner: dict) -> tuple[float, float]:
    """The first group of skip-softmax; `coefficients`, or else `prefill`."""
    group = next(g for g in inner["config_groups"].values() if g.get("algorithm") == "skip_softmax" or g.get("threshold_scale_factor"))
    factor = group["threshold_scale_factor"]
    assert factor["formula"].replace(" ", "") == "a*exp(b*target_sparsity)"
    found = factor.get("coefficients") or factor["prefill"]
    return float(found["a"]), float(found["b"])


def curve_for_tensorrt_llm(inner: dict) -> tuple[float, float]:
    """The only group of skip-softmax; every member of `coefficients` is a number that the formula names."""
    (group,) = [g for g in inner["config_groups"].values() if g.get("algorithm", g.get("sparse_algo")) in ("skip_softmax", "softmax_skip")]
    assert all(isinstance(pattern, str) for pattern in group["ignore"])
    assert isinstance(group["target_sparsity"], float)
    assert isinstance(group["disabled_until_timestep"], float)
    found = {name: float(value) for name, value in group["threshold_scale_factor"]["coefficients"].items()}
    names = set(re.findall(r"[a-z_]+", group["threshold_scale_factor"]["formula"])) - {"exp", "target_sparsity"}
    assert set(found) == names
    return found["a"], found["b"]


def curve_for_modelopt(inner: dict) -> tuple[float, float]:
    """`prefill`; without it ModelOpt serves a threshold of its own."""
    group = next(g for g in inner["config_groups"].values() if g.get("algorithm") == "skip_softmax")
    return group["threshold_scale_factor"]["prefill"]["a"], group["threshold_scale_factor"]["prefill"]["b"]


@pytest.mark.parametrize("reader", [curve_for_vllm_omni, curve_for_tensorrt_llm, curve_for_modelopt])
def test_other_loaders_find_the_same_curve(reader: Callable[[dict], tuple[float, float]]) -> None:
    """What they look for, as their loaders do."""
    _, measurement = trained("own_first")
    config = measurement.config(0.3, disabled_until_timestep=0.9, ignore=("blocks.0.attn1",))
    inner = json.loads(json.dumps(config.to_checkpoint()))["sparse_attention_config"]
    assert reader(inner) == (config.calibration.a, config.calibration.b)


def test_modelopts_own_loader_takes_the_curve() -> None:
    loader = pytest.importorskip("modelopt.torch.sparsity.attention_sparsity.plugins.sparse_attn_config", exc_type=ImportError)
    config = SkipConfig(target_sparsity=0.4, calibration=Calibration(45.0, 10.0), ignore=("blocks.0.attn1",))
    found, name = loader.load_from_checkpoint_metadata(types.SimpleNamespace(**config.to_checkpoint()))
    assert name == "CHECKPOINT_CALIBRATED_SOFTMAX_SKIP"
    assert loader.match_sparse_config("blocks.0.attn1", found) == {"enable": False}
    assert loader.match_sparse_config("blocks.1.attn1", found)["threshold_scale_factor"]["prefill"] == {"a": 45.0, "b": 10.0}


def test_a_curve_at_modelopts_tiles_says_so_where_it_serves() -> None:
    model = dit(2)
    run = lambda seed: model(tokens(seed=seed))
    ours, theirs = (calibrate(model, run, [0], tile=tile, **ALL) for tile in ((64, 128), (128, 128)))
    visited = [sum(counts[0] for counts in measurement.fitted.values()) for measurement in (ours, theirs)]
    assert visited[0] == 2 * visited[1]
    assert all(a >= b for a, b in zip(ours.curves("")[0].shares, theirs.curves("")[0].shares, strict=True)), "more rows must agree"
    config = theirs.config(0.05)
    assert config.calibration.tile == (128, 128)
    be = backend(config, inner="eager", model=model)
    torch.compile(model, backend=be)(tokens())
    assert "the curve was fitted at tiles (128, 128), ascending; here they are (64, 128), ascending" in be.report().sites[0].reasons


def test_use_outside_of_what_was_measured_is_told_after_a_round_trip_too(caplog: pytest.LogCaptureFixture) -> None:
    curve = Calibration(20.0, 3.0, tile=(64, 128), tile_order="ascending", sparsity_range=(0.1, 0.4), kv_lens=(1024, 2048))
    written = SkipConfig(target_sparsity=0.3, calibration=curve).to_checkpoint()
    assert not caplog.records
    config = SkipConfig.from_checkpoint(json.loads(json.dumps(written)), target_sparsity=0.6, min_kv_len=0)
    outside = "the target 0.6 lies outside the shares 0.1 to 0.4 that the curve was fitted on"
    assert [r.levelname for r in caplog.records if outside in r.getMessage()] == ["WARNING"]
    model = dit(1)
    be = backend(config, inner="eager", model=model)
    torch.compile(model, backend=be)(tokens())
    shorter = "512 keys are not the 1,024 to 2,048 that the curve was fitted at"
    assert {outside, shorter} <= set(be.report().sites[0].reasons)
    assert [r.levelname for r in caplog.records if shorter in r.getMessage()] == ["WARNING"]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        be.update(target_sparsity=0.2)
        assert not any(r.levelno >= logging.WARNING for r in caplog.records)
        be.update(target_sparsity=0.05)
        assert sum("0.05 lies outside" in r.getMessage() for r in caplog.records) == 1
