"""The sm_90a kernel against the reference: counts exactly, values within rounding; and what it must not read, write or wait for.

`exact_inputs` makes scores that every precision computes without rounding, at least a quarter nat from the threshold: there kernel and
reference must agree on every decision, so their counts are equal.
"""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from skip_attn_compile import ops
from skip_attn_compile.kernels import sm90
from skip_attn_compile.reference import reference_attention
from skip_attn_compile.results import empty_results

THRESHOLD = math.exp(-5.25)
SCALE = 0.5
ORDERS = ("ascending", "own_first")
# Relative error of out in norm: two roundings to the input's precision (of P and of out), nothing else.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 7e-4}


def tolerance(dtype: torch.dtype, keys: int) -> float:
    """In float32 (Triton): 4e-7 of the exps; and `keys` products are added one after the other, whose roundings are random steps."""
    return TOLERANCE[dtype] if dtype in TOLERANCE else 4e-7 + 2**-24 * math.sqrt(keys)


def exact_inputs(
    batch: int, heads: int, kv_heads: int, rows: int, keys: int, head_dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """query, key, value as views of [B, S, H, D] memory. Scores: 4 * (a level of the key's tile, -8 to 8) + a small integer, times 1/2."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator, device="cuda").float()

    query = torch.zeros(batch, heads, rows, head_dim, device="cuda")
    key = torch.zeros(batch, kv_heads, keys, head_dim, device="cuda")
    query[..., 0] = 4
    key[..., 0] = integers(-8, 8, batch, kv_heads, -(-keys // 128)).repeat_interleave(128, -1)[..., :keys]
    query[..., 1:9] = integers(-1, 1, batch, heads, rows, 8)
    key[..., 1:9] = integers(-1, 1, batch, kv_heads, keys, 8)
    value = torch.randn(batch, kv_heads, keys, head_dim, generator=generator, device="cuda")
    return tuple(x.transpose(1, 2).contiguous().to(dtype).transpose(1, 2) for x in (query, key, value))  # type: ignore[return-value]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: float | Tensor,
    attn_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float = SCALE,
    tile_order: str = "ascending",
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel, with poisoned outputs: what it does not write stays NaN, or -7."""
    if not isinstance(threshold, Tensor):
        threshold = torch.tensor(threshold, device="cuda")
    out, lse, counts = results = empty_results(query, value)
    out.fill_(math.nan)
    lse.fill_(math.nan)
    counts.fill_(-7)
    sm90.run(query, key, value, threshold, attn_mask, query_mask, results, is_causal, scale, tile_order)
    return results


def check(query: Tensor, key: Tensor, value: Tensor, threshold: float | Tensor, **options: object) -> Tensor:
    """Kernel and reference on the same call; returns the counts, summed: [visited, skipped]."""
    if not isinstance(threshold, Tensor):
        threshold = torch.tensor(threshold, device="cuda")
    options.setdefault("scale", SCALE)
    out, lse, counts = attend(query, key, value, threshold, **options)  # type: ignore[arg-type]
    want_out, want_lse, want_counts = reference_attention(query.float(), key.float(), value.float(), threshold, **options)  # type: ignore[arg-type]
    assert torch.equal(counts, want_counts)
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-4)
    error = (out.float() - want_out).norm() / want_out.norm().clamp_min(1e-20)
    assert error <= TOLERANCE[query.dtype], f"relative error {error:.2e}"
    return counts.sum((0, 1))


SHAPES = [  # B, Hq, Hkv, Sq, Skv
    (1, 1, 1, 128, 128),
    (2, 4, 2, 512, 512),
    (1, 2, 2, 1, 300),
    (1, 3, 1, 333, 777),
    (2, 2, 2, 1000, 2000),
    (1, 2, 2, 2000, 640),
    (1, 1, 1, 64, 4096),
    (1, 2, 1, 130, 1),
    (3, 1, 1, 65, 129),
    (1, 2, 2, 2200, 300),
    (1, 2, 2, 2100, 300),  # an odd number of 128-row blocks: one CTA of a cluster has no rows
    # More blocks than the GPU has multiprocessors: a CTA takes several, one after the other.
    (2, 90, 9, 300, 500),
    (1, 70, 7, 512, 260),
    (1, 9, 3, 2200, 300),
    (1, 60, 20, 2100, 300),
    (1, 300, 300, 256, 100),
    (1, 150, 150, 100, 1),
    (2, 100, 50, 40, 300),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("threshold", [0.0, THRESHOLD])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shapes(dtype: torch.dtype, head_dim: int, threshold: float, order: str, causal: bool) -> None:
    skipped = 0
    for shape in SHAPES:
        counts = check(*exact_inputs(*shape, head_dim, dtype), threshold, is_causal=causal, tile_order=order)
        skipped += int(counts[1])
    assert (skipped > 0) == (threshold > 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_masks(head_dim: int, order: str, causal: bool) -> None:
    query, key, value = exact_inputs(3, 4, 2, 700, 1100, head_dim, torch.bfloat16)
    keep = torch.rand(3, 1, 1, 1100, device="cuda") < 0.5
    keep[0, ..., 128:512] = False  # whole tiles
    keep[1, ..., 600:] = False
    keep[2] = False  # no key at all
    rows = torch.rand(3, 1, 700, 1, device="cuda") < 0.5
    rows[0, :, 64:200] = False  # whole groups
    added = torch.where(keep, torch.randint(-4, 4, keep.shape, device="cuda") * 0.5, -math.inf)
    thresholds = torch.tensor([THRESHOLD, 0.0, THRESHOLD**0.5], device="cuda")
    options = {"is_causal": causal, "tile_order": order}
    for mask in (keep, added, added.bfloat16(), added.half(), added[:1], added[0, 0, 0], keep[1, 0], keep[0], keep[..., :1]):
        check(query, key, value, thresholds, attn_mask=mask, **options)
        check(query, key, value, thresholds, attn_mask=mask, query_mask=rows, **options)
    check(query, key, value, THRESHOLD, query_mask=rows, **options)
    check(query, key, value, THRESHOLD, query_mask=rows[:1], **options)
    check(query, key, value, thresholds, attn_mask=torch.full((1, 1, 1, 1100), -10000.0, device="cuda"), **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [-0.5, 0.0, 1.0])
def test_masks_at_any_scale(scale: float, causal: bool) -> None:
    query, key, value = exact_inputs(2, 2, 1, 300, 900, 64, torch.bfloat16)
    keep = torch.rand(2, 1, 1, 900, device="cuda") < 0.5
    keep[..., :200] = False  # causal: rows without a key before those with one
    keep[1, ..., 384:640] = False
    for mask in (keep, torch.where(keep, 1.5, -math.inf)):
        for threshold in (0.0, THRESHOLD):
            check(query, key, value, threshold, attn_mask=mask, scale=scale, is_causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_masks_where_blocks_are_shared(head_dim: int) -> None:
    query, key, value = exact_inputs(3, 40, 4, 500, 900, head_dim, torch.bfloat16)  # 480 blocks for 132 multiprocessors
    keep = torch.rand(3, 1, 1, 900, device="cuda") < 0.5
    keep[0, ..., 256:512] = False
    keep[1, ..., :700] = False
    keep[2] = False
    for mask in (keep, keep[:1], torch.where(keep, 0.5, -math.inf), keep[0, 0, 0].half().log()):
        for threshold in (0.0, THRESHOLD):
            for order in ORDERS:
                check(query, key, value, threshold, attn_mask=mask, tile_order=order)


@pytest.mark.parametrize(("batch", "heads", "keys"), [(3, 50, 70_000), (1, 3, 200_000)])
def test_masks_of_more_tiles_than_are_marked(batch: int, heads: int, keys: int) -> None:
    """Marks of 131,072 keys fit into shared memory; 150 blocks would be shared if those of all items did."""
    query, key, value = exact_inputs(batch, heads, 1, 64, keys, 64, torch.bfloat16)
    keep = torch.rand(batch, 1, 1, keys, device="cuda") < 0.5
    keep[..., 1280:6400] = False
    value[:, :, 1280:6400] = math.nan
    clean = value.nan_to_num()
    for threshold in (0.0, THRESHOLD):
        have = attend(query, key, value, threshold, attn_mask=keep)
        for x, y in zip(have, attend(query, key, clean, threshold, attn_mask=keep), strict=True):
            assert torch.equal(x, y)
        assert check(query, key, clean, threshold, attn_mask=keep)[0] == batch * heads * (-(-keys // 128) - 40)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("far", [-1e9, torch.finfo(torch.float32).min, -65504.0])
def test_a_finite_mask_is_a_score(far: float, causal: bool) -> None:
    query, key, value = exact_inputs(1, 2, 2, 700, 700, 64, torch.float16)
    mask = torch.zeros(1, 1, 1, 700, device="cuda")
    mask[..., :300] = far
    for order in ORDERS:
        for threshold in (0.0, THRESHOLD):
            options = {"attn_mask": mask, "is_causal": causal, "scale": SCALE, "tile_order": order}
            out, _, counts = attend(query, key, value, threshold, **options)  # type: ignore[arg-type]
            given = query.float(), key.float(), value.float(), torch.tensor(threshold, device="cuda")
            want, _, want_counts = reference_attention(*given, **options)  # type: ignore[arg-type]
            assert torch.equal(counts[..., 0], want_counts[..., 0])
            real = slice(300, None) if causal else slice(None)  # the other rows see nothing else: scores within rounding of such a number
            assert (out[:, :, real].float() - want[:, :, real]).norm() <= TOLERANCE[torch.float16] * want[:, :, real].norm()
            assert out.isfinite().all()
            assert out[:, :, :300].abs().sum(-1).gt(0).all()


def test_a_tile_that_causal_and_key_mask_leave_empty() -> None:
    """Rows 128 to 191 see nothing of the second tile, the next 64 rows something: the first group must neither read its V nor count it."""
    query, key, value = exact_inputs(1, 2, 2, 256, 256, 128, torch.bfloat16)
    keep = torch.ones(1, 1, 1, 256, dtype=torch.bool, device="cuda")
    keep[..., 128:192] = False
    value[:, :, 200] = math.nan
    for bad in (False, True):
        if bad:
            query[:, :, 130, 3] = math.nan
        for threshold in (0.0, THRESHOLD):
            out, _, counts = attend(query, key, value, threshold, attn_mask=keep, is_causal=True)
            given = torch.tensor(threshold, device="cuda")
            options = {"attn_mask": keep, "is_causal": True, "scale": SCALE}
            assert torch.equal(counts, reference_attention(query, key, value.nan_to_num(), given, **options)[2])  # type: ignore[arg-type]
            rows = out[0, 0, 128:192].isnan().any(-1)
            assert rows.nonzero().flatten().tolist() == ([2] if bad else [])


def test_masked_values_of_passed_tiles_are_not_read() -> None:
    query, key, value = exact_inputs(1, 2, 2, 256, 512, 128, torch.bfloat16)
    keep = torch.ones(1, 1, 1, 512, dtype=torch.bool, device="cuda")
    keep[..., 128:384] = False
    key[:, :, 128:384] = math.nan
    value[:, :, 128:384] = math.nan
    for threshold in (0.0, THRESHOLD):
        out, _, counts = attend(query, key, value, threshold, attn_mask=keep)
        assert out.isfinite().all()
        assert counts[..., 0].eq(4 * 2).all()


@pytest.mark.parametrize(("threshold", "acts_as"), [(math.nan, 0.0), (-1.0, 0.0), (math.inf, 1.0), (7.0, 1.0)])
def test_thresholds_out_of_range(threshold: float, acts_as: float) -> None:
    inputs = exact_inputs(1, 2, 2, 512, 1024, 128, torch.bfloat16)
    check(*inputs, threshold)
    for have, want in zip(attend(*inputs, threshold), attend(*inputs, acts_as), strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_threshold_for_each_batch_item(head_dim: int, order: str) -> None:
    query, key, value = exact_inputs(4, 20, 10, 700, 1100, head_dim, torch.bfloat16)
    check(query, key, value, torch.tensor([THRESHOLD, 0.0, THRESHOLD**0.5, 0.0], device="cuda"), tile_order=order)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 0.25, 1.0])
def test_scales(scale: float) -> None:
    check(*exact_inputs(1, 2, 2, 300, 900, 64, torch.bfloat16), THRESHOLD, scale=scale)


def test_expanded_and_sliced_views() -> None:
    query, key, value = exact_inputs(2, 4, 1, 512, 1024, 128, torch.bfloat16)
    check(query, key.expand(2, 4, -1, -1), value.expand(2, 4, -1, -1), THRESHOLD)
    check(query, key[:1].expand(2, -1, -1, -1), value[:1].expand(2, -1, -1, -1), THRESHOLD)
    check(query.contiguous(), key.contiguous(), value.contiguous(), THRESHOLD)
    packed = torch.full((2, 700, 3, 4, 128), math.nan, device="cuda", dtype=torch.bfloat16)
    for i, x in enumerate(exact_inputs(2, 4, 4, 512, 512, 128, torch.bfloat16)):
        packed[:, 50:562, i] = x.transpose(1, 2)
    check(*(packed[:, 50:562, i].transpose(1, 2) for i in range(3)), THRESHOLD)


def test_rows_and_keys_past_the_end_are_not_read() -> None:
    padded = [torch.full((1, 400, 2, 64), math.nan, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    for target, x in zip(padded, exact_inputs(1, 2, 2, 333, 333, 64, torch.bfloat16), strict=True):
        target[:, :333] = x.transpose(1, 2)
    for threshold in (0.0, THRESHOLD):
        check(*(x[:, :333].transpose(1, 2) for x in padded), threshold)


def test_unaligned_views_are_refused() -> None:
    query = torch.randn(1, 2, 64, 65, device="cuda", dtype=torch.bfloat16)[..., 1:]
    key = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        attend(query, key, key, 0.0)
    with pytest.raises(ValueError, match="head_dim must be 64 or 128, got 32"):
        attend(key[..., :32], key[..., :32], key[..., :32], 0.0)


def test_value_of_skipped_tiles_is_not_read() -> None:
    query, key, value = exact_inputs(1, 2, 2, 512, 1024, 128, torch.bfloat16)
    key[..., 0] = 8
    key[:, :, 128:512, 0] = -8
    value[:, :, 128:512] = math.nan
    out, _, counts = attend(query, key, value, THRESHOLD)
    assert out.isfinite().all()
    assert counts[..., 1].eq(3 * 8).all()


def test_nan_stays_in_its_row_and_objects() -> None:
    query, key, value = exact_inputs(1, 2, 2, 512, 1024, 128, torch.bfloat16)
    query[0, 1, 100, 3] = math.nan
    out, lse, counts = attend(query, key, value, THRESHOLD)
    bad = torch.zeros(1, 2, 512, dtype=torch.bool, device="cuda")
    bad[0, 1, 100] = True
    assert torch.equal(out.isnan().all(-1), bad)
    assert torch.equal(out.isnan().any(-1), bad)
    assert torch.equal(lse.isnan(), bad)
    assert torch.equal(counts, reference_attention(query, key, value, torch.tensor(THRESHOLD, device="cuda"), scale=SCALE)[2])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_negative_scores(head_dim: int, order: str) -> None:
    """The kernel looks for maxima among integers, whose order is another where all floats are negative."""
    query, key, value = exact_inputs(1, 2, 2, 512, 2048, head_dim, torch.bfloat16)
    key[..., 0] = -3 - (key[..., 0].abs() / 2).floor()
    assert (query.float() @ key.float().mT).max() < 0
    for threshold in (THRESHOLD, 1.0):
        assert check(query, key, value, threshold, tile_order=order)[1] > 0


def test_no_keys_and_no_rows() -> None:
    query, key, value = exact_inputs(1, 2, 2, 100, 128, 128, torch.bfloat16)
    out, lse, counts = attend(query, key[:, :, :0], value[:, :, :0], THRESHOLD)
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()
    assert counts.eq(0).all()
    assert attend(query[:, :, :0], key, value, THRESHOLD)[2].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dense_error_is_no_larger_than_cudnn(head_dim: int, dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(2, 2048, 8, head_dim, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(3))
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        cudnn = F.scaled_dot_product_attention(query, key, value)
    ours = attend(query, key, value, 0.0, scale=head_dim**-0.5)[0]
    errors = [((x.double() - exact).norm() / exact.norm()).item() for x in (ours, cudnn)]
    assert errors[0] <= 1.05 * errors[1]


def test_repeats_are_bit_identical() -> None:
    inputs = exact_inputs(1, 12, 12, 2048, 2048, 128, torch.bfloat16)  # 192 blocks for 132 multiprocessors
    keep = torch.rand(1, 1, 1, 2048, device="cuda") < 0.5
    for threshold in (0.0, THRESHOLD):
        for mask, times in ((None, 500), (keep, 100)):
            first = attend(*inputs, threshold, mask)
            for _ in range(times):
                assert all(torch.equal(x, y) for x, y in zip(attend(*inputs, threshold, mask), first, strict=True))


def test_random_shapes() -> None:
    choose = random.Random(0)
    for seed in range(200):
        kv_heads, share = choose.randint(1, 3), choose.randint(1, 3)
        shape = (choose.randint(1, 3), kv_heads * share, kv_heads, choose.randint(1, 900), choose.randint(1, 1500))
        inputs = exact_inputs(*shape, choose.choice((64, 128)), choose.choice((torch.bfloat16, torch.float16)), seed)
        mask = torch.rand(shape[0], 1, 1, shape[4], device="cuda") < 0.7 if choose.random() < 0.3 else None
        check(
            *inputs,
            choose.choice((0.0, THRESHOLD, THRESHOLD)),
            attn_mask=mask,
            is_causal=choose.random() < 0.3,
            tile_order=choose.choice(ORDERS),
        )


def test_more_than_2_31_elements() -> None:
    batch, heads, tokens = 1024, 128, 130
    query = torch.randn(batch, tokens, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    assert query.numel() > 2**31
    out, lse, counts = attend(query, query, query, 1e-3, scale=0.125)
    for b, h in ((0, 0), (batch - 1, heads - 1), (517, 93)):
        one = query[b : b + 1, h : h + 1]
        want = attend(one, one, one, 1e-3, scale=0.125)
        for have, expected in zip((out, lse, counts), want, strict=True):
            assert torch.equal(have[b : b + 1, h : h + 1], expected)


def test_cuda_graph_follows_the_threshold() -> None:
    query, key, value = exact_inputs(1, 40, 40, 512, 1024, 128, torch.bfloat16)  # 160 blocks
    threshold = torch.zeros((), device="cuda")
    with torch.no_grad():
        run = lambda: ops.attention(query, key, value, threshold, None, None, False, SCALE, "ascending", "sm90")
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = run()
    for x in (0.0, THRESHOLD, 1.0, 0.0):
        threshold.fill_(x)
        graph.replay()
        for have, want in zip(recorded, attend(query, key, value, x), strict=True):
            assert torch.equal(have, want)


def test_streams_side_by_side() -> None:
    inputs = exact_inputs(1, 20, 20, 1024, 1024, 128, torch.bfloat16)  # 160 blocks
    want = attend(*inputs, THRESHOLD)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(attend(*inputs, THRESHOLD))
    torch.cuda.synchronize()
    for result in results:
        assert all(torch.equal(x, y) for x, y in zip(result, want, strict=True))


def test_operator_reaches_the_kernel() -> None:
    query, key, value = exact_inputs(1, 2, 2, 512, 1024, 128, torch.bfloat16)
    threshold = torch.tensor(THRESHOLD, device="cuda")
    with torch.no_grad():
        have = ops.attention(query, key, value, threshold, None, None, False, SCALE, "own_first", "sm90")
        auto = ops.attention(query, key, value, threshold, None, None, False, SCALE, "own_first", "auto")
    for x, y, want in zip(have, auto, attend(query, key, value, threshold, tile_order="own_first"), strict=True):
        assert torch.equal(x, want)
        assert torch.equal(y, want)
