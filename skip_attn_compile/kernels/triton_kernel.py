"""Skip-softmax attention in Triton. Imported at the first use, since it imports triton; `triton.py` beside it launches it.

One program takes one block of query rows of one head over its key tiles in visiting order: one group of 64 rows, which votes; or, where
nothing may be skipped, more. To measure, it takes one group, skips nothing, and counts the tiles that each of up to 32 lambdas would skip.
Where a tile of V is too large for shared memory, a program takes a chunk of V's dimensions; the programs of the other chunks decide alike.
"""

# What Triton compiles has no types, and an `if` that it decides is not always one that it can merge with another.
# ruff: noqa: ANN001, ANN201, E741, SIM102
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

TILE_K: tl.constexpr = tl.constexpr(128)  # keys that are skipped together
NONE: tl.constexpr = tl.constexpr(float("-inf"))  # the score of a masked key
LEAST: tl.constexpr = tl.constexpr(-3.0e38)  # above NONE, below the log2 of every lambda but 0
MOST_TRIALS: tl.constexpr = tl.constexpr(32)  # as MOST_THRESHOLDS of `measure.py`; a power of 2
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


class Descriptor(TensorDescriptor):
    """Without the checks, half of its time: the launcher has made them."""

    def __post_init__(self) -> None:
        pass


@triton.jit
def max_or_nan(a, b):
    """The larger, NaN where one is NaN: a NaN score is not lost in the maximum."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_tile(
    start, stride, first, length, width, ROWS: tl.constexpr, COLS: tl.constexpr, CHECK_ROWS: tl.constexpr, CHECK_COLS: tl.constexpr
):
    """Rows `first`, `first` + 1, ... of a matrix [length, width] as [ROWS, COLS], 0 past its end. stride: of (B, H, S, D)."""
    row, col = tl.arange(0, ROWS), tl.arange(0, COLS)
    pointers = start + first.to(tl.int64) * stride[2] + row[:, None] * stride[2] + col[None, :] * stride[3]
    if CHECK_ROWS and CHECK_COLS:
        return tl.load(pointers, mask=(first + row < length)[:, None] & (col < width)[None, :], other=0.0)
    if CHECK_ROWS:
        return tl.load(pointers, mask=(first + row < length)[:, None], other=0.0)
    if CHECK_COLS:
        return tl.load(pointers, mask=(col < width)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def softmax_pv(s, m, m_new, l, acc, v, unit, PRECISION: tl.constexpr):
    """One step of the online softmax: (l, acc) after scores s and their values v. m: the maximum before the step, m_new: after it."""
    shift = tl.where(m_new == NONE, 0.0, m_new * unit)
    p = tl.exp2(s * unit - shift[:, None])
    alpha = tl.exp2(m * unit - shift)
    return l * alpha + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)


@triton.jit
def clamped(threshold):
    """lambda: at most 1; NaN and less than 0 act as 0."""
    return tl.where(threshold > 0, tl.minimum(threshold, 1.0), 0.0)


@triton.jit
def tile_gap(tile_max, m_new, unit):
    """max_i (tile_max[i] - m_new[i]) in log2 over the rows that have a key in the tile, NONE if no row has: lambda skips what is below.

    NaN is 0 here: its row objects to every skip.
    """
    gap = (tile_max - m_new) * unit
    gap = tl.where(gap <= 0, tl.maximum(gap, LEAST), 0.0)
    return tl.max(tl.where(tile_max == NONE, NONE, gap))


@triton.jit(do_not_specialize=["heads", "kv_heads", "q_len", "kv_len", "threshold_stride"])  # or each length is compiled for
def attention_kernel(
    query,  # [B, Hq, Sq, D]
    key,  # [B, Hkv, Skv, D]; where TMA, its descriptor, with blocks of [1, 1, TILE_K, BLOCK_D]
    value,  # [B, Hkv, Skv, Dv]; likewise, [1, 1, TILE_K, BLOCK_DV]
    threshold,  # lambda, float32: by batch item; or TRIALS of them
    attn_mask,  # [B, Skv] int8 (0 masks) or floating point (added, -inf masks); unused where MASK is "none"
    query_mask,  # [B, Sq] int8; unused where not QUERY_MASK
    out,  # [B, Hq, Sq, Dv]
    lse,  # float32 [B, Hq, Sq], contiguous; unused where TRIALS
    counts,  # int32 [B, Hq, 2 or 1 + TRIALS], contiguous, zero before the first launch
    query_stride,
    key_stride,
    value_stride,
    out_stride,
    threshold_stride,
    attn_mask_stride,
    query_mask_stride,
    heads,
    kv_heads,
    q_len,
    kv_len,
    head_dim,
    value_dim,
    scale,
    VOTE: tl.constexpr,  # False: nothing is skipped, for calls without any mask
    TRIALS: tl.constexpr,  # lambdas to count for, of which none is applied; 0: attention
    WHICH: tl.constexpr,  # "all" batch items, or only the "sparse" ones (lambda > 0), or only the "dense" ones
    MASK: tl.constexpr,  # "none" | "bool" | "add"
    QUERY_MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    OWN_FIRST: tl.constexpr,
    SCALE_FIRST: tl.constexpr,  # scores are scaled before they are compared; else (scale > 0) afterwards, which spares a multiplication
    CHECK_KEYS: tl.constexpr,  # kv_len is no multiple of TILE_K
    GROUP: tl.constexpr,  # query rows that vote together
    BLOCK_Q: tl.constexpr,  # GROUP, or in attention without VOTE a multiple of it
    BLOCK_D: tl.constexpr,  # dimensions of K that are loaded at a time, a power of 2
    CHUNKS_D: tl.constexpr,  # and how often
    BLOCK_DV: tl.constexpr,  # dimensions of V that a program takes
    CHECK_D: tl.constexpr,  # head_dim is no multiple of BLOCK_D
    CHECK_DV: tl.constexpr,
    PRECISION: tl.constexpr,  # of float32 products
    TMA: tl.constexpr,  # the copy engine brings K and V, all dimensions at once: they pass through no registers
    EARLY: tl.constexpr,  # the next tile of K is sent for while QK^T runs, before the vote
):
    blocks = tl.cdiv(q_len, BLOCK_Q)
    block = tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    item = (tl.program_id(0) // blocks // heads).to(tl.int64)
    kv_head = head // (heads // kv_heads)
    dim0 = tl.program_id(1) * BLOCK_DV
    value_dim -= dim0

    lam = 0.0
    if TRIALS:
        trial = tl.arange(0, MOST_TRIALS)
        log2_trials = tl.log2(clamped(tl.load(threshold + trial * threshold_stride, mask=trial < TRIALS, other=0.0)))
        would_skip = tl.zeros([MOST_TRIALS], tl.int32)
    else:
        lam = clamped(tl.load(threshold + item * threshold_stride))
    if WHICH == "sparse":
        if lam == 0:
            return
    if WHICH == "dense":
        if lam > 0:
            return
    log2_lambda = tl.log2(lam)
    # m is in units of the scores as they are compared: `unit` takes them to log2.
    unit = LOG2E if SCALE_FIRST else scale * LOG2E

    row0 = block * BLOCK_Q
    row = row0 + tl.arange(0, BLOCK_Q)
    votes_of_row = row < q_len
    if QUERY_MASK:
        pointers = query_mask + item * query_mask_stride[0] + row.to(tl.int64) * query_mask_stride[1]
        votes_of_row = tl.load(pointers, mask=votes_of_row, other=0) != 0
    query += item * query_stride[0] + head * query_stride[1]
    if not TMA:
        key += item * key_stride[0] + kv_head * key_stride[1]
        value += item * value_stride[0] + kv_head * value_stride[1] + dim0 * value_stride[3]
    if CHUNKS_D == 1:
        q = load_tile(query, query_stride, row0, q_len, head_dim, BLOCK_Q, BLOCK_D, True, CHECK_D)
    if MASK != "none":
        attn_mask += item * attn_mask_stride[0]

    tiles = tl.cdiv(kv_len, TILE_K)
    first = 0
    if OWN_FIRST:
        middle = (2 * row0 + GROUP).to(tl.int64)
        first = tl.minimum(middle * kv_len // (tl.full([], 2 * TILE_K, tl.int64) * q_len), tiles - 1).to(tl.int32)
    if CAUSAL:  # the tiles after these are masked for all rows
        tiles = tl.minimum(tiles, tl.cdiv(tl.minimum(row0 + BLOCK_Q, q_len), TILE_K))
        first = tl.where(first < tiles, first, 0)

    m = tl.full([BLOCK_Q], NONE, tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    s = tl.zeros([BLOCK_Q, TILE_K], tl.float32)
    visited = 0
    skipped = 0
    end = first + tiles
    for step in range(first, end):
        tile = tl.where(step < tiles, step, step - tiles)
        col0 = tile * TILE_K
        col = col0 + tl.arange(0, TILE_K)
        if TMA:
            k = key.load([item.to(tl.int32), kv_head.to(tl.int32), col0, 0]).reshape(TILE_K, BLOCK_D)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        elif CHUNKS_D == 1:
            k = load_tile(key, key_stride, col0, kv_len, head_dim, TILE_K, BLOCK_D, CHECK_KEYS, CHECK_D)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        else:
            s = tl.zeros([BLOCK_Q, TILE_K], tl.float32)
            for chunk in range(CHUNKS_D):
                d, width = chunk * BLOCK_D, head_dim - chunk * BLOCK_D
                q = load_tile(query + d * query_stride[3], query_stride, row0, q_len, width, BLOCK_Q, BLOCK_D, True, CHECK_D)
                k = load_tile(key + d * key_stride[3], key_stride, col0, kv_len, width, TILE_K, BLOCK_D, CHECK_KEYS, CHECK_D)
                s = tl.dot(q, tl.trans(k), s, input_precision=PRECISION)
        # Triton puts an `if` at the end of the loop's body, behind the copies that it makes ahead, and QK^T runs on until there: so this
        # one, which always holds, as LLVM sees later. Else K is sent for after the vote: in a skipped tile, just when it is needed.
        if step < end if EARLY else True:
            x = s
            if SCALE_FIRST:
                x *= scale
            if MASK == "bool":
                kept = tl.load(attn_mask + col.to(tl.int64) * attn_mask_stride[1], mask=col < kv_len, other=0)
                x = tl.where((kept != 0)[None, :], x, NONE)
            elif MASK == "add":
                bias = tl.load(attn_mask + col.to(tl.int64) * attn_mask_stride[1], mask=col < kv_len, other=NONE).to(tl.float32)[None, :]
                x = tl.where(bias == NONE, NONE, x + bias)
            elif CHECK_KEYS:
                x = tl.where((col < kv_len)[None, :], x, NONE)
            if CAUSAL:
                x = tl.where(col[None, :] <= row[:, None], x, NONE)
            tile_max = tl.where(votes_of_row, tl.reduce(x, 1, max_or_nan), NONE)
            m_new = max_or_nan(m, tile_max)

            if TRIALS:
                gap = tile_gap(tile_max, m_new, unit)
                would_skip += (tl.where(gap == NONE, 0.0, gap) < log2_trials).to(tl.int32)
            keep = True
            if VOTE:
                # 0: no row has a key here; 1: some have, and all agree to skip; 2: a row objects, by being near its maximum or NaN.
                if TRIALS:
                    verdict = tl.where(gap == NONE, 0, 2)
                else:
                    agrees = (tile_max - m_new) * unit < log2_lambda
                    verdicts = tl.where(tile_max == NONE, 0, tl.where(agrees, 1, 2))
                    verdict = tl.max(verdicts, 0) if TMA or EARLY else tl.max(verdicts)  # with an axis Triton 3.7 fails on Blackwell
                visited += (verdict > 0).to(tl.int32)
                skipped += (verdict == 1).to(tl.int32)
                keep = verdict == 2
            if keep:
                if TMA:
                    v = value.load([item.to(tl.int32), kv_head.to(tl.int32), col0, dim0]).reshape(TILE_K, BLOCK_DV)
                else:
                    v = load_tile(value, value_stride, col0, kv_len, value_dim, TILE_K, BLOCK_DV, CHECK_KEYS, CHECK_DV)
                l, acc = softmax_pv(x, m, m_new, l, acc, v, unit, PRECISION)
                m = m_new

    if EARLY:  # Triton 3.6 crashes where s has no use after the loop. That this is none LLVM sees later, and Triton never: it knows no bits
        if tl.program_id(0) & 1 == 2:
            m = tl.max(s, 1)
    no_key = m == NONE
    result = tl.where(no_key[:, None], 0.0, acc / l[:, None])
    dim = tl.arange(0, BLOCK_DV)
    out += item * out_stride[0] + head * out_stride[1] + row0.to(tl.int64) * out_stride[2] + dim0 * out_stride[3]
    pointers = out + tl.arange(0, BLOCK_Q)[:, None] * out_stride[2] + dim[None, :] * out_stride[3]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=(row < q_len)[:, None] & (dim < value_dim)[None, :])
    if dim0 == 0:
        of_head = item * heads + head
        if TRIALS:
            of_head *= 1 + TRIALS
            tl.atomic_add(counts + of_head + 1 + trial, would_skip, mask=trial < TRIALS, sem="relaxed")
        else:
            tl.store(lse + of_head * q_len + row, tl.where(no_key, NONE, (m * unit + tl.log2(l)) / LOG2E), mask=row < q_len)
            of_head *= 2
            if VOTE:
                tl.atomic_add(counts + of_head + 1, skipped, sem="relaxed")
        if not VOTE:
            visited = tiles * tl.cdiv(tl.minimum(BLOCK_Q, q_len - row0), GROUP)
        tl.atomic_add(counts + of_head, visited, sem="relaxed")
