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

TILE_K: tl.constexpr = tl.constexpr(128)  # keys that are skipped together
NONE: tl.constexpr = tl.constexpr(float("-inf"))  # the score of a masked key
LEAST: tl.constexpr = tl.constexpr(-3.0e38)  # above NONE, below the log2 of every lambda but 0
MOST_TRIALS: tl.constexpr = tl.constexpr(32)  # as MOST_THRESHOLDS of `measure.py`; a power of 2
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


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
def scores(
    s,
    scale,
    attn_mask,
    stride,
    col,
    row,
    kv_len,
    SCALE_FIRST: tl.constexpr,
    MASK: tl.constexpr,
    CHECK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Products with the keys `col` as they are compared, NONE where masked."""
    if SCALE_FIRST:
        s *= scale
    if MASK == "bool":
        kept = tl.load(attn_mask + col.to(tl.int64) * stride, mask=col < kv_len, other=0)
        s = tl.where((kept != 0)[None, :], s, NONE)
    elif MASK == "add":
        bias = tl.load(attn_mask + col.to(tl.int64) * stride, mask=col < kv_len, other=NONE).to(tl.float32)[None, :]
        s = tl.where(bias == NONE, NONE, s + bias)
    elif CHECK_KEYS:
        s = tl.where((col < kv_len)[None, :], s, NONE)
    if CAUSAL:
        s = tl.where(col[None, :] <= row[:, None], s, NONE)
    return s


@triton.jit
def softmax(s, m, m_new, l, unit, keeps, SOME: tl.constexpr):
    """One step of the online softmax: (p, alpha, l) after scores s. m: the maximum before the step, m_new: after it.

    SOME: only of the rows that `keeps` has; the others, whose maximum stays, get weights of 0.
    """
    shift = tl.where(m_new == NONE, 0.0, m_new * unit)
    alpha = tl.exp2(m * unit - shift)
    if SOME:
        shift = tl.where(keeps, shift, -NONE)
        alpha = tl.where(keeps, alpha, 1.0)
    p = tl.exp2(s * unit - shift[:, None])
    return p, alpha, l * alpha + tl.sum(p, 1)


@triton.jit
def add_values(acc, p, alpha, v, keeps, SOME: tl.constexpr, PRECISION: tl.constexpr):
    """acc after weights p of values v; in rows that `keeps` lacks as it was, since 0 times what v holds may be NaN."""
    after = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return tl.where(keeps[:, None], after, acc) if SOME else after


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


@triton.jit
def attention_kernel(
    query,  # [B, Hq, Sq, D]
    key,  # [B, Hkv, Skv, D]
    value,  # [B, Hkv, Skv, Dv]
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
    BLOCK_Q: tl.constexpr,  # GROUP, or without VOTE a multiple of it; TRIAL: or twice GROUP, if both have the same first tile
    BLOCK_D: tl.constexpr,  # dimensions of K that are loaded at a time, a power of 2
    CHUNKS_D: tl.constexpr,  # and how often
    BLOCK_DV: tl.constexpr,  # dimensions of V that a program takes
    CHECK_D: tl.constexpr,  # head_dim is no multiple of BLOCK_D
    CHECK_DV: tl.constexpr,
    PRECISION: tl.constexpr,  # of float32 products
    EARLY: tl.constexpr,  # TRIAL: the next tile of K is sent for while QK^T runs, and the vote is reduced with an axis
    TMA: tl.constexpr,  # TRIAL: key and value are tensor descriptors with blocks [1, 1, TILE_K, BLOCK_D or BLOCK_DV]
    HALVES: tl.constexpr,  # TRIAL: 2: V comes in two halves of its dimensions
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
    item32, kv_head32 = item.to(tl.int32), kv_head.to(tl.int32)
    if CHUNKS_D == 1:
        q = load_tile(query, query_stride, row0, q_len, head_dim, BLOCK_Q, BLOCK_D, True, CHECK_D)
    if MASK != "none":
        attn_mask += item * attn_mask_stride[0]

    tiles = tl.cdiv(kv_len, TILE_K)
    first = 0
    if OWN_FIRST:
        middle = (2 * row0 + GROUP).to(tl.int64)
        first = tl.minimum(middle * kv_len // (2 * q_len.to(tl.int64) * TILE_K), tiles - 1).to(tl.int32)
    if CAUSAL:  # the tiles after these are masked for all rows
        tiles = tl.minimum(tiles, tl.cdiv(tl.minimum(row0 + BLOCK_Q, q_len), TILE_K))
        first = tl.where(first < tiles, first, 0)

    m = tl.full([BLOCK_Q], NONE, tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    HALF_DV: tl.constexpr = BLOCK_DV // HALVES
    GROUPS: tl.constexpr = BLOCK_Q // GROUP if VOTE else 1
    acc = tl.zeros([BLOCK_Q, HALF_DV], tl.float32)
    if HALVES == 2:
        acc2 = acc
    if EARLY:
        s = tl.zeros([BLOCK_Q, TILE_K], tl.float32)
    visited = 0
    kept = 0
    end = first + tiles
    for step in range(first, end):
        tile = tl.where(step < tiles, step, step - tiles)
        col0 = tile * TILE_K
        col = col0 + tl.arange(0, TILE_K)
        if TMA:
            k = key.load([item32, kv_head32, col0, 0]).reshape(TILE_K, BLOCK_D)
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
        # What stands in an `if` Triton puts at the end of the loop, behind the copies that it makes ahead, and QK^T runs on until there.
        # This `if` is always taken, which LLVM sees, later. Without it K is sent for after the vote: in skipped tiles, when it is needed.
        if step < end if EARLY else True:
            x = scores(s, scale, attn_mask, attn_mask_stride[1], col, row, kv_len, SCALE_FIRST, MASK, CHECK_KEYS, CAUSAL)
            tile_max = tl.where(votes_of_row, tl.reduce(x, 1, max_or_nan), NONE)
            m_new = max_or_nan(m, tile_max)
            if TRIALS:
                gap = tile_gap(tile_max, m_new, unit)
                would_skip += (tl.where(gap == NONE, 0.0, gap) < log2_trials).to(tl.int32)
            keep = True
            keeps = votes_of_row  # used where GROUPS is 2
            if GROUPS == 2:  # how many rows have a key here, and how many object: in a byte each, by group
                agrees = (tile_max - m_new) * unit < log2_lambda
                second = row >= row0 + GROUP
                votes = tl.sum(tl.where(tile_max == NONE, 0, tl.where(agrees, 0x1, 0x101)) << tl.where(second, 16, 0), 0)
                keep = (votes & 0x7F007F00) != 0
                keeps = (votes & tl.where(second, 0x7F000000, 0x7F00)) != 0
                visited += ((votes & 0x7F) != 0).to(tl.int32) + ((votes & 0x7F0000) != 0).to(tl.int32)
                kept += ((votes & 0x7F00) != 0).to(tl.int32) + ((votes & 0x7F000000) != 0).to(tl.int32)
            elif VOTE:
                # 0: no row has a key here; 1: some have, and all agree to skip; 2: a row objects, by being near its maximum or NaN.
                if TRIALS:
                    verdict = tl.where(gap == NONE, 0, 2)
                else:
                    agrees = (tile_max - m_new) * unit < log2_lambda
                    verdicts = tl.where(tile_max == NONE, 0, tl.where(agrees, 1, 2))
                    verdict = tl.max(verdicts, 0) if EARLY else tl.max(verdicts)  # with an axis Triton 3.7 fails on Blackwell
                visited += (verdict > 0).to(tl.int32)
                kept += (verdict == 2).to(tl.int32)
                keep = verdict == 2
            if keep:
                if TMA:
                    v = value.load([item32, kv_head32, col0, dim0]).reshape(TILE_K, HALF_DV)
                else:
                    v = load_tile(value, value_stride, col0, kv_len, value_dim, TILE_K, HALF_DV, CHECK_KEYS, CHECK_DV)
                p, alpha, l = softmax(x, m, m_new, l, unit, keeps, GROUPS == 2)
                acc = add_values(acc, p, alpha, v, keeps, GROUPS == 2, PRECISION)
                if HALVES == 2:
                    if TMA:
                        v = value.load([item32, kv_head32, col0, dim0 + HALF_DV]).reshape(TILE_K, HALF_DV)
                    else:
                        start, width = value + HALF_DV * value_stride[3], value_dim - HALF_DV
                        v = load_tile(start, value_stride, col0, kv_len, width, TILE_K, HALF_DV, CHECK_KEYS, CHECK_DV)
                    acc2 = add_values(acc2, p, alpha, v, keeps, GROUPS == 2, PRECISION)
                m = m_new

    if EARLY:  # QK^T runs on only where s has a use after the loop (Triton 3.6 crashes otherwise); that this is none LLVM sees, later
        if tiles & 1 == 2:
            m = tl.max(s, 1)
    no_key = m == NONE
    dim = tl.arange(0, HALF_DV)
    out += item * out_stride[0] + head * out_stride[1] + row0.to(tl.int64) * out_stride[2] + dim0 * out_stride[3]
    pointers = out + tl.arange(0, BLOCK_Q)[:, None] * out_stride[2] + dim[None, :] * out_stride[3]
    result = tl.where(no_key[:, None], 0.0, acc / l[:, None])
    tl.store(pointers, result.to(out.dtype.element_ty), mask=(row < q_len)[:, None] & (dim < value_dim)[None, :])
    if HALVES == 2:
        result = tl.where(no_key[:, None], 0.0, acc2 / l[:, None])
        mask = (row < q_len)[:, None] & (dim < value_dim - HALF_DV)[None, :]
        tl.store(pointers + HALF_DV * out_stride[3], result.to(out.dtype.element_ty), mask=mask)
    if dim0 == 0:
        of_head = item * heads + head
        if TRIALS:
            of_head *= 1 + TRIALS
            tl.atomic_add(counts + of_head + 1 + trial, would_skip, mask=trial < TRIALS, sem="relaxed")
        else:
            tl.store(lse + of_head * q_len + row, tl.where(no_key, NONE, (m * unit + tl.log2(l)) / LOG2E), mask=row < q_len)
            of_head *= 2
            if VOTE:
                tl.atomic_add(counts + of_head + 1, visited - kept, sem="relaxed")
        if not VOTE:
            visited = tiles * tl.cdiv(tl.minimum(BLOCK_Q, q_len - row0), GROUP)
        tl.atomic_add(counts + of_head, visited, sem="relaxed")
