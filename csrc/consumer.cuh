// What a consumer warpgroup is made of: 64 query rows, the products and the softmax of one key tile, and the output at the end.
#pragma once

#include <type_traits>

#include "blocks.cuh"
#include "plan.cuh"
#include "ptx.cuh"
#include "stream.cuh"

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLn2 = 0.693147180559945f;
constexpr float kBaseSlack = 8.f;  // see `exp_base`
constexpr float kNoMax = -1e30f;   // of a row without a key so far: below every score, and finite, so that what is -inf stays so relative to it

template <typename Element, int kHeadDim, Loop kLoop>
struct Consumer {
  using Smem = SharedMemory<Element, kHeadDim, kLoop>;
  static constexpr bool kHoldQuery = kHeadDim == 64;
  static constexpr int kQueryPanelBytes = kGroupRows * kPanel * sizeof(Element);

  const Params& params;
  Smem& smem;
  const int row0, group, thread;
  int lane;

  using Scores = float[kTileKeys / 2];      // a thread's share of the scores of a tile
  using Weights = uint32_t[kTileKeys / 4];  // of P in the input's precision, as wgmma takes it from registers

  // A thread holds two rows, i = 0 and 1, of every accumulator: row0 + 16 * warp + lane / 4 + 8 * i; of these the columns
  // 8 * j + 2 * (lane % 4) + {0, 1}, at index 4 * j + 2 * i + {0, 1}.
  float out[kHeadDim / 2];
  uint32_t query[kHoldQuery ? kHeadDim / 4 : 1];

  // What the exps of a row are relative to, log2 units: its maximum so far, or up to 8 below it (dense: up to 13, see kMostSum). While the
  // maximum stays within that, nothing is rescaled. The quotient out / sum is the same, 16-bit weights of up to 2^13 are as precise as those of
  // up to 1, and out, 64 registers, is rarely multiplied.
  float exp_base[2];
  float exp_sum[2];                 // this thread's share
  int row_votes[2];                 // bool
  float unit;                       // from raw scores to log2 units
  int skipped = 0;

  __device__ __forceinline__ Consumer(const Params& params, Smem& smem, const Block& block, int group)
      : params(params), smem(smem), row0(block.row0 + group * kGroupRows), group(group), thread(threadIdx.x % kWarpgroup) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) out[i] = 0.f;
    unit = params.scale_log2;
    lane = thread % 32;
    asm volatile("" : "+r"(lane));  // or it is computed again at each use
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      exp_base[i] = kNoMax;
      exp_sum[i] = 0.f;
      row_votes[i] = row(i) < params.q_len;
      if (row_votes[i] && params.query_mask != nullptr) {
        row_votes[i] = params.query_mask[block.batch * params.query_mask_stride_batch + row(i) * params.query_mask_stride_row] != 0;
      }
      asm volatile("" : "+r"(row_votes[i]));  // or it is computed again in each step, from the thread's number on
    }
  }

  __device__ __forceinline__ int row(int i) const { return row0 + (thread / 32) * 16 + (thread % 32) / 4 + 8 * i; }

  __device__ __forceinline__ auto& progress() const { return progress_of_warp(smem); }
  // Once more, after the loop, and not held in registers meanwhile.
  __device__ __forceinline__ Block block() const { return Block(smem.work[progress().blocks % 2]); }
  __device__ __forceinline__ void await_query() const { ptx::mbarrier_wait(ptx::smem_address(&smem.query_full[group]), progress().blocks % 2); }
  // Of a warp that reads the buffer no more.
  __device__ __forceinline__ void release_query() const {
    if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&smem.query_empty[group]));
  }

  // ---- Q from shared memory to registers, as wgmma takes its A operand: a third less shared-memory traffic in Q K^T ----
  __device__ __forceinline__ void load_query() {
    const uint32_t base = ptx::smem_address(smem.query[group]);
    const int local = (thread / 32) * 16 + thread % 16;
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      const int chunk = (d % 4) * 2 + (thread % 32) / 16;  // of 16 bytes in the swizzled row
      ptx::load_matrix(&query[4 * d], base + (d / 4) * kQueryPanelBytes + local * 128 + ((chunk ^ (local & 7)) << 4));
    }
  }

  // ---- scores = Q K^T, [64 x 128], D / 16 steps; issued, not awaited ----
  struct QkOperands {  // descriptors
    uint32_t q, k;
  };
  __device__ __forceinline__ QkOperands qk_operands(int stage) const {
    return {ptx::descriptor(ptx::smem_address(smem.query[group]), 0), ptx::descriptor(ptx::smem_address(smem.key[stage]), 0)};
  }
  // Held by the warp: from a thread's registers each descriptor takes R2UR, and Q K^T 290 cycles to issue instead of 160.
  __device__ __forceinline__ QkOperands uniform_operands(int stage) const {
    const auto [q, k] = qk_operands(stage);
    return {ptx::uniform(q), ptx::uniform(k)};
  }
  __device__ __forceinline__ void qk_gemm(Scores& scores, const QkOperands& operands) {
    const auto [q, k] = operands;
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
  __device__ __forceinline__ uint32_t value_operand(int stage) const { return ptx::descriptor(ptx::smem_address(smem.value[stage]), sizeof(smem.value[0][0])); }
  __device__ __forceinline__ void pv_gemm(const Weights& weights, uint32_t v) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; ++k) ptx::wgmma_out<Element>(out, &weights[4 * k], v + k * (16 * 128 >> 4));
    ptx::wgmma_commit();
  }

  // What the buffer of K holds. Until it is handed back.
  __device__ __forceinline__ int read_tile(int stage) const { return *const_cast<const volatile int*>(&smem.key_tile[stage]); }

  __device__ __forceinline__ static int tile_of(int found) { return found ^ (found >> 31); }

  // ---- a tile some of whose scores do not take part, or are not those of a positive scale; `found`, by all of the group ----
  __device__ __forceinline__ void mask_scores(Scores& scores, int found, int stage) {
    const int column0 = 2 * (thread % 4), key0 = tile_of(found) * kTileKeys + column0;
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
      const float2 bias = ptx::load_pair(reinterpret_cast<const float2*>(&smem.key_bias[stage][8 * j + column0]));
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::add_bias(scores[4 * j + i], params.sign, i % 2 == 0 ? bias.x : bias.y);
    }
    if (params.is_causal) {
      const int last = row(0) - key0;  // the last column that the first row sees; the second one 8 more
#pragma unroll
      for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::mask_beyond(scores[4 * j + i], 8 * (j - i / 2) + i % 2, last);
      }
    }
    if (params.meets_empty_tiles) {  // which count as nothing
      bool any = false;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        constexpr int kNothing = 0xFF800000;  // -inf
        any |= row_votes[i] != 0 & (own_extreme<true>(scores, i) != kNothing | own_extreme<false>(scores, i) != kNothing);
      }
      if (!ptx::barrier_any(kStore + group, kWarpgroup, any) && thread == 0) ++progress().empty;
    }
    __syncwarp();  // all have read the biases
  }

  // ---- the largest of the thread's own scores of each of its rows; as a tree, since a chain waits for each result ----
  __device__ __forceinline__ void own_max(const Scores& scores, float (&tile_max)[2]) const {
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

  // ---- the same of row i, as integers: the largest; or the smallest, which is the largest of negative floats. wgmma writes NaN as 0x7FFFFFFF, above all ----
  template <bool kLargest>
  __device__ __forceinline__ int own_extreme(const Scores& scores, int i) const {
    const auto pick = [](int a, int b, int c) { return kLargest ? __vimax3_s32(a, b, c) : __vimin3_s32(a, b, c); };
    constexpr int kChains = 4;
    int best[kChains];
#pragma unroll
    for (int c = 0; c < kChains; ++c) {
#pragma unroll
      for (int j = c; j < kTileKeys / 8; j += kChains) {
        const int low = __float_as_int(scores[4 * j + 2 * i]), high = __float_as_int(scores[4 * j + 2 * i + 1]);
        best[c] = j == c ? pick(low, high, high) : pick(best[c], low, high);
      }
    }
    return pick(pick(best[0], best[1], best[2]), best[3], best[3]);
  }

  // ---- over the four lanes that share a row ----
  __device__ __forceinline__ float row_max(float x) const {
    x = ptx::max_nan(x, __shfl_xor_sync(~0u, x, 1));
    return ptx::max_nan(x, __shfl_xor_sync(~0u, x, 2));
  }

  // ---- weights = exp(scores - base); `sum`: this thread's share of each row's ----
  __device__ __forceinline__ void exponentiate(const Scores& scores, Weights& weights, float (&sum)[2]) const {
    float part[2][2] = {};
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float weight[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          weight[c] = ptx::exp2_approx(fmaf(scores[4 * j + 2 * i + c], unit, -exp_base[i]));
          part[i][c] += weight[c];
        }
        weights[2 * j + i] = ptx::pack<Element>(weight[0], weight[1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[i] = part[i][0] + part[i][1];
  }

  __device__ __forceinline__ void rescale_out(const float (&rescale)[2]) {
#pragma unroll
    for (int j = 0; j < kHeadDim / 2; ++j) out[j] *= rescale[(j / 2) % 2];
  }

  // ---- out / sum, through the group's own part of shared memory so that global stores are 16 bytes a thread and whole rows ----
  template <bool kMeasures = false>
  __device__ __forceinline__ void store_output() {
    int thread = this->thread;
    asm volatile("" : "+r"(thread));  // or what follows from it is computed before the loops, and spilled
    const Block block = this->block();
    const int row0 = block.row0 + group * kGroupRows;
    if (row0 >= params.q_len) return;
    constexpr int kChunks = kHeadDim / 8;  // of 16 bytes a row; swizzled by the row, or eight rows would meet in the same banks
    char* staged = static_cast<char*>(smem.output(group));
    ptx::barrier_sync(kStore + group, kWarpgroup);  // no warp's product reads that memory any more
    float* lse = kMeasures ? nullptr : params.lse + (int64_t{block.batch} * params.heads + block.head) * params.q_len;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = exp_sum[i];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const bool zero = sum == 0.f || !row_votes[i];
      const float inverse = 1.f / sum;
      const int local = (thread / 32) * 16 + (thread % 32) / 4 + 8 * i;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const float low = zero ? 0.f : out[4 * j + 2 * i] * inverse, high = zero ? 0.f : out[4 * j + 2 * i + 1] * inverse;
        *reinterpret_cast<uint32_t*>(staged + (local * kChunks + (j ^ (local & 7))) * 16 + (thread % 4) * 4) = ptx::pack<Element>(low, high);
      }
      if (!kMeasures && thread % 4 == 0 && row0 + local < params.q_len) lse[row0 + local] = zero ? -kInfinity : exp_base[i] * kLn2 + logf(sum);
    }
    ptx::barrier_sync(kStore + group, kWarpgroup);
    Element* target = static_cast<Element*>(params.out) + block.batch * params.out_stride_batch + block.head * params.out_stride_head;
    for (int chunk = thread; chunk < kGroupRows * kChunks; chunk += kWarpgroup) {
      const int local = chunk / kChunks, j = chunk % kChunks;
      if (row0 + local < params.q_len) {
        *reinterpret_cast<uint4*>(target + (row0 + local) * params.out_stride_row + j * 8) =
            *reinterpret_cast<const uint4*>(staged + (local * kChunks + (j ^ (local & 7))) * 16);
      }
    }
    if constexpr (!Smem::kOutputApart) ptx::fence_copies();  // Q or V of the next block comes to the same place
    if (kMeasures || (params.query_mask != nullptr && !ptx::barrier_any(kStore + group, kWarpgroup, row_votes[0] || row_votes[1]))) return;
    if (thread == 0) {
      const int visited = progress().visited - progress().empty, voted_out = skipped - progress().empty;  // nothing objects to an empty one
      int32_t* counts = params.counts + 2 * (int64_t{block.batch} * params.heads + block.head);
      if (!params.shares_blocks || counts != params.counts) atomicAdd(counts, visited);  // see blocks.cuh
      if (voted_out > 0) atomicAdd(counts + 1, voted_out);
    }
  }
};
