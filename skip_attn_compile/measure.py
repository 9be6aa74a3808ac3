"""The operator `skip_attn_compile::measure`: dense attention that counts, for many lambdas at once, the tiles each would skip.

    measure(query, key, value, thresholds, attn_mask, query_mask, is_causal, scale, tile_order, tile_q, tile_k) -> (out, counts)

A skipped tile never raises a running maximum, so which tiles a lambda skips does not depend on what was skipped before: one dense pass
measures every lambda. Shapes as in ops.py; thresholds float32 [n], 1 to 32 of them; out is exactly dense; counts int32 [B,Hq,1+n] are tiles
visited, and tiles that each lambda would skip. The tiles are the caller's: those of the kernel that will serve, or 128 x 128 in ascending
order to compare with ModelOpt's curves. It runs on the first implementation that serves such attention and measures such tiles, which is
the one that will serve where that measures; the reference, which measures any, comes last.
"""

import torch
from torch import Tensor

from skip_attn_compile.kernels import Implementation
from skip_attn_compile.operands import check_inputs
from skip_attn_compile.ops import problem_of, start
from skip_attn_compile.results import empty_out

MOST_THRESHOLDS = 32

_library = torch.library.Library("skip_attn_compile", "FRAGMENT")
_library.define(
    "measure(Tensor query, Tensor key, Tensor value, Tensor thresholds, Tensor? attn_mask, Tensor? query_mask, bool is_causal, "
    "float? scale, str tile_order, int tile_q, int tile_k) -> (Tensor out, Tensor counts)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
measure = torch.ops.skip_attn_compile.measure.default


@torch.library.impl(_library, "measure", "CompositeExplicitAutograd")
def _measure(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    thresholds: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    tile_order: str,
    tile_q: int,
    tile_k: int,
) -> tuple[Tensor, Tensor]:
    _check(query, key, value, thresholds, attn_mask, query_mask, tile_q, tile_k)
    results = _empty(query, value, thresholds)
    scale = query.shape[3] ** -0.5 if scale is None else scale

    def run(by: Implementation) -> None:
        assert by.measure is not None  # else it were not chosen
        by.measure(query, key, value, thresholds, attn_mask, query_mask, results, is_causal, scale, tile_order, (tile_q, tile_k))

    problem = problem_of(query, key, value, attn_mask, query_mask is not None, is_causal, tile_order)
    start(problem._replace(measured_tile=(tile_q, tile_k)), "auto", run)
    return results


@torch.library.register_fake("skip_attn_compile::measure", lib=_library)
def _measure_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    thresholds: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    tile_order: str,
    tile_q: int,
    tile_k: int,
) -> tuple[Tensor, Tensor]:
    _check(query, key, value, thresholds, attn_mask, query_mask, tile_q, tile_k)
    return _empty(query, value, thresholds)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    thresholds: Tensor,
    attn_mask: Tensor | None,
    query_mask: Tensor | None,
    tile_q: int,
    tile_k: int,
) -> None:
    if thresholds.dim() != 1 or not 1 <= thresholds.shape[0] <= MOST_THRESHOLDS:
        raise ValueError(f"thresholds must be float32 [n] with 1 to {MOST_THRESHOLDS} lambdas, got shape {tuple(thresholds.shape)}")
    check_inputs(query, key, value, thresholds[0], attn_mask, query_mask)
    for name, size in (("tile_q", tile_q), ("tile_k", tile_k)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def _empty(query: Tensor, value: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    counts = torch.empty((*query.shape[:2], 1 + thresholds.shape[0]), dtype=torch.int32, device=query.device)
    return empty_out(query, value), counts
