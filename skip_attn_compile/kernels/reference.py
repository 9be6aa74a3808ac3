"""The oracle as an implementation: serves the CPU, and any device when asked for."""

from typing import Any

import torch
from torch import Tensor

from skip_attn_compile.config import TILE_ORDERS
from skip_attn_compile.kernels import Implementation, Results
from skip_attn_compile.reference import reference_attention

TILE_Q, TILE_K = 64, 128


def _run(
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
    out, lse, counts = results
    how: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "tile_order": tile_order, "tile_q": TILE_Q, "tile_k": TILE_K}
    _, own_lse, own_counts = reference_attention(query, key, value, threshold, attn_mask, query_mask, out=out, **how)
    lse.copy_(own_lse)
    counts.copy_(own_counts)


def _measure(
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
    out, counts = results
    how: dict[str, Any] = {
        "is_causal": is_causal,
        "scale": scale,
        "tile_order": tile_order,
        "tile_q": tile[0],
        "tile_k": tile[1],
        "trials": thresholds,
    }
    dense = thresholds.new_zeros(())
    counts.copy_(reference_attention(query, key, value, dense, attn_mask, query_mask, out=out, **how)[2])


IMPLEMENTATION = Implementation(
    name="reference",
    device_types=None,
    tile_q=TILE_Q,
    tile_k=TILE_K,
    tile_orders=TILE_ORDERS,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    head_dims=None,
    masks=("none", "key", "general"),
    run=_run,
    measure=_measure,
    measured_tiles=None,
)
