"""Which implementations exist, what each publishes about itself, and which one serves a problem.

`choose`: facts in, an implementation or the reasons why none serves out. Adding an implementation means adding one file beside this one,
one line to `implementations` and its name to `config.IMPLEMENTATIONS`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from skip_attn_compile.sizes import is_one, provable

log = logging.getLogger(__name__)

Results = tuple[Tensor, Tensor, Tensor]
RunAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Results, bool, float, str], None]
"""(query, key, value, threshold, attn_mask, query_mask, (out, lse, counts), is_causal, scale, tile_order), shapes as in ops.py.

Writes out, lse and counts, which the operator allocates."""
RunMeasure = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, tuple[Tensor, Tensor], bool, float, str, tuple[int, int]], None
]
"""(query, key, value, thresholds, attn_mask, query_mask, (out, counts), is_causal, scale, tile_order, tile), shapes as in measure.py.

Writes out and counts. The operator allocates them, and has checked the arguments."""


class Problem(NamedTuple):
    """What an implementation must know to say yes or no. All static: none of it is read from the device."""

    device_type: str
    capability: tuple[int, int] | None  # CUDA compute capability, None elsewhere
    dtype: torch.dtype
    head_dim: int  # D of query and key
    value_dim: int  # Dv of value and out
    mask: str  # "none" | "key" ([B|1, 1, 1, Skv]) | "general"
    query_mask: bool
    is_causal: bool
    tile_order: str
    aligned: bool  # unit last stride, all other strides and the offset multiples of 16 bytes
    measured_tile: tuple[int, int] | None = None  # (rows, keys) that `measure` is to count; None: attention
    lambda_on_host: bool = True  # the threshold can be had as a tensor on the CPU

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, query_mask: bool, is_causal: bool, tile_order: str) -> "Problem":
        """The problem of a call: query [B,Hq,Sq,D], key [B,Hkv,Skv,D], value [B,Hkv,Skv,Dv]; tensors may be fake."""
        device = query.device
        return Problem(
            device.type,
            cuda_capability(device.index) if device.type == "cuda" else None,
            query.dtype,
            query.shape[3],
            value.shape[3],
            mask_kind(mask),
            query_mask,
            is_causal,
            tile_order,
            is_aligned(query) and is_aligned(key) and is_aligned(value),
        )


@dataclass(frozen=True)
class Implementation:
    """One way to run `skip_attn_compile::attention`, and what it publishes. Tiles are in rows (`tile_q`) and keys (`tile_k`)."""

    name: str
    device_types: tuple[str, ...] | None  # None: any
    tile_q: int
    tile_k: int
    tile_orders: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...] | None  # None: any, value_dim too; else head_dim == value_dim, one of these
    masks: tuple[str, ...]
    run: RunAttention
    capability: str = "any"  # CUDA compute capabilities, for users; `unavailable` decides
    max_head_dim: int | None = None  # of head_dim and value_dim
    load: Callable[[], object] = lambda: None  # builds or imports what `run` needs, may take minutes; called before the first run
    unavailable: Callable[[Problem], str | None] = lambda _: None  # why it cannot run on this machine (hardware, library), or None
    needs_alignment: bool = False
    # Does `run` raise ValueError, before it reads anything, where key, value, threshold or masks (all on query's device) do not fit? Then
    # the operator checks a kind of query once, not at every call.
    checks_arguments: bool = False
    lambda_on_host: bool = False  # `run` gets its threshold on the CPU
    counts_tiles: bool = True  # else its counts are 0
    measure: RunMeasure | None = None
    measured_tiles: tuple[tuple[int, int], ...] | None = ()  # (rows, keys) that it counts; None: any

    def not_supported_reasons(self, problem: Problem) -> list[str]:
        """Every reason why this implementation cannot serve `problem`; empty means it can."""
        reasons = []
        if self.device_types is not None and problem.device_type not in self.device_types:
            reasons.append(f"{self.name} runs on {_names(self.device_types)}, not on {problem.device_type}")
        elif (why := self.unavailable(problem)) is not None:
            reasons.append(f"{self.name} is unavailable: {why}")
        if problem.dtype not in self.dtypes:
            reasons.append(f"{self.name} takes {_names(self.dtypes)}, not {_names((problem.dtype,))}")
        if self.head_dims is not None and (problem.head_dim not in self.head_dims or problem.value_dim != problem.head_dim):
            dims = f"{problem.head_dim} and {problem.value_dim}"
            reasons.append(f"{self.name} takes head_dim {_names(self.head_dims)}, alike for value, not {dims}")
        if self.max_head_dim is not None and max(problem.head_dim, problem.value_dim) > self.max_head_dim:
            reasons.append(f"{self.name} takes head_dim up to {self.max_head_dim}, not {problem.head_dim} and {problem.value_dim}")
        if problem.mask not in self.masks:
            reasons.append(f"{self.name} takes masks of kind {_names(self.masks)}, not {problem.mask}")
        if problem.tile_order not in self.tile_orders:
            reasons.append(f"{self.name} takes tile_order {_names(self.tile_orders)}, not {problem.tile_order}")
        if self.needs_alignment and not problem.aligned:
            reasons.append(f"{self.name} needs a unit last stride and all other strides and offsets in multiples of 16 bytes")
        if problem.measured_tile is not None and self.measure is None:
            reasons.append(f"{self.name} does not measure")
        elif problem.measured_tile is not None and self.measured_tiles is not None and problem.measured_tile not in self.measured_tiles:
            tiles = ", ".join(f"{rows} x {keys}" for rows, keys in self.measured_tiles)
            reasons.append(f"{self.name} measures tiles of {tiles}, not {problem.measured_tile[0]} x {problem.measured_tile[1]}")
        if self.lambda_on_host and not problem.lambda_on_host:
            reasons.append(f"{self.name} takes lambda on the host, as a tensor on the CPU")
        if (failure := _failures.get((self.name, problem)) or _failures.get((self.name, None))) is not None:
            reasons.append(f"{self.name} failed before: {failure}")
        return reasons

    @property
    def published(self) -> str:
        """Where it runs, its tiles and its orders, in words."""
        where = "" if self.capability == "any" else f"compute capability {self.capability}, "
        return f"{where}tiles of {self.tile_q} rows and {self.tile_k} keys, {' or '.join(self.tile_orders)}"

    def __str__(self) -> str:
        return f"{self.name} ({self.published})"


@cache
def implementations() -> tuple[Implementation, ...]:
    """All implementations, the preferred ones first. Imported late: importing this package loads no kernel."""
    from skip_attn_compile.kernels import flashinfer, reference, sm90, triton

    return (sm90.IMPLEMENTATION, triton.IMPLEMENTATION, flashinfer.IMPLEMENTATION, reference.IMPLEMENTATION)


def choose(problem: Problem, name: str = "auto", *, explicit_call: bool = False) -> Implementation | list[str]:
    """The implementation that serves `problem`, or the reasons why none does.

    name: "auto" takes the first that serves; any other name takes that one or none. The reference serves CPU tensors under "auto";
    on other devices only when asked for by name or in an explicit call of the operator (`explicit_call`), where it is slow but right.
    """
    reasons: list[str] = []
    for implementation in implementations():
        if name not in ("auto", implementation.name):
            continue
        if name == "auto" and implementation.name == "reference" and problem.device_type != "cpu" and not explicit_call:
            reasons.append(f"reference serves {problem.device_type} only when asked for by name")
            continue
        found = implementation.not_supported_reasons(problem)
        if not found:
            if name == "auto":
                _log_choice(implementation, problem)
            return implementation
        reasons += found
    return reasons


@lru_cache(maxsize=256)
def _log_choice(implementation: Implementation, problem: Problem) -> None:
    """Once for each kind of problem."""
    log.info("attention runs on %s: %s", implementation, problem)


# What went wrong where an implementation was started, by its name and the problem; None: with every problem. Filled by `start` alone.
_failures: dict[tuple[str, Problem | None], str] = {}


def start(implementation: Implementation, problem: Problem, name: str, run: Callable[[], None]) -> bool:
    """Load an implementation and run it, for the first time on this kind of problem.

    name: how it was asked for. Under "auto" a failure is remembered, so that `choose` takes the next one, and warned about once; the
    result is then False. Asked for by its name, it raises RuntimeError with the cause. ValueError (arguments that do not fit) and lack
    of memory are no failures of the implementation, and always raise.
    """
    failing: Problem | None = None
    try:
        implementation.load()
        failing = problem
        run()
    except (ValueError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        if name != "auto" or implementation.name == "reference":
            remedy = "; implementation='auto' takes the next one" * (name != "auto")
            raise RuntimeError(f"implementation {implementation.name!r} could not be started: {cause}{remedy}") from error
        _failures[implementation.name, failing] = cause
        log.warning("implementation %r could not be started, attention runs on the next one: %s", implementation.name, cause)
        return False
    return True


def failures() -> list[str]:
    """Which implementations could not be started so far, in this process, and why."""
    return [f"{name} could not be started, so the next implementation ran in its place: {cause}" for (name, _), cause in _failures.items()]


def mask_kind(mask: Tensor | None) -> str:
    """ "none", "key" (broadcastable from [B,1,1,Skv]) or "general" (anything else that broadcasts to [B,Hq,Sq,Skv])."""
    if mask is None:
        return "none"
    rows_alike = mask.dim() < 2 or is_one(mask.shape[-2])
    heads_alike = mask.dim() < 3 or is_one(mask.shape[-3])
    return "key" if rows_alike and heads_alike else "general"


def is_aligned(tensor: Tensor) -> bool:
    """Unit last stride, other strides and the offset in multiples of 16 bytes; strides of size-1 dimensions do not count."""
    step = 16 // tensor.element_size()
    if not provable(tensor.stride(-1) == 1) or not provable(tensor.storage_offset() % step == 0):
        return False
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return all(provable(size == 1) or provable(stride % step == 0) for size, stride in outer)


@cache
def cuda_capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def words(capability: tuple[int, int] | None) -> str:
    """A CUDA compute capability as NVIDIA writes it."""
    return "none" if capability is None else ".".join(map(str, capability))


def _names(values: tuple) -> str:
    return ", ".join(str(v).removeprefix("torch.") for v in values)
