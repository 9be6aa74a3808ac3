"""Skip-softmax attention as a function, for direct use, eager or compiled."""

from typing import NamedTuple

import torch
from torch import Tensor

from skip_attn_compile.config import TILE_ORDERS
from skip_attn_compile.operands import check_inputs
from skip_attn_compile.ops import attention
from skip_attn_compile.validate import is_finite


class SkipStats(NamedTuple):
    """Tiles of one call, summed over batch, heads and row groups; int64 scalars on the call's device."""

    visited: Tensor
    skipped: Tensor


def skip_softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: float | Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    tile_order: str = "ascending",
    return_lse: bool = False,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor | SkipStats, ...]:
    """Scaled dot-product attention that skips key tiles in which no key can weigh more than `threshold` (BLASST, arXiv 2512.12087).

    query [B,Hq,Sq,D], key [B,Hkv,Skv,D], value [B,Hkv,Skv,Dv] of one floating-point dtype and device; Hq is a multiple of Hkv, and
    equal to it unless enable_gqa.
    threshold: lambda, relative to the largest weight of a row so far; a finite float >= 0, or a float32 tensor [] or [B] on query's
        device (NaN and negative act as 0). 0 skips nothing; more than 1 acts as 1.
    attn_mask: broadcastable to [B,Hq,Sq,Skv], boolean (True takes part) or additive in nats.
    is_causal: key j takes part for row i iff j <= i; not together with attn_mask, as in SDPA.
    scale: of the scores, default 1/sqrt(D).
    tile_order: "ascending", or "own_first": each group of rows starts at the keys of its own position.

    Returns out [B,Hq,Sq,Dv], or (out[, lse][, stats]): lse float32 [B,Hq,Sq] in nats, stats a `SkipStats`.
    Raises ValueError for inputs that do not fit together, RuntimeError where a gradient would be needed.
    """
    for name, given in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(given, Tensor) and not (name == "attn_mask" and given is None):
            raise ValueError(f"{name} must be a tensor, got {type(given).__name__}")
    if isinstance(threshold, Tensor):
        threshold_tensor = threshold
    elif is_finite(threshold) and threshold >= 0:
        threshold_tensor = torch.full((), min(float(threshold), 1.0), dtype=torch.float32, device=query.device)
    else:
        raise ValueError(f"threshold must be a finite number >= 0 or a float32 tensor [] or [batch], got {threshold!r}")
    if not torch.compiler.is_compiling():  # there the operator's fake does it; Dynamo cannot trace the messages
        if scale is not None and not is_finite(scale):
            raise ValueError(f"scale must be a finite number or None, got {scale!r}")
        check_inputs(query, key, value, threshold_tensor, attn_mask, None)
    if tile_order not in TILE_ORDERS:
        raise ValueError(f"tile_order must be one of {', '.join(TILE_ORDERS)}, got {tile_order!r}")
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal and attn_mask exclude each other, got both; put the causal part into attn_mask")
    if query.dim() == key.dim() == 4 and query.shape[1] != key.shape[1] and not enable_gqa:  # for other ranks the operator has the words
        raise ValueError(f"{query.shape[1]} query heads over {key.shape[1]} key heads need enable_gqa=True")
    out, lse, counts = attention(query, key, value, threshold_tensor, attn_mask, None, is_causal, scale, tile_order, "auto")
    results: list[Tensor | SkipStats] = [out]
    if return_lse:
        results.append(lse)
    if return_stats:
        visited, skipped = counts.sum((0, 1)).unbind()
        results.append(SkipStats(visited, skipped))
    return tuple(results) if len(results) > 1 else out
