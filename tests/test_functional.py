"""skip_softmax_attention: arguments, results, errors; eager and compiled alike."""

import numpy as np
import pytest
import torch

from cases import Case
from checks import assert_within, dense_sdpa, tolerance
from skip_attn_compile import skip_softmax_attention
from skip_attn_compile.reference import reference_attention

CASE = Case("plain", Skv=1000)
Q = torch.zeros(2, 4, 70, 8)


def run(case: Case, threshold: object = None, **options):
    query, key, value, default, mask, _ = case.inputs()
    options = {"attn_mask": mask, "is_causal": case.causal, "scale": case.scale, "tile_order": case.tile_order} | options
    return skip_softmax_attention(query, key, value, default if threshold is None else threshold, **options)


CASES = [
    CASE,
    Case("bool mask", mask="key_bool"),
    Case("general mask", mask="general_add"),
    Case("causal", Sq=300, Skv=300, causal=True),
    Case("gqa", Hq=4, Hkv=2),
    Case("own_first", tile_order="own_first", Skv=1000),
    Case("per item", threshold=(0.0, 0.5), Skv=1000),
    Case("bf16", dtype=torch.bfloat16),
    Case("value_dim", Dv=24),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_the_reference(case: Case) -> None:
    options = {"is_causal": case.causal, "scale": case.scale, "tile_order": case.tile_order}
    out, lse, counts = reference_attention(*case.inputs(), **options)
    actual, actual_lse, stats = run(case, enable_gqa=case.Hq != case.Hkv, return_lse=True, return_stats=True)
    assert torch.equal(actual, out)
    assert torch.equal(actual_lse, lse)
    assert (int(stats.visited), int(stats.skipped)) == tuple(counts.sum((0, 1)).tolist())
    assert 0 < stats.skipped < stats.visited


@pytest.mark.parametrize("case", CASES, ids=str)
def test_eager_and_compiled_are_equal(case: Case) -> None:
    def both(threshold: torch.Tensor) -> tuple:
        return run_on(threshold)

    query, key, value, threshold, mask, _ = case.inputs()
    options = {"attn_mask": mask, "is_causal": case.causal, "scale": case.scale, "tile_order": case.tile_order, "enable_gqa": True}

    def run_on(threshold: torch.Tensor) -> tuple:
        return skip_softmax_attention(query, key, value, threshold, return_lse=True, return_stats=True, **options)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)(threshold)
    for actual, expected in zip((*compiled[:2], *compiled[2]), (*(eager := both(threshold))[:2], *eager[2]), strict=True):
        assert torch.equal(actual, expected)
        assert actual.dtype == expected.dtype


def test_float_thresholds_compile_too() -> None:
    query = torch.randn(1, 2, 300, 8)
    compiled = torch.compile(lambda q: skip_softmax_attention(q, q, q, 0.1), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(query), skip_softmax_attention(query, query, query, torch.tensor(0.1)))


def test_what_is_returned() -> None:
    assert isinstance(run(CASE), torch.Tensor)
    out, lse = run(CASE, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 2, 129, 16), (2, 2, 129), torch.float32)
    out, stats = run(CASE, return_stats=True)
    assert (stats.visited.dtype, stats.skipped.dtype, stats.visited.shape) == (torch.int64, torch.int64, ())
    assert stats.visited == 2 * 2 * 3 * 8
    assert len(run(CASE, return_lse=True, return_stats=True)) == 3


def test_zero_is_dense() -> None:
    query, key, value, _, _, _ = CASE.inputs()
    exact, low = (dense_sdpa(query, key, value, scale=CASE.scale, dtype=dtype) for dtype in (torch.float64, torch.float32))
    out, stats = run(CASE, 0, return_stats=True)
    assert stats.skipped == 0
    assert_within(out, exact, tolerance(low, exact, torch.float32))


@pytest.mark.parametrize("value", [0.1, np.float32(0.1), np.float64(0.1), torch.tensor(0.1), torch.tensor([0.1, 0.1])], ids=repr)
def test_every_kind_of_threshold_is_the_same_threshold(value: object) -> None:
    assert torch.equal(run(CASE, value), run(CASE, torch.tensor(0.1)))


def test_a_threshold_per_item_acts_per_item() -> None:
    both = run(CASE, torch.tensor([0.0, 0.5]))
    assert torch.equal(both[0], run(CASE, 0.0)[0])
    assert torch.equal(both[1], run(CASE, 0.5)[1])
    assert not torch.equal(both[1], run(CASE, 0.0)[1])


@pytest.mark.parametrize(("odd", "acts_as"), [(float("nan"), 0.0), (-1.0, 0.0), (float("-inf"), 0.0), (float("inf"), 1.0), (3.0, 1.0)])
def test_tensor_thresholds_that_cannot_be_checked_act_as_documented(odd: float, acts_as: float) -> None:
    assert torch.equal(run(CASE, torch.tensor(odd)), run(CASE, acts_as))


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -0.1, "0.1", None, True, [0.1], np.bool_(True), np.array([0.1, 0.1]), 10**400],
    ids=lambda v: repr(v)[:20],
)
def test_bad_float_threshold_is_named(value: object) -> None:
    with pytest.raises(ValueError, match="threshold must be a finite number >= 0 or a float32 tensor") as error:
        skip_softmax_attention(Q, Q, Q, value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile_order": "descending"}, "tile_order must be one of ascending, own_first, got 'descending'"),
        ({"is_causal": True, "attn_mask": torch.ones(70) > 0}, "is_causal and attn_mask exclude each other"),
        ({"attn_mask": torch.ones(69) > 0}, "attn_mask must be on cpu and broadcast to"),
        ({"attn_mask": torch.ones(70).double()}, "attn_mask must be boolean .*, or float32 or torch.float32 .*, got torch.float64"),
        ({"scale": float("nan")}, "scale must be a finite number or None, got nan"),
    ],
    ids=["tile_order", "causal and mask", "mask", "double mask", "scale"],
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        skip_softmax_attention(Q, Q, Q, 0.1, **options)


def test_any_finite_threshold_is_taken() -> None:
    assert torch.equal(skip_softmax_attention(Q, Q, Q, 1e300), skip_softmax_attention(Q, Q, Q, 1.0))


def test_a_scale_from_symbolic_sizes_compiles() -> None:
    function = torch.compile(
        lambda x: skip_softmax_attention(x, x, x, 0.1, scale=x.shape[2] ** -0.5), backend="eager", dynamic=True, fullgraph=True
    )
    torch.testing.assert_close(function(Q), skip_softmax_attention(Q, Q, Q, 0.1, scale=Q.shape[2] ** -0.5))


def test_a_wrong_rank_is_named_in_a_graph_too() -> None:
    with pytest.raises(Exception, match=r"query must be \[batch, heads, tokens, head_dim\], got \[70\]"):
        torch.compile(skip_softmax_attention, backend="eager", fullgraph=True)(torch.zeros(70), Q, Q, 0.1)


def test_gqa_must_be_asked_for() -> None:
    key = Q[:, :2]
    with pytest.raises(ValueError, match="4 query heads over 2 key heads need enable_gqa=True"):
        skip_softmax_attention(Q, key, key, 0.1)
    assert skip_softmax_attention(Q, key, key, 0.1, enable_gqa=True).shape == Q.shape


def test_arguments_that_are_not_tensors_are_named() -> None:
    with pytest.raises(ValueError, match="query must"):
        skip_softmax_attention([1.0], Q, Q, 0.1)
    with pytest.raises(ValueError, match="attn_mask must"):
        skip_softmax_attention(Q, Q, Q, 0.1, attn_mask=[True])


def test_shape_errors_do_not_wait_for_the_kernel() -> None:
    with pytest.raises(ValueError, match=r"key must have query's head_dim 8, got \[2, 4, 70, 4\]"):
        skip_softmax_attention(Q, Q[..., :4], Q, 0.1)


def test_gradients_are_refused_with_a_way_out() -> None:
    query = torch.randn(1, 1, 70, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"no derivative.*torch.no_grad\(\)"):
        skip_softmax_attention(query, query, query, 0.1)
    with torch.no_grad():
        skip_softmax_attention(query, query, query, 0.1)


def test_inside_autocast() -> None:
    query, key, value, threshold, _, _ = CASE.inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = skip_softmax_attention(query, key, value, threshold, scale=CASE.scale)
    assert torch.equal(out, run(CASE))
