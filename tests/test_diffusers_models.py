"""Several modules of one class behind one compilation: blocks compiled one by one, the two experts of a pipeline. And the case table.

What becomes of each model is in test_diffusers_conformance.py.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import skip_attn_compile
from checks import assert_within, tolerance
from conformance_row import attention_by_reference
from diffusers_models import CASES, WAN, Case, Inputs, poisoned, run, run_exact
from skip_attn_compile import Rule, SkipConfig
from skip_attn_compile.report import Report

FOUR_BLOCKS = replace(WAN, config={**WAN.config, "num_layers": 4})

Counts = dict[str, tuple[int, int]]  # attention call -> tiles (visited, skipped)


def run_by_reference(model: nn.Module, inputs: Inputs, thresholds: dict[str, float]) -> tuple[Tensor, Counts, float]:
    """(eager output with attention by the reference, tiles, tolerance), where no decision hangs on a rounding."""
    double = copy.deepcopy(model).double()
    with attention_by_reference(model, thresholds) as calls:
        (out,) = run(model, inputs)
    with attention_by_reference(double, thresholds) as exact_calls:
        (exact,) = run_exact(double, inputs)
    assert calls == exact_calls
    return out, {name: (call.visited, call.skipped) for name, call in calls.items()}, tolerance(out, exact, torch.float32)


def tiles(report: Report) -> Counts:
    return {site.name: (site.visited, site.skipped) for site in report.sites}


def by_block(thresholds: tuple[float, ...]) -> dict[str, float]:
    """attn1 and attn2 of each block at the block's threshold."""
    return {f"blocks.{n}.{attn}": lam for n, lam in enumerate(thresholds) for attn in ("attn1", "attn2")}


@pytest.mark.parametrize("case", [case for case in CASES if case.mask], ids=str)
def test_the_masked_text_would_show(case: Case) -> None:
    """Eager, without the mask: what conformance puts in place of the padding changes the output."""
    model, inputs = case.build(), case.draw()
    unmasked = {case.mask: torch.ones_like(inputs[case.mask])}
    clean, dirty = run(model, {**inputs, **unmasked}), run(model, {**poisoned(case, inputs), **unmasked})
    assert (clean[0] - dirty[0]).abs().max() > 0.01 * clean[0].abs().max()


def test_four_blocks_share_one_compilation_and_each_has_its_own_rule() -> None:
    """Regional compilation: Dynamo compiles the first block and runs its graph for all of them."""
    model, inputs = FOUR_BLOCKS.build(), FOUR_BLOCKS.draw()
    thresholds = by_block((0.3, 0.0, 0.9, 0.3))
    reference, counts, atol = run_by_reference(model, inputs, thresholds)

    compiler = CompileCounterWithBackend("aot_eager")
    config = SkipConfig(threshold=0.3, min_kv_len=0, ignore=("blocks.1.*",), rules=(Rule("blocks.2.*", threshold=0.9),))
    be = skip_attn_compile.backend(config, inner=compiler)
    be.attach(model)
    model.compile_repeated_blocks(backend=be)
    (out,) = run(model, inputs)
    report = be.report()

    assert compiler.frame_count == report.graphs == 1
    assert {s.name: s.threshold for s in report.sites} == thresholds
    assert {s.name for s in report.sites if s.decision == "dense now"} == {"blocks.1.attn1", "blocks.1.attn2"}
    assert {s.reasons for s in report.sites if s.decision == "dense now"} == {("ignored by pattern 'blocks.1.*'",)}
    assert tiles(report) == counts
    assert_within(out, reference, atol)


def test_two_models_of_one_class_share_a_compilation_and_each_has_its_own_rules() -> None:
    """As the two experts of Wan2.2: Dynamo runs the first model's graph for the second, without asking the backend."""
    models = {name: WAN.build(seed) for seed, name in enumerate(("transformer", "transformer_2"))}
    thresholds = {"transformer": by_block((0.0, 0.3)), "transformer_2": by_block((0.9, 0.9))}
    inputs = WAN.draw()

    compiler = CompileCounterWithBackend("aot_eager")
    config = SkipConfig(threshold=0.3, min_kv_len=0, ignore=("transformer.blocks.0.*",), rules=(Rule("transformer_2.*", threshold=0.9),))
    be = skip_attn_compile.backend(config, inner=compiler)
    for name, model in models.items():
        be.attach(model, name)
    compiled = {name: torch.compile(model, backend=be) for name, model in models.items()}
    outputs = {name: run(model, inputs) for name, model in compiled.items()}
    assert compiler.frame_count == be.report().graphs == 1

    counts = tiles(be.report())
    for name, model in models.items():
        reference, reference_counts, atol = run_by_reference(model, inputs, thresholds[name])
        assert {site: counts.pop(f"{name}.{site}") for site in reference_counts} == reference_counts
        assert_within(outputs[name][0], reference, atol)
    assert not counts


def test_masks_with_symbolic_sizes() -> None:
    """Batch size, tokens and the mask's sizes are symbols: what the mask is made of is found all the same."""
    (case,) = (case for case in CASES if str(case) == "ChromaTransformer2DModel")
    model, inputs = case.build(), case.draw()
    be = skip_attn_compile.backend(SkipConfig(threshold=0.3, min_kv_len=0), inner="aot_eager", model=model)
    (out,) = run(torch.compile(model, backend=be, dynamic=True), inputs)
    assert {site.decision for site in be.report().sites} == {"sparse"}
    reference, counts, atol = run_by_reference(model, inputs, dict.fromkeys(tiles(be.report()), 0.3))
    assert tiles(be.report()) == counts
    assert_within(out, reference, atol)
