"""Unmodified diffusers transformers through the backend: against plain torch.compile, and against eager attention by the reference.

Every model is compiled once and run at two thresholds; the tests look at what came of it.
"""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import skip_attn_compile
from checks import assert_within, tolerance
from diffusers_models import MODELS, WAN, Counts, Inputs, ModelCase, attention_by_reference, cast, poisoned
from skip_attn_compile import Rule, SkipConfig
from skip_attn_compile.report import Report

THRESHOLD = 0.3


@dataclass(frozen=True)
class Outcome:
    """What one model gave; outputs of the same weights and inputs."""

    case: ModelCase
    plain: Tensor  # torch.compile without us, the same inner compiler
    exact: Tensor  # eager, float64
    eager: Tensor  # eager, float32
    dense: Tensor  # our backend at threshold 0
    sparse: Tensor  # the same compiled graphs at THRESHOLD
    poisoned: Tensor | None  # the same with large numbers where the text is padding, if the model has a mask
    reference: Tensor  # eager with attention by the reference at THRESHOLD
    reference_exact: Tensor  # the same in float64
    dense_counts: Counts
    sparse_counts: Counts
    reference_counts: Counts
    reference_exact_counts: Counts
    plain_graphs: int
    dense_graphs: int  # compiled by us at the first call
    report: Report  # after both calls

    @property
    def tolerance(self) -> float:
        """Of dense outputs."""
        return tolerance(self.eager, self.exact, torch.float32)

    @property
    def sparse_tolerance(self) -> float:
        return tolerance(self.reference, self.reference_exact, torch.float32)


def run(model: nn.Module, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


def run_by_reference(model: nn.Module, inputs: Inputs, thresholds: dict[str, float]) -> tuple[Tensor, Counts]:
    with attention_by_reference(model, thresholds) as counts:
        return run(model, inputs), counts


def tiles(report: Report, before: Counts | None = None) -> Counts:
    """(visited, skipped) of every site that was not kept, without those of an earlier report."""
    counts = {site.name: (site.visited, site.skipped) for site in report.sites if site.decision != "kept"}
    return {name: (v - before[name][0], s - before[name][1]) for name, (v, s) in counts.items()} if before else counts


@pytest.fixture(scope="module", params=MODELS, ids=str)
def outcome(request: pytest.FixtureRequest) -> Outcome:
    case: ModelCase = request.param
    model, inputs = case.build(), case.draw()
    model_exact, inputs_exact = copy.deepcopy(model).double(), cast(inputs, torch.float64)
    thresholds = dict.fromkeys(case.rewritten, THRESHOLD)
    reference, reference_counts = run_by_reference(model, inputs, thresholds)
    reference_exact, reference_exact_counts = run_by_reference(model_exact, inputs_exact, thresholds)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(case.inner)
    plain = run(torch.compile(model, backend=counter), inputs)

    torch._dynamo.reset()
    be = skip_attn_compile.backend(SkipConfig(threshold=0.0, min_kv_len=0), inner=case.inner, model=model if case.attach else None)
    compiled = torch.compile(model, backend=be)
    dense = run(compiled, inputs)
    first = be.report()
    if case.rewritten:
        be.update(threshold=THRESHOLD)
    sparse = run(compiled, inputs)
    second = be.report()
    return Outcome(
        case=case,
        plain=plain,
        exact=run(model_exact, inputs_exact),
        eager=run(model, inputs),
        dense=dense,
        sparse=sparse,
        poisoned=run(compiled, poisoned(case, inputs)) if case.mask else None,
        reference=reference,
        reference_exact=reference_exact,
        dense_counts=tiles(first),
        sparse_counts=tiles(second, tiles(first)),
        reference_counts=reference_counts,
        reference_exact_counts=reference_exact_counts,
        plain_graphs=counter.frame_count,
        dense_graphs=first.graphs,
        report=second,
    )


def test_every_attention_call_is_rewritten_or_kept_for_a_reason(outcome: Outcome) -> None:
    sites = outcome.report.sites
    assert {s.name for s in sites if s.decision == "sparse"} == set(outcome.case.rewritten)
    assert {s.name: s.reasons for s in sites if s.decision == "kept"} == {name: (why,) for name, why in outcome.case.kept.items()}
    assert len(sites) == len(outcome.case.rewritten) + len(outcome.case.kept)
    assert not outcome.report.unmatched


def test_threshold_zero_equals_plain_compile(outcome: Outcome) -> None:
    assert_within(outcome.dense, outcome.plain, 0.0 if not outcome.case.rewritten else outcome.tolerance)
    assert all(visited > 0 and skipped == 0 for visited, skipped in outcome.dense_counts.values())


def test_skipping_equals_eager_attention_by_the_reference(outcome: Outcome) -> None:
    assert outcome.sparse_counts == outcome.reference_counts
    assert outcome.sparse_counts == outcome.reference_exact_counts  # no decision hangs on a rounding
    assert_within(outcome.sparse, outcome.reference, outcome.sparse_tolerance)


def test_some_tiles_are_skipped_and_some_are_not(outcome: Outcome) -> None:
    visited, skipped = (sum(column) for column in zip((0, 0), *outcome.sparse_counts.values(), strict=True))
    if outcome.case.skips:
        assert 0 < skipped < visited
        # and it shows: the comparisons of values would notice a threshold that is not applied
        assert (outcome.reference - outcome.eager).abs().max() > 20 * (outcome.tolerance + outcome.sparse_tolerance)
    else:
        assert skipped == 0


def test_no_graph_more_than_plain_compile_and_none_for_a_new_threshold(outcome: Outcome) -> None:
    assert outcome.dense_graphs == outcome.plain_graphs
    assert outcome.report.graphs == outcome.dense_graphs


def test_masked_keys_do_not_matter(outcome: Outcome) -> None:
    """Large numbers in place of the padding change nothing while tiles are skipped, and much where the mask is left out."""
    case = outcome.case
    if case.mask is None:
        assert outcome.poisoned is None
        return
    assert_within(outcome.poisoned, outcome.sparse, outcome.sparse_tolerance)
    model, inputs = case.build(), case.draw()
    unmasked = {case.mask: torch.ones_like(inputs[case.mask])}
    seen = run(model, {**inputs, **unmasked}) - run(model, {**poisoned(case, inputs), **unmasked})
    assert seen.abs().max() > 1000 * outcome.sparse_tolerance


FOUR_BLOCKS = replace(WAN, config={**WAN.config, "num_layers": 4})


def by_block(thresholds: tuple[float, ...], prefix: str = "") -> dict[str, float]:
    """attn1 and attn2 of each block at the block's threshold."""
    return {f"{prefix}blocks.{n}.{attn}": lam for n, lam in enumerate(thresholds) for attn in ("attn1", "attn2")}


def test_four_blocks_share_one_compilation_and_each_has_its_own_rule() -> None:
    """Regional compilation: Dynamo compiles the first block and runs its graph for all of them."""
    model, inputs = FOUR_BLOCKS.build(), FOUR_BLOCKS.draw()
    thresholds = by_block((0.3, 0.0, 0.9, 0.3))
    reference, counts = run_by_reference(model, inputs, thresholds)
    exact, exact_counts = run_by_reference(copy.deepcopy(model).double(), cast(inputs, torch.float64), thresholds)
    assert counts == exact_counts

    compiler = CompileCounterWithBackend("aot_eager")
    config = SkipConfig(threshold=0.3, min_kv_len=0, ignore=("blocks.1.*",), rules=(Rule("blocks.2.*", threshold=0.9),))
    be = skip_attn_compile.backend(config, inner=compiler)
    be.attach(model)
    model.compile_repeated_blocks(backend=be)
    out = run(model, inputs)
    report = be.report()

    assert compiler.frame_count == report.graphs == 1
    assert {s.name: s.threshold for s in report.sites} == thresholds
    assert {s.name for s in report.sites if s.decision == "dense now"} == {"blocks.1.attn1", "blocks.1.attn2"}
    assert {s.reasons for s in report.sites if s.decision == "dense now"} == {("ignored by pattern 'blocks.1.*'",)}
    assert tiles(report) == counts
    assert_within(out, reference, tolerance(reference, exact, torch.float32))


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
        reference, reference_counts = run_by_reference(model, inputs, thresholds[name])
        exact, _ = run_by_reference(copy.deepcopy(model).double(), cast(inputs, torch.float64), thresholds[name])
        assert {site: counts.pop(f"{name}.{site}") for site in reference_counts} == reference_counts
        assert_within(outputs[name], reference, tolerance(reference, exact, torch.float32))
    assert not counts


@pytest.mark.parametrize("name", ["Chroma", "LTX"])
def test_masks_with_symbolic_sizes(name: str) -> None:
    """Batch size, tokens and the mask's sizes are symbols: what the mask is made of is found all the same."""
    (case,) = (case for case in MODELS if case.name == name)
    model, inputs = case.build(), case.draw()
    thresholds = dict.fromkeys(case.rewritten, THRESHOLD)
    reference, counts = run_by_reference(model, inputs, thresholds)
    exact, _ = run_by_reference(copy.deepcopy(model).double(), cast(inputs, torch.float64), thresholds)

    be = skip_attn_compile.backend(SkipConfig(threshold=THRESHOLD, min_kv_len=0), inner="aot_eager", model=model)
    out = run(torch.compile(model, backend=be, dynamic=True), inputs)
    assert tiles(be.report()) == counts
    assert_within(out, reference, tolerance(reference, exact, torch.float32))
