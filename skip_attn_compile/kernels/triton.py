"""Skip-softmax attention on every GPU that Triton compiles for. `triton_kernel.py` beside this is the kernel; here it is launched."""

from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skip_attn_compile.kernels import Implementation, Problem, Results, cuda_capability, mask_kind, words
from skip_attn_compile.operands import check_inputs

TILE_Q, TILE_K = 64, 128
MAX_HEAD_DIM = 256
LARGE_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))  # 163 KB or more a program; all others are taken to have 99 KB


class Config(NamedTuple):
    """How the kernel is compiled for one kind of problem. Chosen from tables: timing candidates at run time would wait for the device."""

    block_q: int  # query rows of a program: TILE_Q, or a multiple of it where nothing votes
    num_warps: int
    num_stages: int  # key tiles in flight
    chunk: int  # dimensions of a row that are in shared memory at a time, a power of 2


def config(capability: tuple[int, int] | None, element_size: int, dim: int, vote: bool) -> Config:
    """dim: the larger of head_dim and value_dim; vote: as in the kernel."""
    if element_size == 4:  # products on the ordinary cores, whose operands need many registers
        return Config(64, 8, 1, 32)
    if capability not in LARGE_SHARED_MEMORY:
        return Config(64, 4, 2 if vote and dim <= 128 else 1, 128)
    if dim > 128:
        return Config(64, 8, 1, 256)
    if vote:
        return Config(64, 4, 2 if dim > 64 else 3, 128)
    return Config(128, 8, 2 if dim > 64 and capability == (8, 0) else 3, 128)  # three stages are 229 KB at 128


class Variant(NamedTuple):
    """TRIAL: how the launch that votes differs from the table; `early` and the rest as the constants of the kernel."""

    block_q: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    early: bool = False
    tma: bool = False
    halves: int = 1
    maxnreg: int | None = None


PLAIN = Variant()
VARIANTS = {
    "plain": PLAIN,
    "early": Variant(early=True),
    "early_halves": Variant(early=True, halves=2),
    "tma": Variant(tma=True),
    "tma_early": Variant(tma=True, early=True),
    "wide_early": Variant(128, 8, 3, early=True),
    "wide_tma_early": Variant(128, 8, 3, early=True, tma=True),
    "wide_tma_early_128": Variant(128, 8, 3, early=True, tma=True, maxnreg=128),  # for D = 64: two programs a multiprocessor
}
chosen = "plain"


class Launch(NamedTuple):
    vote: bool  # as VOTE and WHICH of the kernel
    which: str
    config: Config
    variant: Variant = PLAIN


def measuring(capability: tuple[int, int] | None, element_size: int, dim: int, tile_q: int, masked: bool) -> Launch:
    """How to measure: in blocks of one group, of `tile_q` rows. Where a tile can be masked, V must wait for the vote."""
    if tile_q == TILE_Q:  # V waits anyway: without tiles of V that are loaded ahead, two programs fit a multiprocessor
        return Launch(True, "all", config(capability, element_size, dim, True))
    if element_size == 4:
        chosen = Config(tile_q, 8, 1, 32)
    elif capability not in LARGE_SHARED_MEMORY:
        chosen = Config(tile_q, 8, 1, 64)
    else:
        chosen = Config(tile_q, 8, 2 if dim <= 128 else 1, 128)
    return Launch(masked, "all", chosen)


def _capability(query: Tensor) -> tuple[int, int] | None:
    return cuda_capability(query.device.index) if query.is_cuda else None


@cache
def _kernel() -> Any:  # a triton.JITFunction
    from skip_attn_compile.kernels import triton_kernel

    return triton_kernel.attention_kernel


def _fits(query: Tensor, key: Tensor, value: Tensor, threshold: Tensor, attn_mask: Tensor | None, query_mask: Tensor | None) -> bool:
    """Whether the kernel takes these, all on one device. That masks broadcast is left to `expand`."""
    (batch, heads, _, head_dim), (kv_heads, keys, value_dim) = query.shape, value.shape[1:]
    return (
        query.get_device() == key.get_device() == value.get_device()
        and key.shape == (batch, kv_heads, keys, head_dim)
        and value.shape[0] == batch
        and kv_heads > 0
        and heads % kv_heads == 0
        and query.dtype == key.dtype == value.dtype
        and max(head_dim, value_dim) <= MAX_HEAD_DIM
        and threshold.dtype == torch.float32
        and threshold.shape in ((), (batch,))
        and (attn_mask is None or (mask_kind(attn_mask) == "key" and (attn_mask.dtype == torch.bool or attn_mask.is_floating_point())))
        and (query_mask is None or (query_mask.dtype == torch.bool and query_mask.dim() == 4))
    )


def _variant(query: Tensor, key: Tensor, value: Tensor, masked: bool, tile_order: str) -> Variant:
    """The chosen variant where it serves, else the plain one."""
    variant, capability = VARIANTS[chosen], _capability(query)
    on_hopper = capability == (9, 0) and query.element_size() == 2 and 32 < max(query.shape[3], value.shape[3]) <= 128
    if masked or not (on_hopper or capability is None):  # None: Triton's interpreter
        return PLAIN
    if variant.block_q == 2 * TILE_Q and tile_order == "own_first" and query.shape[2] != key.shape[2]:
        return PLAIN  # the groups of a program may begin at different tiles
    if variant.tma and not all(map(_describable, (key, value))):
        return PLAIN
    return variant


def _describable(x: Tensor) -> bool:
    """Whether a tensor descriptor takes x."""
    aligned = all(stride * x.element_size() % 16 == 0 and stride > 0 for stride in x.stride()[:3])
    return aligned and x.stride(3) == 1 and x.data_ptr() % 16 == 0 and x.numel() > 0


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    results: Results,
    is_causal: bool,
    scale: float,
    tile_order: str,
) -> None:
    """Shapes as in `ops.py`, checked here; asynchronous, on the current stream of query's device.

    Calls without a mask launch two kernels, each of which returns at once in the batch items that are the other's: one votes, one knows
    that lambda is 0 and loads V ahead.
    """
    if not _fits(query, key, value, threshold, attn_mask, query_mask):
        check_inputs(query, key, value, threshold, attn_mask, query_mask)  # says what is wrong, in six times the time
        raise ValueError(f"attn_mask must be a key mask and head_dim at most {MAX_HEAD_DIM}")
    known = _capability(query), query.element_size(), max(query.shape[3], value.shape[3])
    votes, dense = config(*known, True), config(*known, False)
    masked = attn_mask is not None or query_mask is not None or is_causal
    variant = _variant(query, key, value, masked, tile_order) if known[2] <= votes.chunk else PLAIN
    votes = votes._replace(**{name: x for name in ("block_q", "num_warps", "num_stages") if (x := getattr(variant, name)) is not None})
    launches = (Launch(True, "all", votes),) if masked else (Launch(True, "sparse", votes, variant), Launch(False, "dense", dense))
    _launch(launches, query, key, value, threshold, attn_mask, query_mask, *results, is_causal, scale, tile_order)


def measure(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    thresholds: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    results: tuple[Tensor, Tensor],
    is_causal: bool,
    scale: float,
    tile_order: str,
    tile: tuple[int, int],
) -> None:
    """Shapes as in `measure.py`; asynchronous, like `run`."""
    out, counts = results
    masked = attn_mask is not None or query_mask is not None or is_causal
    launch = measuring(_capability(query), query.element_size(), max(query.shape[3], value.shape[3]), tile[0], masked)
    _launch(
        (launch,),
        query,
        key,
        value,
        thresholds,
        attn_mask,
        query_mask,
        out,
        out,
        counts,
        is_causal,
        scale,
        tile_order,
        group=tile[0],
        trials=len(thresholds),
    )


def _launch(
    launches: Iterable[Launch],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    counts: Tensor,
    is_causal: bool,
    scale: float,
    tile_order: str,
    group: int = TILE_Q,
    trials: int = 0,
) -> None:
    """group, trials: as GROUP and TRIALS of the kernel."""
    batch, heads, rows, head_dim = query.shape
    kv_heads, keys, value_dim = value.shape[1:]
    padded = [max(16, 1 << (dim - 1).bit_length()) for dim in (head_dim, value_dim)]
    counts.zero_()
    if out.numel() == 0:
        return
    mask = "none" if attn_mask is None else "bool" if attn_mask.dtype == torch.bool else "add"
    key_mask = query if attn_mask is None else attn_mask.expand(batch, 1, 1, keys)
    row_mask = query if query_mask is None else query_mask.expand(batch, 1, rows, 1)
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        for vote, which, (block_q, num_warps, num_stages, chunk), variant in launches:
            block_d, block_dv = (min(dim, chunk) for dim in padded)
            k, v = (_descriptor(key, block_d), _descriptor(value, block_dv // variant.halves)) if variant.tma else (key, value)
            _kernel()[(batch * heads * -(-rows // block_q), -(-value_dim // block_dv))](
                query,
                k,
                v,
                threshold,
                key_mask,
                row_mask,
                out,
                lse,
                counts,
                query.stride(),
                key.stride(),
                value.stride(),
                out.stride(),
                threshold.stride(0) if threshold.dim() else 0,
                (key_mask.stride(0), key_mask.stride(3)),
                (row_mask.stride(0), row_mask.stride(2)),
                heads,
                kv_heads,
                rows,
                keys,
                head_dim,
                value_dim,
                scale,
                VOTE=vote,
                TRIALS=trials,
                WHICH=which,
                MASK=mask,
                QUERY_MASK=query_mask is not None,
                CAUSAL=is_causal,
                OWN_FIRST=tile_order == "own_first",
                SCALE_FIRST=mask == "add" or scale <= 0,
                CHECK_KEYS=keys % TILE_K != 0,
                GROUP=group,
                BLOCK_Q=block_q,
                BLOCK_D=block_d,
                CHUNKS_D=-(-head_dim // block_d),
                BLOCK_DV=block_dv,
                CHECK_D=head_dim % block_d != 0,
                CHECK_DV=value_dim % block_dv != 0,
                EARLY=variant.early,
                TMA=variant.tma,
                HALVES=variant.halves,
                PRECISION="ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
                num_warps=num_warps,
                num_stages=num_stages,
                **({"maxnreg": variant.maxnreg} if variant.maxnreg else {}),
            )


def _descriptor(x: Tensor, width: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, TILE_K, width])


def unavailable(problem: Problem) -> str | None:
    """Why the kernel cannot run on this machine, or None."""
    if problem.capability is not None and problem.capability < (8, 0):
        return f"it needs compute capability 8.0 or newer, this device has {words(problem.capability)}"
    return "the package triton is not installed; pip install triton" if find_spec("triton") is None else None


IMPLEMENTATION = Implementation(
    name="triton",
    device_types=("cuda",),
    tile_q=TILE_Q,
    tile_k=TILE_K,
    tile_orders=("ascending", "own_first"),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    head_dims=None,
    masks=("none", "key"),
    run=run,
    capability="8.0 or newer",
    max_head_dim=MAX_HEAD_DIM,
    load=_kernel,
    unavailable=unavailable,
    checks_arguments=True,
    measure=measure,
    measured_tiles=((TILE_Q, TILE_K), (2 * TILE_Q, TILE_K)),
)
