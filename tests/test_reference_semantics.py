"""What the oracle promises beyond its values: the bound, monotony, the meaning of extreme thresholds, NaN, and what is never read."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import ORDERS, THRESHOLDS, Case
from checks import assert_within, dense_sdpa, naive_attention, one_thread, tolerance  # noqa: F401 (autouse)
from skip_attn_compile.reference import reference_attention

NAN, INF = math.nan, math.inf
PLAIN = Case("plain", Sq=200, Skv=1000)


def run(case: Case, inputs, **options):
    return reference_attention(*inputs, is_causal=case.causal, scale=case.scale, tile_order=case.tile_order, **options)


def with_threshold(case: Case, *values: float):
    """The inputs of `case`, which itself draws no threshold that is not a number."""
    threshold = torch.tensor(values[0] if len(values) == 1 else values, dtype=torch.float32)
    return case.inputs()._replace(threshold=threshold)


def assert_same(actual, expected) -> None:
    """Bitwise, NaN included."""
    for name, x, y in zip(("out", "lse", "counts"), actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")


def poison(tensor: torch.Tensor, *index, value: float = NAN) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


# ---- thresholds ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mask", ["none", "key_add", "general_bool"])
def test_larger_threshold_never_skips_fewer_tiles(mask: str, order: str) -> None:
    case = replace(PLAIN, mask=mask, tile_order=order)
    counts = [run(case, with_threshold(case, t))[2] for t in THRESHOLDS]
    for smaller, larger in pairwise(counts):
        assert torch.equal(smaller[..., 0], larger[..., 0])
        assert (smaller[..., 1] <= larger[..., 1]).all()
    assert counts[1][..., 1].sum() < counts[-1][..., 1].sum()


@pytest.mark.parametrize(("odd", "acts_as"), [(NAN, 0.0), (-1.0, 0.0), (-INF, 0.0), (-0.0, 0.0), (INF, 1.0), (3.0, 1.0)])
def test_threshold_outside_its_range(odd: float, acts_as: float) -> None:
    assert_same(run(PLAIN, with_threshold(PLAIN, odd)), run(PLAIN, with_threshold(PLAIN, acts_as)))
    per_item = run(PLAIN, with_threshold(PLAIN, odd, 0.01))
    assert_same(per_item, run(PLAIN, with_threshold(PLAIN, acts_as, 0.01)))


@pytest.mark.parametrize("order", ORDERS)
def test_threshold_one_keeps_tiles_that_equal_the_maximum(order: str) -> None:
    """Strict comparison: with equal scores everywhere no tile is below any maximum."""
    q = k = torch.ones(1, 1, 256, 4)
    v = torch.randn(1, 1, 256, 4)
    out, _, counts = reference_attention(q, k, v, torch.tensor(1.0), tile_order=order)
    assert counts.tolist() == [[[8, 0]]]
    exact = dense_sdpa(q, k, v)
    assert_within(out, exact, tolerance(dense_sdpa(q, k, v, dtype=torch.float32), exact, torch.float32, float(v.abs().max())))


def test_first_visited_tile_is_never_skipped_and_order_decides_which_it_is() -> None:
    """Two tiles, the second far above the first: ascending visits both, own_first lets the second half skip the first tile."""
    q = torch.ones(1, 1, 256, 1)
    k = torch.zeros(1, 1, 256, 1)
    k[:, :, 128:] = 20
    skipped = lambda order: reference_attention(q, k, k, torch.tensor(0.1), scale=1.0, tile_order=order)[2].tolist()
    assert skipped("ascending") == [[[8, 0]]]
    assert skipped("own_first") == [[[8, 2]]]


# ---- the bound -----------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    kv_len=st.integers(130, 700),
    threshold=st.floats(1e-4, 1.0),
    order=st.sampled_from(ORDERS),
    mask=st.sampled_from(("none", "key_add", "general_bool")),
    causal=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_error_is_bounded_by_dropped_mass(kv_len: int, threshold: float, order: str, mask: str, causal: bool, seed: int) -> None:
    """|y_hat - y| <= 2 * delta * V_max, with delta measured (from the two lse) and bounded (each dropped key weighs less than lambda)."""
    case = Case(
        "drawn", B=1, Sq=200, Skv=kv_len, threshold=threshold, tile_order=order, mask=mask, causal=causal, dtype=torch.float64, seed=seed
    )
    inputs = case.inputs()
    y, lse, _ = run(case, inputs._replace(threshold=torch.tensor(0.0)))
    y_hat, lse_hat, counts = run(case, inputs)
    has_key = lse > -INF
    measured = torch.where(has_key, -torch.expm1((lse_hat - lse).double()), 0)  # lse is float32
    rounding = torch.finfo(torch.float32).eps * (1 + lse.where(has_key, 0).abs().double())
    assert (measured >= -2 * rounding).all(), "skipping cannot add mass"

    loops = naive_attention(*inputs, is_causal=causal, scale=case.scale, tile_order=order)
    assert torch.equal(counts, loops.counts)
    dropped_tiles = loops.skipped.sum(-1).repeat_interleave(case.tile_q, dim=-1)[..., : case.Sq]
    bounded = dropped_tiles * case.tile_k * threshold
    assert (measured <= bounded + 2 * rounding).all()

    error = (y_hat - y).abs().amax(-1)
    v_max = inputs.value.abs().amax()
    float64_rounding = case.Skv * torch.finfo(torch.float64).eps * v_max
    assert (error <= 2 * (measured + 2 * rounding) * v_max + float64_rounding).all()
    assert (error <= 2 * bounded * v_max + float64_rounding).all()
    assert (error[dropped_tiles == 0] <= float64_rounding).all()


# ---- finite inputs give finite results -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_no_nan_from_finite_inputs(threshold: float, dtype: torch.dtype) -> None:
    """Scores of +-1e4 nats, rows and tiles without keys, masked queries, additive -10000 and -inf."""
    for mask in ("none", "general_add", "key_bool"):
        for order in ORDERS:
            case = replace(PLAIN, dtype=dtype, threshold=threshold, mask=mask, query_mask=True, causal=mask == "none", tile_order=order)
            inputs = case.inputs()
            out, lse, _ = run(case, inputs._replace(query=inputs.query * 1000))
            assert out.isfinite().all()
            assert not lse.isnan().any()
            assert not (lse == INF).any()


@pytest.mark.parametrize("threshold", [0.0, 0.1, 1.0])
def test_rows_without_keys(threshold: float) -> None:
    case = replace(PLAIN, threshold=threshold)
    mask = torch.ones(2, 1, 200, 1000, dtype=torch.bool)
    mask[0, :, 70] = False  # one row
    mask[1, :, 64:128] = False  # one group: it visits nothing
    out, lse, counts = run(case, case.inputs()._replace(attn_mask=mask))
    assert (out[0, :, 70] == 0).all()
    assert (out[1, :, 64:128] == 0).all()
    assert torch.equal(lse == -INF, ~mask.any(-1).expand(2, 2, 200))
    assert counts[0, :, 0].tolist() == [32, 32]
    assert counts[1, :, 0].tolist() == [24, 24]


# ---- who votes -----------------------------------------------------------------------------------------------------------------


def test_masked_query_does_not_vote() -> None:
    """One row that looks only at the low tile keeps it for its group, unless query_mask takes the row's say."""
    q = torch.full((1, 1, 64, 1), 1.0)
    q[0, 0, 5] = -1.0
    k = torch.full((1, 1, 256, 1), 20.0)
    k[:, :, 128:] = 0.0
    v = torch.randn(1, 1, 256, 3)
    query_mask = torch.ones(1, 1, 64, 1, dtype=torch.bool)
    counts = lambda mask: reference_attention(q, k, v, torch.tensor(0.1), None, mask, scale=1.0)[2].tolist()
    assert counts(None) == counts(query_mask) == [[[2, 0]]]
    assert counts(poison(query_mask, 0, 0, 5, 0, value=False)) == [[[2, 1]]]


def test_masked_query_gives_zero_whatever_it_holds() -> None:
    case = replace(PLAIN, query_mask=True)
    inputs = case.inputs()
    rows = ~inputs.query_mask.expand(2, 2, 200, 1)[..., 0]
    out, lse, counts = run(case, inputs)
    assert (out[rows] == 0).all()
    assert (lse[rows] == -INF).all()
    assert_same(run(case, inputs._replace(query=poison(inputs.query, rows))), (out, lse, counts))


@pytest.mark.parametrize("order", ORDERS)
def test_rows_past_the_end_do_not_vote(order: str) -> None:
    """200 rows end within a group; cutting rows off its end can only help skipping, and 192 whole-group rows count the same."""
    inputs = PLAIN.inputs()
    whole = inputs._replace(query=inputs.query[:, :, :192])
    tail = inputs._replace(query=inputs.query[:, :, 192:])
    counts = [reference_attention(*x, scale=PLAIN.scale)[2] for x in (inputs, whole, tail)]
    assert torch.equal(counts[0], counts[1] + counts[2])
    assert (counts[2][..., 1] > 0).any()


def test_finite_mask_value_is_a_score() -> None:
    """A tile at -10000 is visited (and skipped); the same tile at -inf is passed over."""
    bias = torch.zeros(1, 1, 1, 1000)
    bias[..., 256:384] = -10000.0
    inputs = PLAIN.inputs()
    finite = run(PLAIN, inputs._replace(attn_mask=bias))[2]
    masked = run(PLAIN, inputs._replace(attn_mask=bias.masked_fill(bias < 0, -INF)))[2]
    assert (finite - masked == torch.tensor([4, 4])).all()


# ---- NaN -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.0, 0.1])
@pytest.mark.parametrize("order", ORDERS)
def test_nan_query_makes_its_row_nan_and_its_group_skip_nothing(order: str, threshold: float) -> None:
    case = replace(PLAIN, tile_order=order, threshold=threshold)
    inputs = case.inputs()
    out, lse, counts = run(case, inputs._replace(query=poison(inputs.query, 0, 0, 70, 3)))
    clean_out, _, clean_counts = run(case, inputs)
    rows = torch.zeros(2, 2, 200, dtype=torch.bool)
    rows[0, 0, 70] = True
    assert torch.equal(out.isnan().all(-1), rows)
    assert torch.equal(out.isnan().any(-1), rows)
    assert torch.equal(lse.isnan(), rows)
    elsewhere = torch.ones(200, dtype=torch.bool)
    elsewhere[64:128] = False  # its group
    assert_within(out[0, 0, elsewhere], clean_out[0, 0, elsewhere], 0.0)
    only_group = case.inputs()._replace(query=inputs.query[:1, :1, 64:128], key=inputs.key[:1, :1], value=inputs.value[:1, :1])
    _, group_skipped = reference_attention(*only_group, scale=case.scale)[2][0, 0].tolist()
    if order == "ascending":
        assert clean_counts[0, 0, 1] - counts[0, 0, 1] == group_skipped
    assert group_skipped > 0 or threshold == 0


def test_nan_key_in_a_visited_tile_makes_all_rows_nan() -> None:
    inputs = PLAIN.inputs()
    out, lse, counts = run(PLAIN, inputs._replace(key=poison(inputs.key, 0, 0, 300, 2)))
    assert out[0, 0].isnan().all()
    assert lse[0, 0].isnan().all()
    assert not out[0, 1].isnan().any()
    assert not out[1].isnan().any()
    first_two_tiles = naive_attention(*(x[:1, :1] if x is not None and x.dim() == 4 else x for x in inputs), scale=PLAIN.scale).skipped[
        ..., :2
    ]
    assert counts[0, 0, 1] == first_two_tiles.sum(), "from the NaN on, every row objects"


@pytest.mark.parametrize("mask", ["key_bool", "key_add", "general_bool"])
def test_masked_key_is_not_looked_at(mask: str) -> None:
    """Also within a visited tile: a masked score is -inf, whatever the key holds (torch's CPU kernels give NaN here)."""
    case = replace(PLAIN, mask=mask)
    inputs = case.inputs()
    allowed = inputs.attn_mask if inputs.attn_mask.dtype == torch.bool else inputs.attn_mask > -INF
    never = ~allowed.expand(2, 2, -1, 1000).any(2)
    assert never.any()
    assert_same(run(case, inputs._replace(key=poison(inputs.key, never))), run(case, inputs))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mask", ["none", "key_add", "key_bool"])
def test_value_of_skipped_or_passed_over_tiles_is_not_read(mask: str, order: str) -> None:
    case = replace(PLAIN, Sq=64, mask=mask, tile_order=order, tile_q=64)
    inputs = case.inputs()
    loops = naive_attention(*inputs, scale=case.scale, tile_order=order)
    unread = loops.skipped[:, :, 0]  # [B, H, T]
    if inputs.attn_mask is not None:
        unread = unread.clone()
        unread[-1, :, 1] = True  # the case masks this tile whole
    assert unread.any()
    keys = unread.repeat_interleave(case.tile_k, dim=-1)[..., : case.Skv]
    assert_same(run(case, inputs._replace(value=poison(inputs.value, keys))), run(case, inputs))


def test_value_above_the_causal_diagonal_is_not_read() -> None:
    case = replace(PLAIN, Sq=128, Skv=512, causal=True, threshold=0.0)
    inputs = case.inputs()
    assert_same(run(case, inputs._replace(value=poison(inputs.value, ..., slice(128, None), slice(None)))), run(case, inputs))


def test_masked_value_inside_a_kept_tile_is_read_as_in_sdpa() -> None:
    case = replace(PLAIN, threshold=0.0)
    mask = torch.ones(1, 1, 1, 1000, dtype=torch.bool)
    mask[..., 3] = False
    inputs = case.inputs()._replace(attn_mask=mask)
    inputs = inputs._replace(value=poison(inputs.value, 0, 0, 3))
    expected = dense_sdpa(*inputs[:3], mask, scale=case.scale, dtype=torch.float32).isnan()
    assert expected[0, 0].all()
    assert torch.equal(run(case, inputs)[0].isnan(), expected)


# ---- layout, batch, autocast ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [PLAIN, replace(PLAIN, mask="general_add", query_mask=True, threshold=(0.1, 0.5), causal=True)], ids=["plain", "all"]
)
def test_batch_item_does_not_depend_on_the_others(case: Case) -> None:
    inputs = case.inputs()
    together = run(case, inputs)
    for b in range(case.B):
        alone = inputs._replace(**{n: x[b : b + 1] for n, x in inputs._asdict().items() if x is not None and x.dim()})
        assert_same(run(case, alone), [x[b : b + 1] for x in together])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_strides_in_and_out(dtype: torch.dtype) -> None:
    case = replace(PLAIN, dtype=dtype, Dv=24)
    inputs = case.inputs()
    expected = run(case, inputs)
    bshd = inputs._replace(**{n: getattr(inputs, n).transpose(1, 2).contiguous().transpose(1, 2) for n in ("query", "key", "value")})
    last_strided = inputs._replace(**{n: torch.stack((getattr(inputs, n),) * 2, -1)[..., 0] for n in ("query", "key", "value")})
    assert not bshd.query.is_contiguous()
    assert last_strided.key.stride(-1) == 2
    for odd in (bshd, last_strided):
        out = torch.full((2, 200, 2, 24), NAN, dtype=dtype).transpose(1, 2)
        result = run(case, odd, out=out)
        assert result[0] is out
        assert_same(result, expected)


def test_inputs_are_not_written() -> None:
    case = replace(PLAIN, dtype=torch.float32, mask="general_add", query_mask=True, Sq=128, Skv=1024, causal=True)
    inputs = case.inputs()
    before = [x.clone() for x in inputs]
    run(case, inputs)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_autocast_does_not_apply() -> None:
    inputs = PLAIN.inputs()
    inputs = inputs._replace(query=inputs.query * 1.001)  # no longer exact in bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = run(PLAIN, inputs)
    assert_same(under_autocast, run(PLAIN, inputs))
