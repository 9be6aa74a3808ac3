"""What results are measured against: dense attention in float64, the operator's definition as plain loops, and derived tolerances."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The loops are thousands of tiny operations, which threads only slow down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def dense_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """torch's own attention, computed in `dtype`."""
    query, key, value = (x.to(dtype) for x in (query, key, value))
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(dtype)
    if is_causal and attn_mask is not None:
        allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        attn_mask = attn_mask & allowed if attn_mask.dtype == torch.bool else attn_mask.masked_fill(~allowed, -math.inf)
        is_causal = False
    return F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=True)


def tolerance(low_precision: Tensor, exact: Tensor, dtype: torch.dtype, largest_term: float = 0.0) -> float:
    """Twice the error of a low-precision run of the same formula against its float64 run, plus the roundings such a run may be spared.

    Twice, because two runs in one precision differ in the order of their sums. A run over few elements may happen to be exact, so the
    rounding of the result to `dtype` comes on top, and one rounding of the largest term of the sums, in the precision they are computed
    in (for a weighted mean of V: its largest element). A float64 result has no exact run beside it: give a float32 run as
    `low_precision`; its error is scaled by the ratio of the two epsilons.
    """
    exact = exact.double()
    finite = exact.isfinite()
    if not finite.any():
        return 0.0
    eps, eps32 = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    error = float((low_precision.double() - exact)[finite].abs().max()) * (eps / eps32 if dtype == torch.float64 else 1)
    return 2 * error + eps * float(exact[finite].abs().max()) + min(eps, eps32) * largest_term


def assert_within(actual: Tensor, exact: Tensor, atol: float) -> None:
    """Equal up to `atol`, infinities in the same places."""
    torch.testing.assert_close(actual.double(), exact.double(), rtol=0, atol=atol)


class Naive(NamedTuple):
    out: Tensor  # [B, Hq, Sq, Dv]
    lse: Tensor  # [B, Hq, Sq]
    counts: Tensor  # int32 [B, Hq, 2]
    skipped: Tensor  # bool [B, Hq, G, T]


def naive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    threshold: Tensor,
    attn_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    tile_order: str = "ascending",
    tile_q: int = 64,
    tile_k: int = 128,
    dtype: torch.dtype = torch.float64,
) -> Naive:
    """The operator as its definition reads (DESIGN, section 2): one group, one tile at a time, online softmax, in `dtype`."""
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    tiles, groups = math.ceil(kv_len / tile_k), math.ceil(q_len / tile_q)
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(batch, heads, q_len, value.shape[3], dtype=dtype)
    lse = torch.full((batch, heads, q_len), -math.inf, dtype=dtype)
    counts = torch.zeros(batch, heads, 2, dtype=torch.int32)
    skip_map = torch.zeros(batch, heads, groups, tiles, dtype=torch.bool)
    for b in range(batch):
        lam = float(threshold if threshold.dim() == 0 else threshold[b])
        lam = 0.0 if math.isnan(lam) or lam < 0 else min(lam, 1.0)
        log_lambda = math.log(lam) if lam > 0 else -math.inf
        for h in range(heads):
            for g in range(groups):
                row0, row1 = g * tile_q, min((g + 1) * tile_q, q_len)
                start = 0
                if tile_order == "own_first":
                    start = min((2 * row0 + tile_q) * kv_len // (2 * q_len * tile_k), tiles - 1)
                q = query[b, h, row0:row1].to(dtype)
                m = torch.full((row1 - row0,), -math.inf, dtype=dtype)
                l = torch.zeros(row1 - row0, dtype=dtype)  # noqa: E741 (the letter of every paper on this)
                acc = torch.zeros(row1 - row0, value.shape[3], dtype=dtype)
                for tile in [*range(start, tiles), *range(start)]:
                    cols = slice(tile * tile_k, min((tile + 1) * tile_k, kv_len))
                    kv_head = h // (heads // kv_heads)
                    s = scale * (q @ key[b, kv_head, cols].to(dtype).T)
                    if attn_mask is not None:
                        mask = attn_mask.expand(batch, heads, q_len, kv_len)[b, h, row0:row1, cols]
                        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.to(dtype)
                    if is_causal:
                        s = s.masked_fill(torch.arange(cols.start, cols.stop)[None] > torch.arange(row0, row1)[:, None], -math.inf)
                    if query_mask is not None:
                        s = s.masked_fill(~query_mask.expand(batch, 1, q_len, 1)[b, 0, row0:row1], -math.inf)
                    if bool((s == -math.inf).all()):
                        continue  # passed over
                    counts[b, h, 0] += 1
                    tile_max = s.amax(1)
                    m_new = torch.maximum(m, tile_max)
                    votes = (tile_max == -math.inf) | (tile_max - m_new < log_lambda)
                    if lam > 0 and bool(votes.all()):
                        counts[b, h, 1] += 1
                        skip_map[b, h, g, tile] = True
                        continue
                    has_key = m_new > -math.inf
                    safe = torch.where(has_key, m_new, 0)
                    p = torch.exp(s - safe[:, None])
                    rescale = torch.exp(m - safe)
                    l = l * rescale + p.sum(1)  # noqa: E741
                    acc = acc * rescale[:, None] + p @ value[b, kv_head, cols].to(dtype)
                    m = m_new
                has_key = l > 0
                out[b, h, row0:row1] = torch.where(has_key[:, None], acc / torch.where(has_key, l, 1)[:, None], 0)
                lse[b, h, row0:row1] = torch.where(has_key, m + torch.where(has_key, l, 1).log(), -math.inf)
    return Naive(out, lse, counts, skip_map)
