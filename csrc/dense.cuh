// The consumer where nothing is skipped: lambda = 0 (unless a group may meet empty tiles), and measurements.
//
// No maximum is looked for, but in the first tile and to measure. The exps of a tile are relative to the base of the tile before, and their
// sum tells whether that is too low; then, a few times in a row's life, they are computed again. P V of the tile before runs beside the exps:
// two buffers of weights take turns.
#pragma once

#include "consumer.cuh"
#include "tally.cuh"

// Of a thread's 32 weights of a row; if none exceeds 2^kBaseSlack, their sum does not exceed this, 2^13, which float16 holds.
constexpr float kMostSum = kTileKeys / 4 * 256.f;
static_assert(kBaseSlack == 8.f);

template <typename Element, int kHeadDim, bool kMeasures>
struct DenseConsumer : Consumer<Element, kHeadDim, Loop::kDense> {
  using Base = Consumer<Element, kHeadDim, Loop::kDense>;
  using Smem = typename Base::Smem;
  using Base::exp_base, Base::exp_sum, Base::group, Base::kHoldQuery, Base::lane, Base::out, Base::params, Base::row0, Base::smem, Base::unit;

  struct Places {
    RingPlace<Smem::kKeyStages> key;      // of this tile
    RingPlace<Smem::kValueStages> value;  // of the tile before, whose P V is due
    int left;                             // tiles
    bool key_there = false;
  };

  typename Base::Scores scores;
  static constexpr int kBuffers = kMeasures ? 1 : 2;  // to measure: no registers for two, so P V runs beside the maxima
  typename Base::Weights weights[kBuffers];
  float running_max[2] = {kNoMax, kNoMax};  // to measure; raw scores
  std::conditional_t<kMeasures, Tally<Smem>, NoTally> tally;
  int partner_lane;           // the lane that releases to the other CTA of the cluster; 32: no lane
  uint32_t partner_distance;  // from an address of this CTA to the same place in the other

  __device__ __forceinline__ DenseConsumer(const Params& params, Smem& smem, const Block& block, int group)
      : Base(params, smem, block, group), tally(params, smem, group == 0 && row0 + kGroupRows >= params.q_len) {
    partner_lane = params.cluster > 1 ? 1 : 32;
    const uint32_t here = ptx::smem_address(&smem);  // holds the CTA's rank too
    partner_distance = params.cluster > 1 ? ptx::map_to_rank(here, ptx::cluster_rank() ^ 1) - here : 0;
    asm volatile("" : "+r"(partner_lane), "+r"(partner_distance));
  }

  // To both CTAs: each has filled one half of the buffer, and waits for the warps of both.
  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
    if (lane == partner_lane) ptx::mbarrier_arrive_cluster(barrier + partner_distance);
  }

  // ---- a measurement's look at a tile; the maxima need the other lanes only where one rises ----
  __device__ __forceinline__ float look(const float (&tile_max)[2]) {
    if (__any_sync(~0u, !(tile_max[0] <= running_max[0]) | !(tile_max[1] <= running_max[1]))) {
#pragma unroll
      for (int i = 0; i < 2; ++i) running_max[i] = ptx::max_nan(running_max[i], this->row_max(tile_max[i]));
    }
    return skip_distance(tile_max, running_max, this->row_votes, unit);
  }

  // ---- new bases; `rescale`: what was summed so far is to be multiplied with ----
  __device__ __forceinline__ void raise_base(const float (&tile_max)[2], float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float old_base = exp_base[i];
      exp_base[i] = ptx::max_nan(old_base, this->row_max(tile_max[i]) * unit);
      rescale[i] = ptx::exp2_approx(old_base - exp_base[i]);
      exp_sum[i] *= rescale[i];
    }
  }

  // Uniform over the warp; true for the first tile, and for a NaN. No lane needs to know what the others have.
  __device__ __forceinline__ bool exceeds(const float (&x)[2], float limit) const { return __any_sync(~0u, !((x[0] <= limit) & (x[1] <= limit))); }

  // ---- one key tile, whose weights go to weights[kBuffer]; kPending: P V of the tile before is due. Returns whether it is the last ----
  template <int kBuffer, bool kPending = true>
  __device__ __forceinline__ bool step(Places& at) {
    constexpr bool kMaximaFirst = kMeasures || !kPending;  // the first tile raises the base anyway
    bool value_there = false;
    if constexpr (kPending) value_there = ptx::mbarrier_test(ptx::smem_address(&smem.value_full[at.value.stage]), at.value.parity());
    const uint32_t value = kPending ? ptx::uniform(this->value_operand(at.value.stage)) : 0;
    const auto operands = this->uniform_operands(at.key.stage);
    if (!at.key_there) ptx::mbarrier_wait(ptx::smem_address(&smem.key_full[at.key.stage]), at.key.parity());
    const int stage = at.key.stage;
    int found = this->read_tile(stage);
    this->qk_gemm(scores, operands);
    if constexpr (kPending) {
      if (!value_there) ptx::mbarrier_wait(ptx::smem_address(&smem.value_full[at.value.stage]), at.value.parity());
      this->pv_gemm(weights[(kBuffer + 1) % kBuffers], value);
    }
    // While the products run: all that would otherwise stand between them and the next ones.
    uint32_t key_empty = ptx::smem_address(&smem.key_empty[at.key.stage]), value_empty = ptx::smem_address(&smem.value_empty[at.value.stage]);
    at.key.advance();
    if constexpr (kPending) at.value.advance();
    asm volatile("" : "+r"(key_empty), "+r"(value_empty), "+r"(found), "+r"(at.key.stage), "+r"(at.key.parities));
    const bool last = ptx::agreed(--at.left == 0);
    at.key_there = ptx::mbarrier_test(ptx::smem_address(&smem.key_full[at.key.stage]), at.key.parity());
    ptx::wgmma_wait<kPending ? 1 : 0>();
    ptx::pin(scores);
    if (ptx::agreed(found < 0)) this->mask_scores(scores, found, stage);
    release(key_empty);

    float tile_max[2], sum[2], rescale[2];
    bool raises;
    if constexpr (kMaximaFirst) {
      this->own_max(scores, tile_max);
      if constexpr (kMeasures) tally.add(look(tile_max));
      const float above[2] = {tile_max[0] * unit - exp_base[0], tile_max[1] * unit - exp_base[1]};
      raises = exceeds(above, kBaseSlack);
      if (raises) raise_base(tile_max, rescale);
    } else {
      this->exponentiate(scores, weights[kBuffer % kBuffers], sum);
      raises = exceeds(sum, kMostSum);
      if (raises) {
        this->own_max(scores, tile_max);
        raise_base(tile_max, rescale);
        this->exponentiate(scores, weights[kBuffer % kBuffers], sum);
      }
    }
    // P V is over by now. Behind the branch, or the wait would be moved up; all warps of the group must come to the same wait.
    if constexpr (kPending) await_pv(value_empty);
    if (raises) this->rescale_out(rescale);
    if constexpr (kMaximaFirst) this->exponentiate(scores, weights[kBuffer % kBuffers], sum);
    exp_sum[0] += sum[0];
    exp_sum[1] += sum[1];
    return last;
  }

  // ---- P V of the last tile ----
  template <int kBuffer>
  __device__ __forceinline__ void finish(Places& at) {
    ptx::mbarrier_wait(ptx::smem_address(&smem.value_full[at.value.stage]), at.value.parity());
    this->pv_gemm(weights[kBuffer % kBuffers], this->value_operand(at.value.stage));
    await_pv(ptx::smem_address(&smem.value_empty[at.value.stage]));
    at.value.advance();
  }

  __device__ __forceinline__ void await_pv(uint32_t value_empty) {
    ptx::wgmma_wait<0>();
    ptx::pin(out);
    release(value_empty);
  }

  __device__ __forceinline__ void run(const Stream& stream) {
    auto& progress = this->progress();
    const bool has_rows = row0 < params.q_len;
    this->await_query();
    if constexpr (kHoldQuery) {
      if (has_rows) this->load_query();
      this->release_query();
    }
    const int begin = stream.begin(group), tiles = has_rows ? stream.tiles : 0;
    Places at{{0, progress.key_parities}, {0, progress.value_parities}, tiles};
    const auto pass_tiles = [&](int count) {
      for (int n = 0; n < count; ++n, at.key.advance(), at.value.advance()) pass_tile(at);
    };
    if (this->thread == 0) progress.visited = tiles, progress.empty = 0;
    pass_tiles(begin);
    if (ptx::agreed(tiles > 0)) {
      bool last = step<0, false>(at);
      while (true) {
        if (last) {
          finish<0>(at);
          break;
        }
        last = step<1>(at);
        if (last) {
          finish<1>(at);
          break;
        }
        last = step<0>(at);
      }
      at.key_there = false;
    }
    pass_tiles(stream.length - begin - tiles);
    progress.key_parities = at.key.parities;
    progress.value_parities = at.value.parities;
    this->template store_output<kMeasures>();
    if constexpr (kMeasures) {
      if (has_rows) tally.store(params, this->block());
    }
    if constexpr (!kHoldQuery) {
      __syncwarp();
      this->release_query();
    }
  }

  // ---- a tile of the other group alone: its buffers are handed on ----
  __device__ __forceinline__ void pass_tile(const Places& at) const {
    ptx::mbarrier_wait(ptx::smem_address(&smem.key_full[at.key.stage]), at.key.parity());
    release(ptx::smem_address(&smem.key_empty[at.key.stage]));
    ptx::mbarrier_wait(ptx::smem_address(&smem.value_full[at.value.stage]), at.value.parity());
    __syncwarp();
    release(ptx::smem_address(&smem.value_empty[at.value.stage]));
  }
};
