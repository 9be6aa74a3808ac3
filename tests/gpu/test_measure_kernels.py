"""The kernels that measure, against the reference, against one run for each lambda, and against themselves at lambda 0.

Scores are multiples of half a nat, lambdas lie between two of them, or are 0 or 1: no decision is near its boundary (`test_sm90.py`).
"""

import math

import pytest
import torch
import torch.nn.functional as F
from test_sm90 import SCALE, exact_inputs, tolerance
from torch import Tensor, nn

from skip_attn_compile import SkipConfig, kernels
from skip_attn_compile.kernels import Implementation, Problem, sm90, triton
from skip_attn_compile.measure import measure
from skip_attn_compile.observe import Observer
from skip_attn_compile.reference import reference_attention
from skip_attn_compile.results import empty_results

ORDERS = ("ascending", "own_first")
LAMBDAS = [0.0, *(math.exp(-0.5 * n - 0.25) for n in range(29, -1, -1)), 1.0]
MEASURING = [x for x in (sm90.IMPLEMENTATION, triton.IMPLEMENTATION) if x.measure is not None]
TILES = ((64, 128), (128, 128))
SHAPES = [  # B, Hq, Hkv, Sq, Skv
    (2, 4, 2, 512, 512),
    (1, 3, 1, 333, 777),
    (2, 2, 2, 1000, 2000),
    (1, 2, 2, 2000, 640),
    (1, 2, 1, 130, 1),
    (1, 1, 1, 64, 4096),
    (3, 1, 1, 65, 129),
]


@pytest.fixture(params=MEASURING, ids=lambda kernel: kernel.name)
def kernel(request: pytest.FixtureRequest) -> Implementation:
    problem = Problem("cuda", torch.cuda.get_device_capability(), torch.bfloat16, 128, 128, "none", False, False, "ascending", True)
    if (reason := request.param.unavailable(problem)) is not None:
        pytest.skip(reason)
    return request.param


def check(
    kernel: Implementation,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    tile_order: str = "ascending",
    tile: tuple[int, int] = (64, 128),
    lambdas: list[float] = LAMBDAS,
) -> Tensor:
    """Counts and output of one call with poisoned outputs; returns the counts, summed: [visited, skipped at each lambda]."""
    trials = torch.tensor(lambdas, device="cuda")
    out, *_ = results = empty_results(query, value)
    counts = torch.full((*query.shape[:2], 1 + len(lambdas)), -7, dtype=torch.int32, device="cuda")
    given = query, key, value, trials, attn_mask, query_mask, (out.fill_(math.nan), counts), is_causal, SCALE, tile_order, tile
    kernel.measure(*given)
    options = {"scale": SCALE, "is_causal": is_causal, "tile_order": tile_order}
    wide = (x.float() for x in (query, key, value))
    want, _, want_counts = reference_attention(*wide, trials.new_zeros(()), attn_mask, query_mask, **options, tile_q=tile[0], trials=trials)
    assert torch.equal(counts, want_counts)
    assert relative_error(out, want) <= tolerance(query.dtype, key.shape[2])

    once = tuple(map(torch.empty_like, results))
    for number in (0, len(lambdas) // 2, len(lambdas) - 1) if tile == (64, 128) else (0,):
        kernel.run(query, key, value, trials[number], attn_mask, query_mask, once, is_causal, SCALE, tile_order)
        if tile == (64, 128):
            assert torch.equal(once[2], counts[..., [0, 1 + number]])
        if lambdas[number] == 0:
            assert relative_error(out, once[0].float()) <= tolerance(query.dtype, key.shape[2])
            assert torch.equal((out == 0).all(-1), (once[0] == 0).all(-1)), "rows without a key"
    return counts.sum((0, 1))


def relative_error(have: Tensor, want: Tensor) -> Tensor:
    return (have.float() - want).norm() / want.norm().clamp_min(1e-20)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16), (80, torch.float16), (64, torch.float32)],
)
def test_shapes(kernel: Implementation, head_dim: int, dtype: torch.dtype, causal: bool, order: str, tile: tuple[int, int]) -> None:
    if dtype not in kernel.dtypes or (kernel.head_dims is not None and head_dim not in kernel.head_dims):
        pytest.skip(f"{kernel.name} does not take {dtype}, head_dim {head_dim}")
    seen = [check(kernel, *exact_inputs(*shape, head_dim, dtype), is_causal=causal, tile_order=order, tile=tile) for shape in SHAPES]
    counts = torch.stack(seen).sum(0)
    assert counts[1] == 0
    assert 0 < counts[2] < counts[-1] < counts[0]
    assert counts[1:].diff().ge(0).all()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_masks(kernel: Implementation, head_dim: int, causal: bool, tile: tuple[int, int]) -> None:
    query, key, value = exact_inputs(3, 4, 2, 700, 1100, head_dim, torch.bfloat16)
    keep = torch.rand(3, 1, 1, 1100, device="cuda") < 0.5
    keep[0, ..., 128:512] = False  # whole tiles
    keep[2] = False  # no key at all
    rows = torch.rand(3, 1, 700, 1, device="cuda") < 0.5
    rows[0, :, 64:256] = False  # whole groups
    added = torch.where(keep, torch.randint(-4, 4, keep.shape, device="cuda") * 0.5, -math.inf)
    for mask in (keep, added, added.bfloat16(), keep[1, 0], keep[..., :1]):
        check(kernel, query, key, value, mask, rows, is_causal=causal, tile_order=ORDERS[causal], tile=tile)
    check(kernel, query, key, value, keep, is_causal=causal, tile=tile)
    check(kernel, query, key, value, query_mask=rows[:1], tile_order="own_first", tile=tile)


@pytest.mark.parametrize("number", [1, 2, 7, 32])
def test_any_number_of_lambdas(kernel: Implementation, number: int) -> None:
    inputs = exact_inputs(1, 2, 2, 512, 1024, 128, torch.bfloat16)
    check(kernel, *inputs, lambdas=LAMBDAS[:: len(LAMBDAS) // number][:number])


@pytest.mark.parametrize("tile", TILES)
def test_value_of_masked_tiles_is_not_read(kernel: Implementation, tile: tuple[int, int]) -> None:
    query, key, value = exact_inputs(1, 2, 2, 512, 1024, 128, torch.bfloat16)
    keep = (torch.arange(1024, device="cuda") // 128).sub(2).abs().ge(2).view(1, 1, 1, 1024)
    key[:, :, 128:512] = math.nan
    value[:, :, 128:512] = math.nan
    out, counts = torch.empty_like(query), torch.empty(1, 2, 2, dtype=torch.int32, device="cuda")
    trial = torch.ones(1, device="cuda")
    kernel.measure(query, key, value, trial, keep, None, (out, counts), False, SCALE, "own_first", tile)
    assert out.isfinite().all()
    assert counts[..., 0].eq(5 * 512 // tile[0]).all()


@pytest.mark.parametrize("where", ["query", "key"])
def test_nan_objects_to_every_lambda(kernel: Implementation, where: str) -> None:
    query, key, value = exact_inputs(1, 2, 2, 512, 1024, 128, torch.bfloat16)
    (query if where == "query" else key)[0, 1, 100, 3] = math.nan
    out, counts = torch.empty_like(query), torch.empty(1, 2, 3, dtype=torch.int32, device="cuda")
    trials = torch.tensor([LAMBDAS[20], 1.0], device="cuda")
    kernel.measure(query, key, value, trials, None, None, (out, counts), False, SCALE, "ascending", (64, 128))
    want = reference_attention(query, key, value, trials.new_zeros(()), scale=SCALE, trials=trials)
    assert torch.equal(counts, want[2])
    assert torch.equal(out.isnan(), want[0].isnan())


@pytest.mark.parametrize("tile", TILES)
def test_the_operator_runs_a_kernel(kernel: Implementation, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, without the reference to fall back to; in the memory order of query."""
    monkeypatch.setattr(kernels, "implementations", lambda: (kernel,))
    inputs = exact_inputs(2, 4, 2, 512, 1024, 128, torch.bfloat16)
    trials = torch.tensor(LAMBDAS, device="cuda")
    out, counts = measure(*inputs, trials, None, None, False, SCALE, "own_first", *tile)
    assert torch.equal(counts.sum((0, 1)), check(kernel, *inputs, tile_order="own_first", tile=tile))
    assert out.stride() == inputs[0].stride()


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, scale=SCALE, enable_gqa=True)


@pytest.mark.parametrize("masked", [False, True])
def test_a_measured_model_does_not_wait_for_the_device(masked: bool) -> None:
    query, key, value = exact_inputs(2, 4, 2, 512, 1024, 128, torch.bfloat16)
    mask = (torch.arange(1024, device="cuda") < 600).view(1, 1, 1, 1024) if masked else None
    model = Attention()
    config = SkipConfig(threshold=0.0, tile_order="own_first")
    observer = Observer({"": model}, lambda layer, kv_len: config, None, LAMBDAS, "own_first", (64, 128))
    with torch.no_grad(), observer.watching():
        model(query, key, value, mask)  # the first call of a kind may compile
        (first,) = observer.take().values()
        try:
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(3):
                model(query, key, value, mask)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    (counts,) = observer.take().values()
    assert counts[-1] == counts[0] * (600 if masked else 1024)
    assert counts == [3 * count for count in first]
