"""The operator `skip_attn_compile::attention`: schema, fake, dispatch. Imports only torch; kernels are imported at the first call.

    attention(query, key, value, threshold, attn_mask, query_mask, is_causal, scale, tile_order, implementation)
        -> (out, lse, counts)

query [B,Hq,Sq,D], key [B,Hkv,Skv,D], value [B,Hkv,Skv,Dv] (grouped-query attention when Hq is a multiple of Hkv), threshold = lambda,
float32 [] or [B]; out [B,Hq,Sq,Dv] in query's dtype and dimension order, lse float32 [B,Hq,Sq] (natural log), counts int32 [B,Hq,2]
(tiles visited, tiles skipped). A pure function: the counts are an output, never a side effect, so that CUDA graphs stay possible.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_library = torch.library.Library("skip_attn_compile", "DEF")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor threshold, Tensor? attn_mask, Tensor? query_mask, bool is_causal, "
    "float? scale, str tile_order, str implementation) -> (Tensor out, Tensor lse, Tensor counts)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
attention = torch.ops.skip_attn_compile.attention.default

# Memory orders of (B, H, S), outermost first. [B,S,H,D] memory comes first: it is what diffusers makes, and what a query gets whose
# own order cannot be told (sliced, expanded, or of size 1).
_MEMORY_ORDERS = ((0, 2, 1), (0, 1, 2), (2, 0, 1), (2, 1, 0), (1, 0, 2), (1, 2, 0))


def output_stride(query: Tensor, value_dim: int) -> tuple[int, ...]:
    """Strides of the result [B,Hq,Sq,Dv]: query's dimension order where query [B,Hq,Sq,D] is dense, else [B,Sq,Hq,Dv] memory."""
    order = next((o for o in _MEMORY_ORDERS if _is_dense(query, o)), _MEMORY_ORDERS[0])
    stride = [0, 0, 0, 1]
    step = value_dim
    for dim in reversed(order):
        stride[dim] = step
        step *= query.shape[dim]
    return tuple(stride)


def empty_output(query: Tensor, value_dim: int) -> Tensor:
    """An uninitialised result for `query`; the fake and every implementation allocate through this one function."""
    return torch.empty_strided((*query.shape[:3], value_dim), output_stride(query, value_dim), dtype=query.dtype, device=query.device)


def _is_dense(query: Tensor, order: tuple[int, int, int]) -> bool:
    step = query.shape[3]
    if not _known(query.stride(3) == 1):
        return False
    for dim in reversed(order):
        if not _known(query.shape[dim] == 1) and not _known(query.stride(dim) == step):
            return False
        step = step * query.shape[dim]
    return True


def _known(condition: "bool | torch.SymBool") -> bool:
    """The truth of a size condition. Symbolic ones are guarded on where they have a value, and false where they have none."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def check_inputs(query: Tensor, key: Tensor, value: Tensor, threshold: Tensor, attn_mask: Tensor | None, query_mask: Tensor | None) -> None:
    """Raise ValueError with contract, value and remedy where the tensors do not fit together."""
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
        threshold.dtype == torch.float32 and threshold.device == query.device,
        lambda: f"threshold must be float32 on {query.device}, got {threshold.dtype} on {threshold.device}; use .to(query.device).float()",
    )
    _check(
        threshold.dim() == 0 or (threshold.dim() == 1 and threshold.shape[0] == batch),
        lambda: f"threshold must be [] or [batch] = [{batch}], got {list(threshold.shape)}; reduce or expand it",
    )
    if attn_mask is not None:
        _check(
            attn_mask.dtype == torch.bool or attn_mask.is_floating_point(),
            lambda: f"attn_mask must be boolean (True takes part) or floating point (added), got {attn_mask.dtype}; use attn_mask.bool()",
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
        _check(_known(have == 1) or have == want, problem)


# ValueError where the condition is false; a runtime assertion where it is about sizes that have no value yet.
_check: Callable[[bool, Callable[..., str]], None] = torch._check_value


@torch.library.impl(_library, "attention", "CPU")
@torch.library.impl(_library, "attention", "CUDA")
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    tile_order: str,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    from skip_attn_compile import kernels

    if not query.dim() == key.dim() == value.dim() == 4:
        check_inputs(query, key, value, threshold, attn_mask, query_mask)
    problem = kernels.Problem.of(query, key, value, attn_mask, query_mask is not None, is_causal, tile_order)
    chosen = kernels.choose_cached(problem, implementation)
    if isinstance(chosen, list):
        check_inputs(query, key, value, threshold, attn_mask, query_mask)  # the better message, where the tensors are at fault
        raise ValueError(f"implementation {implementation!r} cannot run this attention: {'; '.join(chosen) or 'no such implementation'}")
    if chosen.name == "reference":
        # The kernels check what they must on their own; 30 us of checks in Python do not matter here, and would matter there.
        check_inputs(query, key, value, threshold, attn_mask, query_mask)
        if implementation == "auto" and problem.device_type != "cpu":
            _warn_slow(problem)
    return chosen.run(query, key, value, threshold, attn_mask, query_mask, is_causal, default_scale(query, scale), tile_order)


@torch.library.register_fake("skip_attn_compile::attention", lib=_library)
def _attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    tile_order: str,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    check_inputs(query, key, value, threshold, attn_mask, query_mask)
    batch, heads, rows, _ = query.shape
    lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=query.device)
    counts = torch.empty((batch, heads, 2), dtype=torch.int32, device=query.device)
    return empty_output(query, value.shape[3]), lse, counts


@torch.library.impl(_library, "attention", "Autograd")
def _attention_autograd(
    query: Tensor, key: Tensor, value: Tensor, threshold: Tensor, attn_mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad or (attn_mask is not None and attn_mask.requires_grad)
    ):
        raise RuntimeError(
            "skip_attn_compile::attention has no derivative, but grad mode is on and an input requires grad; "
            "run under torch.no_grad() or torch.inference_mode(), or use F.scaled_dot_product_attention for training"
        )
    with torch._C._AutoDispatchBelowAutograd():
        return attention(query, key, value, threshold, attn_mask, *rest)


def default_scale(query: Tensor, scale: float | None) -> float:
    """SDPA's default, 1/sqrt(head_dim), where no scale is given."""
    return query.shape[3] ** -0.5 if scale is None else scale


_warned_slow: set[object] = set()


def _warn_slow(problem: tuple) -> None:
    from skip_attn_compile import kernels

    if problem not in _warned_slow:
        _warned_slow.add(problem)
        why = kernels.choose(kernels.Problem(*problem))
        reasons = "; ".join(why) if isinstance(why, list) else "unknown"
        log.warning("skip-softmax attention runs on the slow reference implementation: %s", reasons)
