"""What the tensors of an attention call must be, for every operator and kernel: contract, value and remedy in each error."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from skip_attn_compile.sizes import guarded


class Operands(NamedTuple):
    """What an attention call is made of, beside lambda. Shapes as in ops.py."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    query_mask: Tensor | None
    is_causal: bool
    scale: float | None


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    *,
    lambda_on_host: bool = False,
) -> None:
    """Raise ValueError with contract, value and remedy where the tensors do not fit together.

    lambda_on_host: the threshold is to be on the CPU.
    """
    threshold_device = torch.device("cpu") if lambda_on_host else query.device
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check_operand(name, tensor, query)
    batch, heads, rows, head_dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    _check(key.shape[0] == batch, lambda: f"key must have query's batch size {batch}, got {list(key.shape)}; expand it")
    _check(key.shape[3] == head_dim, lambda: f"key must have query's head_dim {head_dim}, got {list(key.shape)}")
    for dim, what in ((0, "batch size"), (1, "number of heads"), (2, "number of keys")):
        want = key.shape[dim]
        _check(value.shape[dim] == want, lambda what=what, want=want: f"value must have key's {what} {want}, got {list(value.shape)}")
    _check(
        kv_heads > 0 and heads % kv_heads == 0,
        lambda: f"query heads must be a multiple of key heads, got {heads} and {kv_heads}; repeat or drop key heads",
    )
    _check(
        threshold.dtype == torch.float32 and threshold.device == threshold_device,
        lambda: (
            f"threshold must be float32 on {threshold_device}, got {threshold.dtype} on {threshold.device};"
            f" use .to({str(threshold_device)!r}, torch.float32)"
        ),
    )
    _check(
        threshold.dim() == 0 or (threshold.dim() == 1 and threshold.shape[0] == batch),
        lambda: f"threshold must be [] or [batch] = [{batch}], got {list(threshold.shape)}; reduce or expand it",
    )
    if attn_mask is not None:
        _check(
            attn_mask.dtype in (torch.bool, torch.float32, query.dtype),
            lambda: (
                f"attn_mask must be boolean (True takes part), or float32 or {query.dtype} (added), got {attn_mask.dtype};"
                " use attn_mask.bool() or attn_mask.to(query.dtype)"
            ),
        )
        _check_broadcast("attn_mask", attn_mask, (batch, heads, rows, keys), query.device)
    if query_mask is not None:
        _check(
            query_mask.dtype == torch.bool and query_mask.dim() == 4,
            lambda: f"query_mask must be boolean [batch, 1, rows, 1], got {query_mask.dtype} {list(query_mask.shape)}; use .bool().view()",
        )
        _check_broadcast("query_mask", query_mask, (batch, 1, rows, 1), query.device)


def _check_operand(name: str, tensor: Tensor, query: Tensor) -> None:
    shape = list(tensor.shape)
    _check(tensor.dim() == 4, lambda: f"{name} must be [batch, heads, tokens, head_dim], got {shape}; add or flatten dimensions")
    _check(tensor.is_floating_point(), lambda: f"{name} must have a floating-point dtype, got {tensor.dtype}; use {name}.float()")
    _check(
        tensor.dtype == query.dtype and tensor.device == query.device,
        lambda: f"{name} must be {query.dtype} on {query.device} as query is, got {tensor.dtype} on {tensor.device}; use {name}.to(query)",
    )


def _check_broadcast(name: str, mask: Tensor, full: tuple[int, ...], device: torch.device) -> None:
    def problem() -> str:
        return f"{name} must be on {device} and broadcast to {list(full)}, got {list(mask.shape)} on {mask.device}; move or expand it"

    _check(mask.device == device and mask.dim() <= len(full), problem)
    for have, want in zip(reversed(mask.shape), reversed(full), strict=False):
        _check(guarded(have == 1) or have == want, problem)


# ValueError where the condition is false; a runtime assertion where it is about sizes that have no value yet.
_check: Callable[[bool, Callable[..., str]], None] = torch._check_value
