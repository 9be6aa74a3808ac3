"""The compiled Triton kernel against the reference, on any GPU that has one: what the interpreter cannot tell."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_host import best_us
from test_sm90 import SCALE, THRESHOLD, exact_inputs, tolerance
from torch import Tensor

from skip_attn_compile import ops
from skip_attn_compile.kernels import triton
from skip_attn_compile.reference import reference_attention
from skip_attn_compile.results import empty_results

ORDERS = ("ascending", "own_first")
SHAPES = [  # B, Hq, Hkv, Sq, Skv
    (2, 4, 2, 512, 512),
    (1, 3, 1, 333, 777),
    (2, 2, 2, 1000, 2000),
    (1, 2, 1, 130, 1),
    (1, 2, 1, 1, 500),
    (1, 1, 1, 64, 4096),
    (3, 1, 1, 65, 129),
]


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
    triton.run(query, key, value, threshold, attn_mask, query_mask, results, is_causal, scale, tile_order)
    return results


def check(query: Tensor, key: Tensor, value: Tensor, threshold: float | Tensor, **options: object) -> Tensor:
    """Kernel and reference on the same call; returns the counts, summed: [visited, skipped]."""
    if not isinstance(threshold, Tensor):
        threshold = torch.tensor(threshold, device="cuda")
    options.setdefault("scale", SCALE)
    out, lse, counts = attend(query, key, value, threshold, **options)  # type: ignore[arg-type]
    want_out, want_lse, want_counts = reference_attention(query.double(), key.double(), value.double(), threshold, **options)  # type: ignore[arg-type]
    assert torch.equal(counts, want_counts)
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-4)
    error = (out.float() - want_out).norm() / want_out.norm().clamp_min(1e-20)
    assert error <= tolerance(query.dtype, key.shape[2]), f"relative error {error:.2e}"
    return counts.sum((0, 1))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (64, torch.bfloat16),
        (128, torch.bfloat16),
        (256, torch.bfloat16),
        (80, torch.float16),
        (100, torch.bfloat16),  # rows that no tensor descriptor takes
        (160, torch.bfloat16),
        (64, torch.float32),
    ],
)
def test_shapes(head_dim: int, dtype: torch.dtype, order: str) -> None:
    for threshold in (0.0, THRESHOLD):
        skipped = sum(int(check(*exact_inputs(*shape, head_dim, dtype), threshold, tile_order=order)[1]) for shape in SHAPES)
        assert (skipped > 0) == (threshold > 0)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_masks(causal: bool, head_dim: int) -> None:
    query, key, value = exact_inputs(3, 4, 2, 700, 1100, head_dim, torch.bfloat16)
    keep = torch.rand(3, 1, 1, 1100, device="cuda") < 0.5
    keep[0, ..., 128:512] = False  # whole tiles
    keep[2] = False  # no key at all
    rows = torch.rand(3, 1, 700, 1, device="cuda") < 0.5
    rows[0, :, 64:200] = False  # whole groups
    added = torch.where(keep, torch.randint(-4, 4, keep.shape, device="cuda") * 0.5, -math.inf)
    thresholds = torch.tensor([THRESHOLD, 0.0, THRESHOLD**0.5], device="cuda")
    options = {"is_causal": causal, "tile_order": ORDERS[causal]}
    for mask in (keep, added, added.bfloat16(), keep[1, 0], keep[..., :1]):
        check(query, key, value, thresholds, attn_mask=mask, query_mask=rows, **options)
    check(query, key, value, thresholds, attn_mask=keep, **options)
    check(query, key, value, THRESHOLD, query_mask=rows[:1], **options)


def test_value_of_skipped_and_of_masked_tiles_is_not_read() -> None:
    query, key, value = exact_inputs(1, 2, 2, 512, 1024, 128, torch.bfloat16)
    key[..., 0] = 8
    key[:, :, 128:512, 0] = -8
    value[:, :, 128:512] = math.nan
    out, _, counts = attend(query, key, value, THRESHOLD)
    assert out.isfinite().all()
    assert counts[..., 1].eq(3 * 8).all()
    keep = (torch.arange(1024, device="cuda") // 128).sub(2).abs().ge(2).view(1, 1, 1, 1024)
    key[:, :, 128:512] = math.nan
    for threshold in (0.0, THRESHOLD):
        out, _, counts = attend(query, key, value, threshold, attn_mask=keep)
        assert out.isfinite().all()
        assert counts[..., 0].eq(5 * 8).all()


@pytest.mark.parametrize("where", ["query", "key"])
def test_nan_objects_and_is_not_lost(where: str) -> None:
    query, key, value = exact_inputs(1, 2, 2, 512, 1024, 128, torch.bfloat16)
    (query if where == "query" else key)[0, 1, 100, 3] = math.nan
    for threshold in (0.0, THRESHOLD):
        out, lse, counts = attend(query, key, value, threshold)
        want = reference_attention(query, key, value, torch.tensor(threshold, device="cuda"), scale=SCALE)
        assert torch.equal(counts, want[2])
        assert torch.equal(lse.isnan(), want[1].isnan())
        assert torch.equal(out.isnan(), want[0].isnan())


@pytest.mark.parametrize(("threshold", "acts_as"), [(math.nan, 0.0), (-1.0, 0.0), (math.inf, 1.0), (7.0, 1.0)])
def test_thresholds_out_of_range(threshold: float, acts_as: float) -> None:
    inputs = exact_inputs(1, 2, 2, 512, 1024, 128, torch.bfloat16)
    for have, want in zip(attend(*inputs, threshold), attend(*inputs, acts_as), strict=True):
        assert torch.equal(have, want)


def test_views() -> None:
    query, key, value = exact_inputs(2, 4, 1, 512, 1024, 128, torch.bfloat16)
    check(query, key.expand(2, 4, -1, -1), value.expand(2, 4, -1, -1), THRESHOLD)
    packed = torch.full((2, 700, 3, 4, 128), math.nan, device="cuda", dtype=torch.bfloat16)
    for i, x in enumerate(exact_inputs(2, 4, 4, 512, 512, 128, torch.bfloat16)):
        packed[:, 50:562, i] = x.transpose(1, 2)
    check(*(packed[:, 50:562, i].transpose(1, 2) for i in range(3)), THRESHOLD)
    check(*(x.transpose(2, 3).contiguous().transpose(2, 3) for x in (query, key, value)), THRESHOLD)
    unaligned = [F.pad(x, (1, 0))[..., 1:] for x in (query, key, value)]
    for threshold in (0.0, THRESHOLD):
        check(*unaligned, threshold)


def test_dense_error_is_no_larger_than_flash_attention() -> None:
    query, key, value = (torch.randn(2, 2048, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    flash = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
    ours = attend(query, key, value, 0.0, scale=128**-0.5)[0]
    errors = [((x.double() - exact).norm() / exact.norm()).item() for x in (ours, flash)]
    assert errors[0] <= 1.05 * errors[1]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_repeats_are_bit_identical(head_dim: int) -> None:
    inputs = exact_inputs(1, 8, 8, 2048, 2048, head_dim, torch.bfloat16)
    for threshold in (0.0, THRESHOLD):
        first = attend(*inputs, threshold)
        for _ in range(100):
            assert all(torch.equal(x, y) for x, y in zip(attend(*inputs, threshold), first, strict=True))


def test_more_than_2_31_elements() -> None:
    query = torch.randn(1024, 130, 128, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    results = attend(query, query, query, 1e-3, scale=0.125)
    for b, h in ((0, 0), (1023, 127), (517, 93)):
        one = query[b : b + 1, h : h + 1]
        for have, want in zip(results, attend(one, one, one, 1e-3, scale=0.125), strict=True):
            assert torch.equal(have[b : b + 1, h : h + 1], want)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_cuda_graph_follows_the_threshold(head_dim: int) -> None:
    """And the inputs: a descriptor that the host made is part of the graph."""
    query, key, value = exact_inputs(1, 2, 2, 512, 1024, head_dim, torch.bfloat16)
    threshold = torch.zeros((), device="cuda")
    with torch.no_grad():
        run = lambda: ops.attention(query, key, value, threshold, None, None, False, SCALE, "ascending", "triton")
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = run()
    for x in (0.0, THRESHOLD, 1.0, 0.0):
        threshold.fill_(x)
        key.copy_(key.roll(200, 2))
        value.neg_()
        graph.replay()
        for have, want in zip(recorded, attend(query, key, value, x), strict=True):
            assert torch.equal(have, want)


def test_nothing_but_the_results_is_allocated() -> None:
    query, key, value = exact_inputs(1, 2, 2, 512, 1024, 128, torch.bfloat16)
    threshold = torch.tensor(THRESHOLD, device="cuda")
    run = lambda: ops.attention(query, key, value, threshold, None, None, False, SCALE, "ascending", "triton")
    with torch.no_grad():
        run()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        run()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 3


def test_host_time_of_a_call(capsys: pytest.CaptureFixture) -> None:
    """The bound only catches a call that asks Triton for its kernels anew (100 us more)."""
    inputs = [x.transpose(1, 2) for x in torch.randn(3, 2, 128, 4, 64, device="cuda", dtype=torch.bfloat16)]
    threshold = torch.tensor(0.3, device="cuda")
    with torch.inference_mode():
        call = lambda: ops.attention(*inputs, threshold, None, None, False, None, "ascending", "triton")
        call()
        took = best_us(call)
    with capsys.disabled():
        print(f"\nhost time of one operator call on Triton: {took:.1f} us")
    assert took < 130


def test_auto_takes_it_where_the_hopper_kernel_does_not_serve() -> None:
    query, key, value = exact_inputs(1, 2, 2, 512, 1024, 256, torch.bfloat16)
    threshold = torch.tensor(THRESHOLD, device="cuda")
    with torch.no_grad():
        have = ops.attention(query, key, value, threshold, None, None, False, SCALE, "own_first", "auto")
    for x, want in zip(have, attend(query, key, value, threshold, tile_order="own_first"), strict=True):
        assert torch.equal(x, want)
