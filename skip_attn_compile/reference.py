"""Skip-softmax attention in plain PyTorch: the oracle of the kernels, and the operator's CPU implementation.

The algorithm is BLASST (arXiv 2512.12087). Query rows are cut into groups of `tile_q`, keys into tiles of `tile_k`. The scores of
every (group, tile) pair are computed; a pair none of whose rows comes near that row's running maximum is skipped, and neither its
softmax nor its product with V is done:

    for each group of rows i, over its key tiles in visiting order:
        S = scale * Q @ K[tile]^T, masked                       # [tile_q, tile_k]
        m_new[i] = max(m[i], max_j S[i, j])
        if all_i  max_j S[i, j] - m_new[i] < ln(lambda):  skip  # nothing changes
        P = exp(S - m_new);  l = l * exp(m - m_new) + rowsum(P);  O = O * exp(m - m_new) + P @ V[tile];  m = m_new
    out = O / l,  lse = m + ln(l)

lambda <= 1, so a skipped tile never raises a maximum. Hence every decision follows from the tile maxima alone (m_new is their
cumulative maximum in visiting order, skipped or not), and a row's last m is the largest of them. The code below uses this: it takes
the scores of as many groups as fit a fixed budget at once, decides for all their tiles, and only then does exp and PV, with the final
maximum and for the kept pairs alone. Any visiting order costs the same, and nothing is rescaled.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SCORES_PER_CHUNK = 1 << 20
"""Scores held at a time: 4 MB in float32, which stay in the cache of a CPU core. At least one group of one head is taken."""


@torch.no_grad()
def reference_attention(
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
    out: Tensor | None = None,
    trials: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention that leaves out the key tiles in which every row of a query group weighs less than `threshold` per key.

    query [B, Hq, Sq, D], key [B, Hkv, Skv, D], value [B, Hkv, Skv, Dv], any strides; Hq is a multiple of Hkv.
    threshold: lambda, float32 [] or [B], a share of the largest softmax weight; NaN or negative acts as 0 (nothing is skipped), more
        than 1 as 1.
    attn_mask: broadcastable to [B, Hq, Sq, Skv]; boolean (True takes part) or additive, in nats, added after scaling. False and -inf
        mask: such a score is -inf whatever query and key hold. A finite value, however low, is a score.
    query_mask: boolean, broadcastable to [B, 1, Sq, 1]; a False row has no say in any skip and gives 0.
    is_causal: key j takes part for row i iff j <= i, also when Sq != Skv.
    scale: multiplies the scores; None is 1/sqrt(D).
    tile_order: "ascending", or "own_first": each group starts at the tile at its own place and wraps around (see `first_tile`).
    out: written if given (any strides), else allocated, contiguous.
    trials: lambdas, float32 [n]; given, counts are int32 [B, Hq, 1 + n] instead: tiles visited, and how many of these each trial would
        skip. A skipped tile never raises a maximum, so that does not depend on what `threshold` skips.

    Returns out [B, Hq, Sq, Dv] in query's dtype, lse float32 [B, Hq, Sq] (natural log of the kept exp-sum), and counts int32 [B, Hq, 2]
    (tiles visited, tiles of these skipped), summed over the groups of a head. A row without any key gives 0 and lse = -inf; a tile
    masked for all rows of a group is passed over and counts as nothing.

    NaN in q or in an unmasked k makes the row NaN, as in SDPA. V of a skipped or passed-over tile is not read, so a NaN there does not
    reach that group (in SDPA it does: 0 * NaN). A masked key inside a tile that is kept is read with weight 0, so there NaN in V makes
    the group's rows NaN, as in SDPA.

    Computes in float32 (float64 for float64 inputs), under the caller's `torch.set_float32_matmul_precision`, and autocast does not
    apply. A batch item's result does not depend on the other items. Memory beyond inputs and outputs: one batch item of K and V in
    float32 with Hq heads, a boolean copy of attn_mask, and a constant number of buffers of max(SCORES_PER_CHUNK, tile_q * Skv) elements.
    Not differentiable.
    """
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len, value_dim = key.shape[1], key.shape[2], value.shape[3]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    out = query.new_empty(batch, heads, q_len, value_dim) if out is None else out
    lse = query.new_empty(batch, heads, q_len, dtype=torch.float32)
    counts = torch.zeros(batch, heads, 2 if trials is None else 1 + len(trials), dtype=torch.int32, device=query.device)
    if q_len == 0 or kv_len == 0:
        return out.zero_(), lse.fill_(-math.inf), counts

    groups, tiles = -(-q_len // tile_q), -(-kv_len // tile_k)
    group_step = min(groups, max(1, SCORES_PER_CHUNK // (tile_q * tiles * tile_k)))
    head_step = max(1, SCORES_PER_CHUNK // (group_step * tile_q * tiles * tile_k)) if group_step == groups else 1
    log_threshold = _log_lambda(threshold, dtype).expand(batch)
    log_trials = None if trials is None else _log_lambda(trials, dtype)
    bias, masked = split_mask(attn_mask, (batch, heads, q_len, kv_len))
    row_valid = None if query_mask is None else query_mask.expand(batch, 1, q_len, 1)
    start = first_tile(tile_order, q_len, kv_len, tile_q, tile_k, query.device)

    with torch.autocast(query.device.type, enabled=False):
        for b in range(batch):
            padding = (0, 0, 0, tiles * tile_k - kv_len)
            keys, values = (repeat_heads(F.pad(x[b].to(dtype), padding), heads // kv_heads) for x in (key, value))
            for first_head in range(0, heads, head_step):
                h = slice(first_head, min(first_head + head_step, heads))
                for g in range(0, groups, group_step):
                    rows = slice(g * tile_q, min((g + group_step) * tile_q, q_len))
                    t = min(tiles, -(-rows.stop // tile_k)) if is_causal else tiles  # causal: the tiles after these are masked for all
                    size = rows.stop - rows.start

                    q = F.pad(query[b, h, rows].to(dtype), (0, 0, 0, -size % tile_q))
                    scores = q.new_empty(*q.shape[:2], t * tile_k)
                    torch.baddbmm(scores, q, keys[h, : t * tile_k].mT, beta=0, alpha=scale, out=scores)
                    real = scores[:, :size, :kv_len]
                    if bias is not None:
                        real += bias[b, h, rows, : t * tile_k]
                    if masked is not None:
                        real.masked_fill_(masked[b, h, rows, : t * tile_k], -math.inf)
                    if is_causal:
                        upper = torch.ones(real.shape[1:], dtype=torch.bool, device=q.device).triu(1 + rows.start)
                        real.masked_fill_(upper, -math.inf)
                    scores[:, :, kv_len:] = -math.inf

                    scores = scores.view(-1, q.shape[1] // tile_q, tile_q, t, tile_k)
                    tile_max = scores.amax(-1)
                    by_row = tile_max.view(scores.shape[0], -1, t)
                    by_row[:, size:] = -math.inf
                    if row_valid is not None:
                        by_row[:, :size].masked_fill_(~row_valid[b, 0, rows], -math.inf)
                    visited, gap = tile_gaps(tile_max, start[g : g + group_step])
                    skipped = visited & (gap < log_threshold[b])
                    tallied = [skipped] if log_trials is None else [visited & (gap < trial) for trial in log_trials]
                    counts[b, h] += torch.stack([x.sum((1, 2)) for x in (visited, *tallied)], -1)

                    row_max = tile_max.amax(-1)
                    exp_sum, weighted = softmax_pv(scores, row_max, values[h, : t * tile_k], visited & ~skipped)
                    no_key = row_max == -math.inf
                    result = (weighted / exp_sum[..., None]).masked_fill_(no_key[..., None], 0)
                    out[b, h, rows] = result.flatten(1, 2)[:, :size].to(out.dtype)
                    lse[b, h, rows] = (row_max + exp_sum.log()).masked_fill_(no_key, -math.inf).flatten(1)[:, :size].float()
    return out, lse, counts


def tile_gaps(tile_max: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Which tiles a group visits, boolean [H, G, T], and how near each comes to being kept, [H, G, T] in nats.

        m_new[i] = max(m[i], tile_max[i])                            the running maximum after this tile
        visited  = any_i  tile_max[i] != -inf                        some score is not masked
        gap      = max_i  tile_max[i] - m_new[i]                     over the rows that have a score there
        skipped  = visited and gap < ln(lambda)

    tile_max [H, G, tile_q, T]: every row's largest score in each tile, nats; -inf for a row that has none there, or takes no part.
    start [G]: the tile each group begins with. The others follow in ascending order and wrap around; a start past the last of the T
    tiles, which happens if causal masking cut the rest off, leaves the ascending order.

    The comparison is strict and ln(lambda) <= 0, so the tile holding a row's running maximum, whose gap is 0, stays, and at lambda = 0
    (ln = -inf) all do. A NaN score stays NaN in all three maxima, NaN < x is false, and so the row objects from there on.
    """
    tiles = tile_max.shape[-1]
    order = (start.where(start < tiles, 0)[:, None] + torch.arange(tiles, device=start.device)) % tiles  # [G, T]
    in_order = tile_max.gather(-1, order[None, :, None].expand_as(tile_max))
    gap_in_order = (in_order - in_order.cummax(-1).values).masked_fill_(in_order == -math.inf, -math.inf).amax(2)
    visited = (tile_max != -math.inf).any(2)
    return visited, torch.empty_like(gap_in_order).scatter_(-1, order.expand_as(visited), gap_in_order)


def softmax_pv(scores: Tensor, row_max: Tensor, values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of P [H, G, tile_q] and P @ V [H, G, tile_q, Dv] over the kept tiles, where P = exp(scores - row_max). Overwrites scores.

    scores [H, G, tile_q, T, tile_k], row_max [H, G, tile_q], values [H, T * tile_k, Dv], kept boolean [H, G, T].
    """
    heads, groups, tile_q, tiles, tile_k = scores.shape
    value_dim = values.shape[-1]
    row_max = row_max.masked_fill(row_max == -math.inf, 0)  # such rows are replaced by the caller; here they must not give -inf - -inf
    if bool(kept.all()):
        p = scores.view(heads, groups * tile_q, tiles * tile_k)
        p.sub_(row_max.view(heads, -1, 1)).exp_()
        return p.sum(-1).view_as(row_max), torch.bmm(p, values).view(*row_max.shape, value_dim)

    head, group, tile = kept.nonzero(as_tuple=True)
    p = scores.transpose(2, 3)[head, group, tile]  # [kept pairs, tile_q, tile_k], a copy of nothing but the kept scores
    p.sub_(row_max[head, group, :, None]).exp_()
    exp_sum = p.new_zeros(heads * groups, tile_q).index_add_(0, head * groups + group, p.sum(-1))
    pv = torch.bmm(p, values.view(heads, tiles, tile_k, value_dim)[head, tile])
    weighted = p.new_zeros(heads * groups, tile_q, value_dim).index_add_(0, head * groups + group, pv)
    return exp_sum.view_as(row_max), weighted.view(*row_max.shape, value_dim)


def _log_lambda(threshold: Tensor, dtype: torch.dtype) -> Tensor:
    """ln(lambda), lambda clamped to [0, 1]; NaN stays NaN: no gap is below it, and nothing is skipped."""
    return threshold.to(dtype).clamp(0, 1).log()


def first_tile(tile_order: str, q_len: int, kv_len: int, tile_q: int, tile_k: int, device: torch.device) -> Tensor:
    """The key tile each query group visits first, int64 [G]: 0, or for "own_first" the one at the place of the group's middle row."""
    row0 = torch.arange(0, q_len, tile_q, device=device)
    if tile_order == "ascending":
        return torch.zeros_like(row0)
    if tile_order == "own_first":
        return ((2 * row0 + tile_q) * kv_len // (2 * q_len * tile_k)).clamp(max=-(-kv_len // tile_k) - 1)
    raise ValueError(f'tile_order must be "ascending" or "own_first", got {tile_order!r}')


def split_mask(attn_mask: Tensor | None, shape: tuple[int, int, int, int]) -> tuple[Tensor | None, Tensor | None]:
    """What to add to the scores, and where to set them to -inf: views of `shape` [B, Hq, Sq, Skv], None where there is nothing to do."""
    if attn_mask is None:
        return None, None
    if attn_mask.dtype == torch.bool:
        return None, attn_mask.logical_not().expand(shape)
    return attn_mask.expand(shape), (attn_mask == -math.inf).expand(shape)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """[Hkv, S, D] -> [Hkv * times, S, D], each head repeated `times` in place; a view if times is 1."""
    return x[:, None].expand(-1, times, -1, -1).flatten(0, 1)
