// One consumer warpgroup: 64 query rows through all key tiles. The algorithm is BLASST (arXiv 2512.12087) on top of online softmax.
#pragma once

#include <type_traits>

#include "plan.cuh"
#include "ptx.cuh"

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLn2 = 0.693147180559945f;
constexpr float kLog2e = 1.442695040888963f;
constexpr float kBaseSlack = 8.f;  // log2 units

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

  __device__ __forceinline__ Stream(const Params& params, int row0, bool own_first) {
    tiles = params.tiles;
    if (params.is_causal) tiles = min(tiles, (min(row0 + kBlockRows, params.q_len) + kTileKeys - 1) / kTileKeys);
    int first[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int64_t twice_middle = 2 * (int64_t{row0} + g * kGroupRows) + kGroupRows;
      const int64_t own = own_first ? twice_middle * params.kv_len / (int64_t{2} * params.q_len * kTileKeys) : 0;
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
  int lane, partner_lane;           // the lane that releases to the other CTA of the cluster; 32: no lane
  uint32_t partner_distance;        // from an address of this CTA to the same place in the other
  const float log2_threshold;

  // A thread holds two rows, i = 0 and 1, of every accumulator: row0 + 16 * warp + lane / 4 + 8 * i; of these the columns
  // 8 * j + 2 * (lane % 4) + {0, 1}, at index 4 * j + 2 * i + {0, 1}.
  float out[kHeadDim / 2];
  float scores[kTileKeys / 2];
  uint32_t query[kHoldQuery ? kHeadDim / 4 : 1];
  uint32_t weights[kTileKeys / 4];  // P in the input's precision, as wgmma takes it from registers
  float running_max[2];             // raw scores (masked kernel: log2 units)
  float exp_base[2], exp_sum[2];    // what the exps so far are relative to, log2 units; this thread's share of their sum
  bool row_votes[2];
  bool rescales = false;            // uniform over the warp: some base rose in this tile
  float unit;                       // from raw scores to log2 units
  int visited = 0, skipped = 0;

  __device__ __forceinline__ Consumer(const Params& params, Smem& smem, int batch, int head, int group, int row0, bool take_turns, float log2_threshold)
      : params(params), smem(smem), batch(batch), head(head), kv_head(head / params.heads_per_kv_head), group(group),
        thread(threadIdx.x % kWarpgroup), row0(row0), take_turns(take_turns), log2_threshold(log2_threshold) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) out[i] = 0.f;
    unit = kMasked ? 1.f : params.scale_log2;
    lane = thread % 32;
    if constexpr (!kMasked) {
      partner_lane = params.cluster > 1 ? 1 : 32;
      const uint32_t here = ptx::smem_address(&smem);  // holds the CTA's rank too
      partner_distance = params.cluster > 1 ? ptx::map_to_rank(here, ptx::cluster_rank() ^ 1) - here : 0;
      asm volatile("" : "+r"(lane), "+r"(partner_lane), "+r"(partner_distance));  // or they are computed again at each use
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      running_max[i] = -kInfinity;
      exp_base[i] = -kInfinity;
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
    const uint32_t q = ptx::descriptor(ptx::smem_address(smem.query(group)), 0);
    const uint32_t k = ptx::descriptor(ptx::smem_address(smem.key[stage]), 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      const int inside = (d % 4) * (32 >> 4);  // 16 elements further in the 128-byte row, in descriptor units of 16 bytes
      const uint32_t b = k + inside + (d / 4) * (sizeof(smem.key[0][0]) >> 4);
      if constexpr (kHoldQuery) {
        ptx::wgmma_scores<Element>(scores, &query[4 * d], b, d > 0);
      } else {
        ptx::wgmma_scores<Element>(scores, q + inside + (d / 4) * (kQueryPanelBytes >> 4), b, d > 0);
      }
    }
    ptx::wgmma_commit();
  }

  // ---- out += P V, [64 x D], 128 / 16 steps; issued, not awaited ----
  __device__ __forceinline__ void pv_gemm(int stage) {
    const uint32_t v = ptx::descriptor(ptx::smem_address(smem.value[stage]), sizeof(smem.value[0][0]));
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

  // ---- the largest of the thread's own scores of each of its rows; as a tree, since a chain waits for each result ----
  __device__ __forceinline__ void own_max(float (&tile_max)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x[kTileKeys / 8];
#pragma unroll
      for (int j = 0; j < kTileKeys / 8; ++j) x[j] = ptx::max_nan(scores[4 * j + 2 * i], scores[4 * j + 2 * i + 1]);
#pragma unroll
      for (int stride = 1; stride < kTileKeys / 8; stride *= 2) {
#pragma unroll
        for (int j = 0; j + stride < kTileKeys / 8; j += 2 * stride) x[j] = ptx::max_nan(x[j], x[j + stride]);
      }
      tile_max[i] = x[0];
    }
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

  // ---- the new maxima, and the base that the exps of this tile are relative to; returns what everything before is to be multiplied with ----
  // The base is the running maximum, or up to 2^8 below it: a maximum that rises by less rescales nothing. The quotient out / sum is the
  // same, 16-bit weights of up to 2^8 are as precise as those of up to 1, and out, 64 registers, is rarely multiplied.
  __device__ __forceinline__ void raise_max(const float (&tile_max)[2], float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      running_max[i] = ptx::max_nan(running_max[i], row_max(tile_max[i]));
      const float top = running_max[i] * unit, old_base = exp_base[i];
      if (kMasked || !(top - old_base <= kBaseSlack)) exp_base[i] = top;  // also where top is NaN; masked: always, to save registers
      rescale[i] = ptx::exp2_approx(old_base - finite_base(i));
    }
    rescales = __any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f);
  }

  // Masked kernel: a row without a key so far has no maximum.
  __device__ __forceinline__ float finite_base(int i) const { return kMasked && exp_base[i] == -kInfinity ? 0.f : exp_base[i]; }

  // ---- weights = exp(scores - base) ----
  __device__ __forceinline__ void softmax_step(const float (&rescale)[2]) {
    const float base[2] = {finite_base(0), finite_base(1)};
    float sum[2][2] = {};
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* s = &scores[4 * j + 2 * i];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          s[c] = ptx::exp2_approx(fmaf(s[c], unit, -base[i]));
          sum[i][c] += s[c];
        }
        weights[2 * j + i] = ptx::pack<Element>(s[0], s[1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) exp_sum[i] = fmaf(exp_sum[i], rescale[i], sum[i][0] + sum[i][1]);
    if (rescales) {
#pragma unroll
      for (int j = 0; j < kHeadDim / 2; ++j) out[j] *= rescale[(j / 2) % 2];
    }
  }

  // `kShared`: the buffer was filled by both CTAs of the cluster, each of which waits for the warps of both.
  template <bool kShared>
  __device__ __forceinline__ void release(uint64_t& empty) const {
    const uint32_t barrier = ptx::smem_address(&empty);
    if (lane == 0) ptx::mbarrier_arrive(barrier);
    if (kShared && lane == partner_lane) ptx::mbarrier_arrive_cluster(barrier + partner_distance);
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
  template <bool kVotes, bool kOwnValues>
  __device__ __forceinline__ void await_due_pv(const Places<kOwnValues>& at) {
    ptx::wgmma_wait<0>();
    ptx::pin(out);
    if constexpr (!kOwnValues) release<!kVotes>(smem.value_empty[at.due.stage]);
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
      if (owes_value) release<false>(smem.value_empty[at.due.stage]);
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
    release<!kVotes>(smem.key_empty[at.key.stage]);
    if constexpr (kPending && kMasked) await_due_pv<kVotes, kOwnValues>(at);  // here, since masking needs its registers

    mask_scores(tile);
    float tile_max[2];
    own_max(tile_max);
    // Without a vote: true, but not known to the compiler. The branch keeps the wait for P V behind the maxima, where P V is over.
    bool keep = kMasked || params.q_blocks > 0;
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
    float rescale[2];
    if (keep) raise_max(tile_max, rescale);
    if constexpr (kPending && !kMasked) await_due_pv<kVotes, kOwnValues>(at);  // over by now: it was issued before the maxima were taken
    if (keep) softmax_step(rescale);
    return keep;
  }

  // ---- a tile of the other group alone: hand its buffers on ----
  template <bool kVotes, bool kOwnValues>
  __device__ __forceinline__ void pass_tile(const Places<kOwnValues>& at, bool owes_value) {
    ptx::mbarrier_wait(ptx::smem_address(&smem.key_full[at.key.stage]), at.key.parity);
    release<!kVotes>(smem.key_empty[at.key.stage]);
    if constexpr (kOwnValues) return;
    if constexpr (kVotes) {
      if (owes_value) release<false>(smem.value_empty[at.due.stage]);
    } else {
      ptx::mbarrier_wait(ptx::smem_address(&smem.value_full[at.value.stage]), at.value.parity);
      release<true>(smem.value_empty[at.value.stage]);
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
    if constexpr (kHoldQuery) release<!kVotes>(smem.query_free);
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
    const auto advance = [&] {
      ++position;
      at.key = at.next_key;
      at.tile = at.next_tile;
      advance_value();
    };
    if constexpr (kVotes) {
      for (; position < end; advance()) {
        if (pending) {
          pending = step<true, kVotes, kOwnValues>(at, stream.tiles, owes_value);
        } else {
          pending = step<false, kVotes, kOwnValues>(at, stream.tiles, owes_value);
        }
      }
    } else if (position < end) {
      pending = step<false, kVotes, kOwnValues>(at, stream.tiles, owes_value);
      for (advance(); position < end; advance()) step<true, kVotes, kOwnValues>(at, stream.tiles, owes_value);
    }
    if (pending) {
      issue_due_pv<kOwnValues>(at);
      await_due_pv<kVotes, kOwnValues>(at);
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
      if (thread % 4 == 0 && row(i) < params.q_len) lse[row(i)] = zero ? -kInfinity : exp_base[i] * kLn2 + logf(sum);
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
