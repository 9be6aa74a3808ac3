"""What an attention call writes, allocated: shapes as in ops.py."""

from collections.abc import Sequence

import torch
from torch import Tensor

from skip_attn_compile.sizes import guarded

# Memory orders of (B, H, S), outermost first. [B,S,H,D] memory comes first: it is what diffusers makes, and what a query gets whose
# own order cannot be told (sliced, expanded, or of size 1).
_MEMORY_ORDERS = ((0, 2, 1), (0, 1, 2), (2, 0, 1), (2, 1, 0), (1, 0, 2), (1, 2, 0))


def output_stride(query: Tensor, value_dim: int) -> tuple[int, ...]:
    """Strides of the result [B,Hq,Sq,Dv]: query's dimension order where query [B,Hq,Sq,D] is dense, else [B,Sq,Hq,Dv] memory."""
    shape, stride = query.shape, query.stride()
    order = next((order for order in _MEMORY_ORDERS if _is_dense(shape, stride, order)), _MEMORY_ORDERS[0])
    result = [0, 0, 0, 1]
    step = value_dim
    for dim in reversed(order):
        result[dim] = step
        step *= shape[dim]
    return tuple(result)


def _is_dense(shape: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    step = shape[3]
    if not guarded(stride[3] == 1):
        return False
    for dim in reversed(order):
        if not guarded(shape[dim] == 1) and not guarded(stride[dim] == step):
            return False
        step = step * shape[dim]
    return True


def empty_out(query: Tensor, value: Tensor) -> Tensor:
    """out of a call, uninitialised."""
    shape = (*query.shape[:3], value.shape[3])
    return torch.empty_strided(shape, output_stride(query, value.shape[3]), dtype=query.dtype, device=query.device)


def empty_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and counts of a call, uninitialised."""
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    return empty_out(query, value), lse, torch.empty((*query.shape[:2], 2), dtype=torch.int32, device=query.device)
