// One consumer warpgroup: 64 query rows through all key tiles. The algorithm is BLASST (arXiv 2512.12087) on top of online softmax.
#pragma once

#include <type_traits>

#include "plan.cuh"
#include "ptx.cuh"

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLn2 = 0.693147180559945f;
constexpr float kLog2e = 1.442695040888963f;

// Place in a ring of kStages buffers: which buffer, and the parity of its use.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The key tiles that pass through a CTA, in order: position 0, 1, ..., length - 1. Each group is active for `tiles` positions in a
// row, from its own offset on; the offsets differ only where "own_first" gives the two groups different first tiles.
struct Stream {
  int start, tiles, offset1, length;  // offset1: that of group 1; group 0 starts at position 0

  __device__ __forceinline__ Stream(const Params& params, int row0) {
    tiles = params.tiles;
    if (params.is_causal) tiles = min(tiles, (min(row0 + kBlockRows, params.q_len) + kTileKeys - 1) / kTileKeys);
    int first[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int64_t twice_middle = 2 * (int64_t{row0} + g * kGroupRows) + kGroupRows;
      const int64_t own = params.own_first ? twice_middle * params.kv_len / (int64_t{2} * params.q_len * kTileKeys) : 0;
      const int tile = static_cast<int>(min(own, int64_t{params.tiles - 1}));
      first[g] = tile < tiles ? tile : 0;  // causal: the tiles from `tiles` on are masked for all rows, so the order wraps at once
    }
    start = first[0];
    offset1 = row0 + kGroupRows < params.q_len ? (first[1] - first[0] + tiles) % max(tiles, 1) : 0;
    length = tiles + offset1;
  }
  __device__ __forceinline__ int tile(int position) const {
    int t = start + position;
    if (t >= tiles) t -= tiles;
    return t >= tiles ? t - tiles : t;
  }
};

template <typename Element, int kHeadDim, bool kMasked>
struct Consumer {
  using Smem = SharedMemory<Element, kHeadDim, kMasked>;
  static constexpr bool kHoldQuery = !kMasked;
  static constexpr int kQueryPanelBytes = kGroupRows * kPanel * sizeof(Element);

  // Where a group is in the stream: the buffers of this tile's K and V, and of the V that is due next. `value` is a place in the shared
  // ring, or (kOwnValues) among the group's own two buffers, where it moves on with every tile kept.
  template <bool kOwnValues>
  struct Places {
    RingPlace<Smem::kKeyStages> key, next_key;
    int tile, next_tile;
    RingPlace<kOwnValues ? 2 : Smem::kValueStages> value, due;
  };

  const Params& params;
  Smem& smem;
  const int batch, head, kv_head, group, thread, row0;
  const bool take_turns;
  const float log2_threshold;

  // A thread holds two rows, i = 0 and 1, of every accumulator: row0 + 16 * warp + lane / 4 + 8 * i; of these the columns
  // 8 * j + 2 * (lane % 4) + {0, 1}, at index 4 * j + 2 * i + {0, 1}.
  float out[kHeadDim / 2];
  float scores[kTileKeys / 2];
  uint32_t query[kHoldQuery ? kHeadDim / 4 : 1];
  uint32_t weights[kTileKeys / 4];  // P in the input's precision, as wgmma takes it from registers
  float running_max[2], exp_sum[2]; // raw scores (masked kernel: log2 units); this thread's share of the sum
  bool row_votes[2];
  bool rescales = false;            // uniform over the warp: some maximum rose in this tile
  float unit;                       // from raw scores to log2 units
  int visited = 0, skipped = 0;

  __device__ __forceinline__ Consumer(const Params& params, Smem& smem, int batch, int head, int group, int row0, bool take_turns, float log2_threshold)
      : params(params), smem(smem), batch(batch), head(head), kv_head(head / params.heads_per_kv_head), group(group),
        thread(threadIdx.x % kWarpgroup), row0(row0), take_turns(take_turns), log2_threshold(log2_threshold) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) out[i] = 0.f;
    unit = kMasked ? 1.f : params.scale_log2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      running_max[i] = -kInfinity;
      exp_sum[i] = 0.f;
      row_votes[i] = row(i) < params.q_len;
      if (kMasked && row_votes[i] && params.query_mask != nullptr) {
        row_votes[i] = params.query_mask[batch * params.query_mask_stride_batch + row(i) * params.query_mask_stride_row] != 0;
      }
    }
  }

  __device__ __forceinline__ int row(int i) const { return row0 + (thread / 32) * 16 + (thread % 32) / 4 + 8 * i; }

  // ---- Q from shared memory to registers, as wgmma takes its A operand: a third less shared-memory traffic in Q K^T ----
  __device__ __forceinline__ void load_query() {
    const uint32_t base = ptx::smem_address(smem.query(group));
    const int local = (thread / 32) * 16 + thread % 16;
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      const int chunk = (d % 4) * 2 + (thread % 32) / 16;  // of 16 bytes in the swizzled row
      ptx::load_matrix(&query[4 * d], base + (d / 4) * kQueryPanelBytes + local * 128 + ((chunk ^ (local & 7)) << 4));
    }
  }

  // ---- scores = Q K^T, [64 x 128], D / 16 steps; issued, not awaited ----
  __device__ __forceinline__ void qk_gemm(int stage) {
    const uint64_t q = ptx::descriptor(ptx::smem_address(smem.query(group)), 0);
    const uint64_t k = ptx::descriptor(ptx::smem_address(smem.key[stage]), 0);
    ptx::wgmma_fence();
    if constexpr (kHoldQuery) {
      ptx::wgmma_scores<Element, 0>(scores, &query[0], k);
#pragma unroll
      for (int d = 1; d < kHeadDim / 16; ++d) ptx::wgmma_scores<Element, 1>(scores, &query[4 * d], k + (d % 4) * (32 >> 4) + (d / 4) * (sizeof(smem.key[0][0]) >> 4));
    } else {
    ptx::wgmma_scores<Element, 0>(scores, q, k);
#pragma unroll
    for (int d = 1; d < kHeadDim / 16; ++d) {
      const int inside = (d % 4) * (32 >> 4);  // 16 elements further in the 128-byte row, in descriptor units of 16 bytes
      ptx::wgmma_scores<Element, 1>(scores, q + inside + (d / 4) * (kQueryPanelBytes >> 4), k + inside + (d / 4) * (sizeof(smem.key[0][0]) >> 4));
    }
    }
    ptx::wgmma_commit();
  }

  // ---- out += P V, [64 x D], 128 / 16 steps; issued, not awaited ----
  __device__ __forceinline__ void pv_gemm(int stage) {
    const uint64_t v = ptx::descriptor(ptx::smem_address(smem.value[stage]), sizeof(smem.value[0][0]));
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; ++k) ptx::wgmma_out<Element>(out, &weights[4 * k], v + k * (16 * 128 >> 4));
    ptx::wgmma_commit();
  }

  // ---- masked kernel: this tile's key mask, one key a thread, to shared memory ----
  __device__ __forceinline__ void stage_key_bias(int tile) {
    const int key = tile * kTileKeys + thread;
    float bias = 0.f;
    if (key >= params.kv_len) {
      bias = -kInfinity;
    } else if (params.mask_type != MaskType::kNone) {
      const int64_t at = batch * params.mask_stride_batch + key * params.mask_stride_key;
      switch (params.mask_type) {
        case MaskType::kBool: bias = static_cast<const uint8_t*>(params.mask)[at] != 0 ? 0.f : -kInfinity; break;
        case MaskType::kFloat32: bias = static_cast<const float*>(params.mask)[at] * kLog2e; break;
        case MaskType::kBFloat16: bias = __bfloat162float(static_cast<const __nv_bfloat16*>(params.mask)[at]) * kLog2e; break;
        default: bias = __half2float(static_cast<const __half*>(params.mask)[at]) * kLog2e; break;
      }
    }
    smem.key_bias[group][thread] = bias;
    ptx::barrier_sync(kVote + group, kWarpgroup);
  }

  // ---- -inf where a score does not take part; masked kernel: scale, and add the key mask ----
  __device__ __forceinline__ void mask_scores(int tile) {
    const int column0 = 2 * (thread % 4);
    if constexpr (kMasked) {
#pragma unroll
      for (int j = 0; j < kTileKeys / 8; ++j) {
        const float2 bias = *reinterpret_cast<const float2*>(&smem.key_bias[group][8 * j + column0]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float b = i % 2 == 0 ? bias.x : bias.y;
          scores[4 * j + i] = b == -kInfinity ? -kInfinity : fmaf(scores[4 * j + i], params.scale_log2, b);
        }
      }
    }
    const int key0 = tile * kTileKeys;
    const bool cut = key0 + kTileKeys > params.kv_len || (params.is_causal && key0 + kTileKeys > row0 + 1);
    if (cut) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int limit = (params.is_causal ? min(params.kv_len, row(i) + 1) : params.kv_len) - key0 - column0;
#pragma unroll
        for (int j = 0; j < kTileKeys / 8; ++j) {
          if (8 * j >= limit) scores[4 * j + 2 * i] = -kInfinity;
          if (8 * j + 1 >= limit) scores[4 * j + 2 * i + 1] = -kInfinity;
        }
      }
    }
  }

  // ---- the largest of the thread's own scores of each of its rows; eight chains, since a chain waits for each result ----
  __device__ __forceinline__ void own_max(float (&tile_max)[2]) const {
    float chain[2][4];
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = chain[i][2 * (j % 2) + c];
          x = j < 2 ? scores[4 * j + 2 * i + c] : ptx::max_nan(x, scores[4 * j + 2 * i + c]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) tile_max[i] = ptx::max_nan(ptx::max_nan(chain[i][0], chain[i][1]), ptx::max_nan(chain[i][2], chain[i][3]));
  }

  // ---- over the four lanes that share a row ----
  __device__ __forceinline__ float row_max(float x) const {
    x = ptx::max_nan(x, __shfl_xor_sync(~0u, x, 1));
    return ptx::max_nan(x, __shfl_xor_sync(~0u, x, 2));
  }

  // The skip decision of one (64-row group, 128-key tile) pair, uniform over the warpgroup:
  //     skip  <=>  for all rows i:  tile_max[i] - max(m[i], tile_max[i]) < ln(lambda)   or   tile_max[i] = -inf
  // Since ln(lambda) <= 0 and the comparison is strict, a row agrees iff tile_max[i] - m[i] < ln(lambda): a tile that raises or equals a
  // maximum stays. That in turn holds iff it holds for each lane's own part of the row, so no shuffle and no exp is needed. A NaN makes
  // it false, so its row objects. Rows past the end and masked query rows have no vote. Units: log2.
  __device__ __forceinline__ bool skip_vote(const float (&tile_max)[2]) const {
    bool agree = true;  // `|` and `&`: no branch may split the warp here
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      agree &= !row_votes[i] | (tile_max[i] == -kInfinity) | ((tile_max[i] - running_max[i]) * unit < log2_threshold);
    }
    return ptx::barrier_all(kVote + group, kWarpgroup, agree);
  }

  // ---- scores become exp(scores - m_new); returns what the past is to be multiplied with, exp(m - m_new) ----
  __device__ __forceinline__ void softmax_step(const float (&tile_max)[2], float (&rescale)[2]) {
    float base[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float new_max = ptx::max_nan(running_max[i], row_max(tile_max[i]));
      base[i] = kMasked && new_max == -kInfinity ? 0.f : new_max * unit;
      rescale[i] = ptx::exp2_approx(running_max[i] * unit - base[i]);
      running_max[i] = new_max;
    }
    // The maxima settle after a few tiles; then all factors of a warp are 1 and the products are left out (the same bits).
    rescales = __any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum[2] = {0.f, 0.f};
#pragma unroll
      for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& s = scores[4 * j + 2 * i + c];
          s = ptx::exp2_approx(fmaf(s, unit, -base[i]));
          sum[c] += s;
        }
      }
      exp_sum[i] = fmaf(exp_sum[i], rescale[i], sum[0] + sum[1]);
    }
  }

  __device__ __forceinline__ void rescale_out(const float (&rescale)[2]) {
    if (rescales) {
#pragma unroll
      for (int j = 0; j < kHeadDim / 2; ++j) out[j] *= rescale[(j / 2) % 2];
    }
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int j = 0; j < kTileKeys / 4; ++j) weights[j] = ptx::pack<Element>(scores[2 * j], scores[2 * j + 1]);
  }

  __device__ __forceinline__ void release(uint64_t& empty) const {
    if (thread % 32 == 0) ptx::mbarrier_arrive(ptx::smem_address(&empty));
  }

  // One warpgroup issues its products while the other does its softmax.
  __device__ __forceinline__ void wait_for_turn() const {
    if (take_turns) ptx::barrier_sync(kTurn + group, kGroups * kWarpgroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (take_turns) ptx::barrier_arrive(kTurn + (group ^ 1), kGroups * kWarpgroup);
  }

  // Which of the value buffers a place means.
  template <bool kOwnValues, typename Place>
  __device__ __forceinline__ int buffer(Place at) const {
    return kOwnValues ? group + kGroups * at.stage : at.stage;
  }

  // One thread, after a vote to keep: V of the tile into the group's own buffer. Its use before last is over: P V of it was awaited
  // before the vote that all warps have just left.
  template <typename Place>
  __device__ __forceinline__ void load_own_value(int tile, Place at) const {
    if (thread == 0) load_tile(smem.value[buffer<true>(at)], &params.value_map, smem.value_full[buffer<true>(at)], tile, kv_head, batch);
  }

  template <bool kOwnValues>
  __device__ __forceinline__ void issue_due_pv(const Places<kOwnValues>& at) {
    const int buffer = this->buffer<kOwnValues>(at.due);
    ptx::mbarrier_wait(ptx::smem_address(&smem.value_full[buffer]), at.due.parity);
    pv_gemm(buffer);
  }
  template <bool kOwnValues>
  __device__ __forceinline__ void await_due_pv(const Places<kOwnValues>& at) {
    ptx::wgmma_wait<0>();
    ptx::pin(out);
    if constexpr (!kOwnValues) release(smem.value_empty[at.due.stage]);
  }

  // ---- one key tile; returns whether it was kept, that is whether P V of it is due in the next step ----
  // kPending: P V of the step before is due, and runs beside this step's Q K^T and its softmax. `owes_value` (shared ring): V of the tile
  // before was skipped; it is handed back now that this tile's K shows that the producer is past it.
  template <bool kPending, bool kVotes, bool kOwnValues>
  __device__ __forceinline__ bool step(Places<kOwnValues>& at, int tiles, bool owes_value) {
    const int tile = at.tile;
    if constexpr (kMasked) stage_key_bias(tile);
    ptx::mbarrier_wait(ptx::smem_address(&smem.key_full[at.key.stage]), at.key.parity);
    if constexpr (!kPending && kVotes && !kOwnValues) {
      if (owes_value) release(smem.value_empty[at.due.stage]);
    }
    wait_for_turn();
    qk_gemm(at.key.stage);
    if constexpr (kPending) issue_due_pv<kOwnValues>(at);
    pass_turn();
    // The next step's place, while the products run: forty dependent instructions that would otherwise delay them (200 cycles, measured).
    at.next_key = at.key;
    at.next_key.advance();
    at.next_tile = at.tile + 1 == tiles ? 0 : at.tile + 1;
    asm volatile("" : "+r"(at.next_key.stage), "+r"(at.next_key.parity), "+r"(at.next_tile));
    ptx::wgmma_wait<kPending ? 1 : 0>();
    ptx::pin(scores);
    release(smem.key_empty[at.key.stage]);

    mask_scores(tile);
    float tile_max[2], rescale[2];
    own_max(tile_max);
    // Without a vote: true, but not known to the compiler. The branch keeps the exps ahead of the wait for P V that runs beside them;
    // without one ptxas moves the wait up and the two run one after the other.
    bool keep = params.q_blocks > 0;
    ++visited;
    if constexpr (kVotes) {
      keep = !skip_vote(tile_max);
      if (!keep) {
        bool masked = false;
        if constexpr (kMasked) {
          const bool any = (row_votes[0] && tile_max[0] != -kInfinity) || (row_votes[1] && tile_max[1] != -kInfinity);
          masked = !ptx::barrier_any(kVote + group, kWarpgroup, any);
        }
        masked ? --visited : ++skipped;
      } else if constexpr (kOwnValues) {
        load_own_value(tile, at.value);
      }
    }
    if (keep) softmax_step(tile_max, rescale);
    if constexpr (kPending) await_due_pv<kOwnValues>(at);
    if (keep || !kVotes) {
      rescale_out(rescale);
      pack_weights();
    }
    return keep || !kVotes;
  }

  // ---- a tile of the other group alone: hand its buffers on ----
  template <bool kVotes, bool kOwnValues>
  __device__ __forceinline__ void pass_tile(const Places<kOwnValues>& at, bool owes_value) {
    ptx::mbarrier_wait(ptx::smem_address(&smem.key_full[at.key.stage]), at.key.parity);
    release(smem.key_empty[at.key.stage]);
    if constexpr (kOwnValues) return;
    if constexpr (kVotes) {
      if (owes_value) release(smem.value_empty[at.due.stage]);
    } else {
      ptx::mbarrier_wait(ptx::smem_address(&smem.value_full[at.value.stage]), at.value.parity);
      release(smem.value_empty[at.value.stage]);
    }
  }

  template <bool kVotes>
  __device__ __forceinline__ void run(const Stream& stream) {
    constexpr bool kOwnValues = kVotes && !kMasked;
    const bool has_rows = row0 < params.q_len;
    const int begin = group == 0 ? 0 : stream.offset1, end = has_rows ? begin + stream.tiles : begin;
    if (has_rows) {
      ptx::mbarrier_wait(ptx::smem_address(&smem.query_full[group]), 0);
      if constexpr (kHoldQuery) load_query();
    }
    if constexpr (kHoldQuery) release(smem.query_free);
    if (take_turns && group == 1) ptx::barrier_arrive(kTurn + 0, kGroups * kWarpgroup);

    Places<kOwnValues> at;
    bool pending = false, owes_value = false;  // V of the tile before: P V of it is due; skipped, and not handed back yet
    const auto advance_value = [&] {
      at.due = at.value;
      if (!kOwnValues || pending) at.value.advance();
      owes_value = !pending;
    };
    int position = 0;
    for (; position < begin; ++position, at.key.advance(), advance_value()) pass_tile<kVotes, kOwnValues>(at, owes_value);
    at.tile = stream.tile(begin);
    for (; position < end; ++position, at.key = at.next_key, at.tile = at.next_tile, advance_value()) {
      if (pending) {
        pending = step<true, kVotes, kOwnValues>(at, stream.tiles, owes_value);
      } else {
        pending = step<false, kVotes, kOwnValues>(at, stream.tiles, owes_value);
      }
    }
    if (pending) {
      issue_due_pv<kOwnValues>(at);
      await_due_pv<kOwnValues>(at);
      pending = owes_value = false;
    }
    for (; position < stream.length; ++position, at.key.advance(), advance_value()) pass_tile<kVotes, kOwnValues>(at, owes_value);
    if (take_turns && group == 0) ptx::barrier_sync(kTurn + 0, kGroups * kWarpgroup);  // takes the turn that nobody waits for
    if constexpr (!kVotes) ptx::barrier_sync(kDone, kGroups * kWarpgroup);  // the output leaves through a buffer of the shared ring
    if (has_rows) store_output();
  }

  // ---- out / sum, through the group's own part of shared memory so that global stores are 16 bytes a thread and whole rows ----
  __device__ __forceinline__ void store_output() {
    constexpr int kChunks = kHeadDim / 8;  // of 16 bytes a row; swizzled by the row, or eight rows would meet in the same banks
    char* staged = reinterpret_cast<char*>(smem.query(group));
    ptx::barrier_sync(kVote + group, kWarpgroup);  // no warp's product reads that memory any more
    float* lse = params.lse + (int64_t{batch} * params.heads + head) * params.q_len;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = exp_sum[i];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const bool zero = running_max[i] == -kInfinity || !row_votes[i];
      const float inverse = 1.f / sum;
      const int local = row(i) - row0;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const float low = zero ? 0.f : out[4 * j + 2 * i] * inverse, high = zero ? 0.f : out[4 * j + 2 * i + 1] * inverse;
        *reinterpret_cast<uint32_t*>(staged + (local * kChunks + (j ^ (local & 7))) * 16 + (thread % 4) * 4) = ptx::pack<Element>(low, high);
      }
      if (thread % 4 == 0 && row(i) < params.q_len) lse[row(i)] = zero ? -kInfinity : running_max[i] * unit * kLn2 + logf(sum);
    }
    ptx::barrier_sync(kVote + group, kWarpgroup);
    Element* target = static_cast<Element*>(params.out) + batch * params.out_stride_batch + head * params.out_stride_head;
    for (int chunk = thread; chunk < kGroupRows * kChunks; chunk += kWarpgroup) {
      const int local = chunk / kChunks, j = chunk % kChunks;
      if (row0 + local < params.q_len) {
        *reinterpret_cast<uint4*>(target + (row0 + local) * params.out_stride_row + j * 8) =
            *reinterpret_cast<const uint4*>(staged + (local * kChunks + (j ^ (local & 7))) * 16);
      }
    }
    if (thread == 0) {
      int32_t* counts = params.counts + 2 * (int64_t{batch} * params.heads + head);
      atomicAdd(counts, visited);
      if (skipped > 0) atomicAdd(counts + 1, skipped);
    }
  }
};
