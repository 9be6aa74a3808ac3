"""The oracle against float64: dense attention at threshold 0, and the definition's plain loops at every other."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import CASES, FEATURE_CASES, LENGTH_CASES, MASKS, ORDERS, THRESHOLDS, Case, Inputs
from checks import assert_within, dense_sdpa, naive_attention, one_thread, tolerance  # noqa: F401 (autouse)
from skip_attn_compile.reference import reference_attention


def run(case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return reference_attention(
        *inputs, is_causal=case.causal, scale=case.scale, tile_order=case.tile_order, tile_q=case.tile_q, tile_k=case.tile_k
    )


def in_dtype(low: torch.Tensor, case: Case) -> torch.Tensor:
    """A float32 result as the reference would return it; for float64 the float32 run itself sets the tolerance."""
    return low if case.dtype == torch.float64 else low.to(case.dtype)


def check_against_loops(case: Case) -> torch.Tensor:
    """Counts to the tile, values within what the loops themselves lose in the reference's precision. Returns counts."""
    inputs = case.inputs()
    options = {"is_causal": case.causal, "scale": case.scale, "tile_order": case.tile_order, "tile_q": case.tile_q, "tile_k": case.tile_k}
    exact = naive_attention(*inputs, **options)
    low = naive_attention(*inputs, **options, dtype=torch.float32)
    out, lse, counts = run(case, inputs)
    assert (out.dtype, lse.dtype, counts.dtype) == (case.dtype, torch.float32, torch.int32)
    assert torch.equal(counts, exact.counts)
    assert_within(out, exact.out, tolerance(in_dtype(low.out, case), exact.out, case.dtype, float(inputs.value.abs().max())))
    assert_within(lse, exact.lse, tolerance(low.lse.float(), exact.lse, torch.float32))
    return counts


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", [c for c in CASES if not c.query_mask], ids=str)
def test_threshold_zero_is_dense_attention(case: Case, order: str) -> None:
    case = replace(case, threshold=0.0, tile_order=order)
    inputs = case.inputs()
    options = {"is_causal": case.causal, "scale": case.scale}
    exact = dense_sdpa(*inputs[:3], inputs.attn_mask, **options)
    low = dense_sdpa(*inputs[:3], inputs.attn_mask, **options, dtype=torch.float32 if case.dtype == torch.float64 else case.dtype)
    out, _, counts = run(case, inputs)
    assert_within(out, exact, tolerance(low, exact, case.dtype, float(inputs.value.abs().max())))
    assert counts[..., 1].sum() == 0


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", LENGTH_CASES, ids=str)
def test_lengths_match_the_definition(case: Case, order: str, threshold: float) -> None:
    check_against_loops(replace(case, threshold=threshold, tile_order=order))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", FEATURE_CASES, ids=str)
def test_features_match_the_definition(case: Case, order: str) -> None:
    thresholds = THRESHOLDS[1::2] if isinstance(case.threshold, float) else [case.threshold]
    for threshold in thresholds:
        check_against_loops(replace(case, threshold=threshold, tile_order=order))


@pytest.mark.parametrize("threshold", THRESHOLDS[1:])
def test_case_table_has_skipped_and_kept_tiles(threshold: float) -> None:
    """Else the comparisons above would prove nothing."""
    for case in (Case("plain", Skv=1000), Case("masked", Skv=1000, mask="key_add"), Case("causal", Sq=1000, Skv=1000, causal=True)):
        case = replace(case, threshold=threshold)
        visited, skipped = run(case, case.inputs())[2].sum((0, 1)).tolist()
        assert 0 < skipped < visited


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    case=st.builds(
        lambda rep, **fields: Case("drawn", Hq=fields["Hkv"] * rep, **fields),
        rep=st.integers(1, 3),
        B=st.just(2),
        Hkv=st.integers(1, 2),
        Sq=st.integers(1, 260),
        Skv=st.integers(1, 400),
        D=st.integers(2, 33),
        Dv=st.integers(1, 20),
        dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
        mask=st.sampled_from(MASKS),
        causal=st.booleans(),
        query_mask=st.booleans(),
        threshold=st.one_of(st.sampled_from(THRESHOLDS), st.tuples(*[st.sampled_from(THRESHOLDS)] * 2)),
        tile_order=st.sampled_from(ORDERS),
        tile_q=st.sampled_from((16, 64, 100)),
        tile_k=st.sampled_from((32, 64, 128)),
        seed=st.integers(0, 1000),
    )
)
def test_any_shape_matches_the_definition(case: Case) -> None:
    check_against_loops(case)


@pytest.mark.parametrize("budget", [1, 64 * 1024, 3 * 64 * 1024])
@pytest.mark.parametrize(
    "case", [Case("plain", Hq=4, Sq=300, Skv=600), Case("causal", Sq=300, Skv=300, causal=True, mask="general_add")], ids=str
)
def test_chunks_do_not_matter(case: Case, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group at a time, several, or a whole batch item at once."""
    monkeypatch.setattr("skip_attn_compile.reference.SCORES_PER_CHUNK", budget)
    for order in ORDERS:
        check_against_loops(replace(case, tile_order=order))


def test_default_scale_is_one_over_root_head_dim() -> None:
    inputs = Case("head_dim_16").inputs()
    assert torch.equal(reference_attention(*inputs)[0], reference_attention(*inputs, scale=0.25)[0])
    assert not torch.equal(reference_attention(*inputs)[0], reference_attention(*inputs, scale=0.5)[0])


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_empty(q_len: int, kv_len: int) -> None:
    q, k, v = torch.randn(2, 4, q_len, 8), torch.randn(2, 2, kv_len, 8), torch.randn(2, 2, kv_len, 3)
    out, lse, counts = reference_attention(q, k, v, torch.tensor(0.1))
    assert torch.equal(out, torch.zeros(2, 4, q_len, 3))
    assert torch.equal(lse, torch.full((2, 4, q_len), -math.inf))
    assert torch.equal(counts, torch.zeros(2, 4, 2, dtype=torch.int32))


def test_wrong_tile_order_is_named() -> None:
    with pytest.raises(ValueError, match=r"tile_order must be .*got 'descending'"):
        reference_attention(*Case("plain").inputs(), tile_order="descending")
