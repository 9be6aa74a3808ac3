"""Skip-softmax attention on Hopper (compute capability 9.0): calls the CUDA library built from `csrc/`.

The library is loaded through apache-tvm-ffi at the first call and knows nothing of torch's or Python's ABI. It checks
its arguments, zeroes the counts and launches one kernel on the current stream; the operator allocates what it writes.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from skip_attn_compile.kernels import Implementation, Problem, Results, words

TILE_Q = 64
TILE_K = 128


@cache
def _library() -> Any:  # a tvm_ffi.Module
    """Building the library, where none was carried along, takes a minute or two, once per machine."""
    import tvm_ffi

    from skip_attn_compile import build

    return tvm_ffi.load_module(str(build.library()))


@cache
def _attention() -> Any:  # a tvm_ffi.Function
    return _library().attention


@cache
def _measure() -> Any:
    return _library().measure


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
    """Shapes as in `ops.py`; asynchronous, on the current stream of query's device.

    Finite values of attn_mask beyond 1e6 act as 1e6, so they are equal among themselves. A row that sees nothing else gets the softmax of
    its rounded scores, where the reference rounds them away, and its tiles may be skipped; its lse shows that number.
    """
    _attention()(query, key, value, threshold, attn_mask, query_mask, *results, is_causal, scale, tile_order == "own_first")


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
    """Shapes as in `measure.py`; asynchronous, like `run`.

    Where causal and key mask together leave a tile empty for a group of rows, and in masked tiles among more than 131,072 keys, V is
    multiplied by zeros: a NaN in it reaches out.
    """
    wide = tile[0] == 2 * TILE_Q
    _measure()(query, key, value, thresholds, attn_mask, query_mask, *results, is_causal, scale, tile_order == "own_first", wide)


def unavailable(problem: Problem) -> str | None:
    """Why the kernel cannot run on this machine, or None: wrong GPU, no apache-tvm-ffi, no library and no way to build one."""
    if problem.capability != (9, 0):
        return f"it is built for compute capability 9.0 (H100, H200), this device has {words(problem.capability)}"
    from skip_attn_compile import build

    return build.unavailable()


IMPLEMENTATION = Implementation(
    name="sm90",
    device_types=("cuda",),
    tile_q=TILE_Q,
    tile_k=TILE_K,
    tile_orders=("ascending", "own_first"),
    dtypes=(torch.bfloat16, torch.float16),
    head_dims=(64, 128),
    masks=("none", "key"),
    run=run,
    capability="9.0",
    load=_attention,
    unavailable=unavailable,
    needs_alignment=True,
    checks_arguments=True,
    measure=measure,
    measured_tiles=((TILE_Q, TILE_K), (2 * TILE_Q, TILE_K)),
)
