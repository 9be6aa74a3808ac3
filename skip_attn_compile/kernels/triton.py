"""Skip-softmax attention on every GPU that Triton compiles for. `triton_kernel.py` beside this is the kernel,
`triton_table.py` how it is compiled for which problem; here it is launched."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skip_attn_compile.kernels import Implementation, Problem, Results, cuda_capability, mask_kind, triton_table, words
from skip_attn_compile.kernels.triton_table import TILE_K, TILE_Q, Config
from skip_attn_compile.operands import check_inputs

MAX_HEAD_DIM = 256


def _capability(query: Tensor) -> tuple[int, int] | None:
    return cuda_capability(query.device.index) if query.is_cuda else None


@cache
def _module() -> Any:  # imports Triton
    from skip_attn_compile.kernels import triton_kernel

    return triton_kernel


def _kernel() -> Any:  # a triton.JITFunction
    return _module().attention_kernel


def _precision(query: Tensor) -> str:
    """Of products. Asked of CUDA's own setting: torch.get_float32_matmul_precision() raises where that was set by its newer name."""
    return "tf32" if query.element_size() == 4 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


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
    """Shapes as in `ops.py`, checked here; asynchronous, on the current stream of query's device."""
    _launch(query, key, value, threshold, attn_mask, query_mask, *results, is_causal, scale, tile_order, TILE_Q, 0)


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
    options = is_causal, scale, tile_order, tile[0], len(thresholds)
    _launch(query, key, value, thresholds, attn_mask, query_mask, out, out, counts, *options)


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    counts: Tensor,
    *options: Any,
) -> None:
    """out, lse, counts: as the operators allocate them, aligned. options: as of `_plan`, after `precision`."""
    given = query, key, value, threshold, attn_mask, query_mask
    options = _precision(query), *options
    kind = *map(_layout, given), out.stride(), options
    plan = plans.get(kind)
    if plan is None:
        if len(plans) >= PLANS_KEPT:
            plans.clear()
        plan = plans[kind] = _plan(*given, out, *options)
    counts.zero_()
    pointers = descriptors = key, value
    if plan.blocks is not None:
        descriptors = tuple(_module().Descriptor(x, x.shape, x.stride(), block) for x, block in zip(pointers, plan.blocks, strict=True))
    rest = threshold, query if attn_mask is None else attn_mask, query if query_mask is None else query_mask, out, lse, counts
    elsewhere = query.is_cuda and query.get_device() != torch.cuda.current_device()
    with torch.cuda.device(query.device) if elsewhere else nullcontext():
        for step in plan.steps:
            step(query, *(descriptors if step.config.tma else pointers), *rest)


def _layout(x: Tensor | None) -> tuple[Any, ...] | None:
    """All that a launch may depend on, for an input."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16 == 0)


class Step:
    """A launch of the kernel. Triton is asked for the compiled kernel once, which takes six times as long as to start it; from then on it
    does not look at what it looks at when asked (`pre_run_hooks`, its debug knob)."""

    def __init__(self, grid: tuple[int, int, int], arguments: dict[str, Any], config: Config) -> None:
        """arguments: of the kernel after its tensors, in its order."""
        self.grid, self.arguments, self.config = grid, arguments, config
        self.values = tuple(arguments.values())
        self.start: Callable[..., None] | None = None

    def __call__(self, *tensors: Any) -> None:
        if self.start is not None:
            self.start(*tensors, *self.values)
            return
        options = {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}
        compiled = _kernel()[self.grid](*tensors, **self.arguments, **options)
        if compiled is not None:  # None: in Triton's interpreter
            self.start, self.arguments = compiled[self.grid], {}


class Plan(NamedTuple):
    """How calls of one kind are run."""

    steps: list[Step]
    blocks: tuple[list[int], list[int]] | None  # of the descriptors of K and V, where a step takes them


plans: dict[tuple[Any, ...], Plan] = {}
PLANS_KEPT = 4096


def _plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    out: Tensor,
    precision: str,
    is_causal: bool,
    scale: float,
    tile_order: str,
    group: int,
    trials: int,
) -> Plan:
    """precision, group, trials: as PRECISION, GROUP and TRIALS of the kernel."""
    if not trials and not _fits(query, key, value, threshold, attn_mask, query_mask):
        check_inputs(query, key, value, threshold, attn_mask, query_mask)  # says what is wrong
        raise ValueError(f"attn_mask must be a key mask and head_dim at most {MAX_HEAD_DIM}")
    if out.numel() == 0:
        return Plan([], None)
    (batch, heads, rows, head_dim), (kv_heads, keys, value_dim) = query.shape, value.shape[1:]
    padded = [max(16, 1 << (dim - 1).bit_length()) for dim in (head_dim, value_dim)]
    mask = "none" if attn_mask is None else "bool" if attn_mask.dtype == torch.bool else "add"
    key_mask = query if attn_mask is None else attn_mask.expand(batch, 1, 1, keys)
    row_mask = query if query_mask is None else query_mask.expand(batch, 1, rows, 1)
    masked = attn_mask is not None or query_mask is not None or is_causal
    capability = _capability(query)
    known = capability, query.element_size(), max(head_dim, value_dim)
    described = triton_table.is_described(capability, key, value)
    launches = triton_table.measuring(*known, group, masked, described) if trials else triton_table.attending(*known, masked, described)
    steps = []
    for vote, which, chosen in launches:
        block_d, block_dv = (min(dim, chosen.chunk) for dim in padded)
        arguments = {
            "query_stride": query.stride(),
            "key_stride": key.stride(),
            "value_stride": value.stride(),
            "out_stride": out.stride(),
            "threshold_stride": threshold.stride(0) if threshold.dim() else 0,
            "attn_mask_stride": (key_mask.stride(0), key_mask.stride(3)),
            "query_mask_stride": (row_mask.stride(0), row_mask.stride(2)),
            "heads": heads,
            "kv_heads": kv_heads,
            "q_len": rows,
            "kv_len": keys,
            "head_dim": head_dim,
            "value_dim": value_dim,
            "scale": scale,
            "VOTE": vote,
            "TRIALS": trials,
            "WHICH": which,
            "MASK": mask,
            "QUERY_MASK": query_mask is not None,
            "CAUSAL": is_causal,
            "OWN_FIRST": tile_order == "own_first",
            "SCALE_FIRST": mask == "add" or scale <= 0,
            "CHECK_KEYS": keys % TILE_K != 0,
            "GROUP": group,
            "BLOCK_Q": chosen.block_q,
            "BLOCK_D": block_d,
            "CHUNKS_D": -(-head_dim // block_d),
            "BLOCK_DV": block_dv,
            "CHECK_D": head_dim % block_d != 0,
            "CHECK_DV": value_dim % block_dv != 0,
            "PRECISION": precision,
            "TMA": chosen.tma,
            "EARLY": chosen.early,
        }
        steps.append(Step((batch * heads * -(-rows // chosen.block_q), -(-value_dim // block_dv), 1), arguments, chosen))
    blocks = [[1, 1, TILE_K, width] for width in padded]
    return Plan(steps, (blocks[0], blocks[1]) if any(step.config.tma for step in steps) else None)


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
