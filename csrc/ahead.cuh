// The consumer that votes on every key tile, with Q K^T one tile ahead. The algorithm is BLASST (arXiv 2512.12087) on top of online softmax.
//
// Two buffers of scores take turns. While tile n is voted on and its exps are computed, Q K^T of tile n + 1 runs into the other buffer; P of
// tile n is packed into registers of the buffer that it came from, so Q K^T of n + 2 is issued when P V of n is over (or at once, where n
// is skipped).
#pragma once

#include "consumer.cuh"
#include "load.cuh"

constexpr int kWishers = kWarpgroup + 32;  // threads: the group, and the warp that loads its V

template <typename Element, int kHeadDim>
struct AheadConsumer : Consumer<Element, kHeadDim, Loop::kAhead> {
  using Base = Consumer<Element, kHeadDim, Loop::kAhead>;
  using Smem = typename Base::Smem;
  using Scores = typename Base::Scores;
  using Weights = typename Base::Weights;
  using Base::exp_base, Base::exp_sum, Base::group, Base::kHoldQuery, Base::lane, Base::out, Base::params, Base::row0, Base::row_votes, Base::skipped, Base::smem, Base::unit;

  struct Places {
    uint32_t issue, end;     // position of the next Q K^T, and that after the group's last tile
    uint32_t value_parity;
    bool key_there = false;  // K of the next Q K^T
  };

  Scores scores[2];
  float tile_max[2];      // of the tile voted on next, this thread's scores only
  float running_max[2];   // of the tiles kept; raw scores
  float cutoff[2];        // running_max + ln(lambda)
  int tile;               // voted on next
  bool rises;             // uniform over the warp: the tile raises some running maximum
  const float threshold;  // ln(lambda), in units of raw scores

  __device__ __forceinline__ AheadConsumer(const Params& params, Smem& smem, const Block& block, int group)
      : Base(params, smem, block, group), threshold(smem.log2_lambda / params.scale_log2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      running_max[i] = kNoMax;  // not -inf: a row without a key in the tile does not object to it
    }
  }

  // The skip decision of one (64-row group, 128-key tile) pair, uniform over the warpgroup:
  //     skip  <=>  for all rows i:  tile_max[i] - max(m[i], tile_max[i]) < ln(lambda)   or   tile_max[i] = -inf
  // Since ln(lambda) <= 0 and the comparison is strict, a row agrees iff tile_max[i] - m[i] < ln(lambda): a tile that raises or equals a
  // maximum stays. That in turn holds iff it holds for each lane's own part of the row, so no shuffle and no exp is needed. A NaN makes
  // it false, so its row objects. Rows past the end have no vote.
  __device__ __forceinline__ bool skip_vote() const {
    const bool agree = ((row_votes[0] == 0) | (tile_max[0] < cutoff[0])) & ((row_votes[1] == 0) | (tile_max[1] < cutoff[1]));
    return ptx::barrier_all(kVote + group, kWarpgroup, agree);
  }

  // V of the tile is to be loaded. A named barrier on which this group does not wait: with an mbarrier half of the tiles skipped takes 3 % longer. Not
  // again before V is there, so the other side has been there too.
  __device__ __forceinline__ void want_value() const {
    if (this->thread == 0) *const_cast<volatile int*>(&smem.wish[group].tile) = tile;
    ptx::barrier_arrive(kWish + group, kWishers);
  }
  // Here the group does wait: nothing else keeps it from asking for V of the next block before the other side has been at the barrier.
  __device__ __forceinline__ void want_no_more() const {
    if (this->thread == 0) *const_cast<volatile uint32_t*>(&smem.wish[group].blocks) = this->progress().blocks + 1;
    ptx::barrier_sync(kWish + group, kWishers);
  }

  __device__ __forceinline__ void release(uint32_t position) const {
    if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&smem.key_empty[position % Smem::kKeyStages]));
  }

  __device__ __forceinline__ uint32_t key_full(uint32_t position) const { return ptx::smem_address(&smem.key_full[position % Smem::kKeyStages]); }
  __device__ __forceinline__ typename Base::QkOperands next_operands(const Places& at) const { return this->uniform_operands(at.issue % Smem::kKeyStages); }
  __device__ __forceinline__ void test_key(Places& at) const {
    at.key_there = ptx::mbarrier_test(key_full(at.issue), at.issue / Smem::kKeyStages % 2);
  }

  // Past the group's last tile the product is of whatever is there, and nobody looks at it: a condition would serialise all products.
  template <int kBuffer>
  __device__ __forceinline__ void issue_qk(Places& at, const typename Base::QkOperands& operands) {
    if (!at.key_there && at.issue < at.end) ptx::mbarrier_wait(key_full(at.issue), at.issue / Smem::kKeyStages % 2);
    this->qk_gemm(scores[kBuffer], operands);
    ++at.issue;
  }

  // ---- the scores of the tile at `position` are there; its K is handed back ----
  template <int kBuffer>
  __device__ __forceinline__ void take(uint32_t position, int found) {
    ptx::pin(scores[kBuffer]);
    tile = this->tile_of(found);
    if (ptx::agreed(found < 0)) this->mask_scores(scores[kBuffer], found, position % Smem::kKeyStages);
    ptx::pin(scores[kBuffer]);  // or a dozen are moved elsewhere in each step
    release(position);
  }

  // As integers, floats are in order if the largest is not negative, and VIMNMX3 takes as long for three as FMNMX for two. Where all of a
  // thread's are negative the result is too small; that matters only if a negative maximum can object.
  template <int kBuffer>
  __device__ __forceinline__ void look() {
    int wrong = 0;  // negative: that
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int largest = this->template own_extreme<true>(scores[kBuffer], i);
      tile_max[i] = __int_as_float(largest);
      cutoff[i] = running_max[i] + threshold;
      wrong |= largest & (__float_as_int(cutoff[i]) - 1);  // 0 too is a cutoff that -0 reaches
    }
    rises = ptx::any_greater_or_negative(tile_max, running_max, wrong);  // true for the first tile, and for a NaN
  }
  template <int kBuffer>
  __device__ __forceinline__ void look_again() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float largest_negative = __int_as_float(this->template own_extreme<false>(scores[kBuffer], i));
      if (__float_as_int(tile_max[i]) < 0) tile_max[i] = largest_negative;
    }
    rises = ptx::any_greater_or_negative(tile_max, running_max, 0);
  }

  // ---- the new maxima; where one exceeds its base, new bases, and what was summed so far is multiplied to them ----
  __device__ __forceinline__ void raise_max() {
    bool below = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      running_max[i] = ptx::max_nan(running_max[i], this->row_max(tile_max[i]));
      below &= running_max[i] * unit - exp_base[i] <= kBaseSlack;
    }
    if (!__any_sync(~0u, !below)) return;
    float rescale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float old_base = exp_base[i];
      exp_base[i] = ptx::max_nan(old_base, running_max[i] * unit);  // a row without a key so far keeps its own: kNoMax * unit may be lower
      if (isnan(exp_base[i])) running_max[i] = kNoMax;  // as if it had none: it objects wherever it has a key, and only there
      rescale[i] = ptx::exp2_approx(old_base - exp_base[i]);
      exp_sum[i] *= rescale[i];
    }
    this->rescale_out(rescale);
  }

  template <int kBuffer>
  __device__ __forceinline__ void softmax_step(Weights& weights) {
    if (rises) raise_max();
    float sum[2];
    this->exponentiate(scores[kBuffer], weights, sum);
    exp_sum[0] += sum[0];
    exp_sum[1] += sum[1];
    ptx::pin(exp_sum);  // or the sums are left for later, and the exps with them
  }

  // The products are awaited behind the branch, or that would be moved to before the exps. `late` is 0, and known when most exps are done: V is
  // not there earlier, and the second test costs 60 cycles.
  __device__ __forceinline__ void await_qk_and_value(Places& at, uint32_t late) const {
    const uint32_t value_full = ptx::smem_address(&smem.value_full[group]);
    if (!__all_sync(~0u, ptx::mbarrier_test(value_full, at.value_parity + late))) ptx::mbarrier_wait(value_full, at.value_parity);
    ptx::wgmma_wait<0>();
    at.value_parity ^= 1;
  }

  __device__ __forceinline__ void await_pv() {
    ptx::wgmma_wait<0>();
    ptx::pin(out);
  }

  // ---- tile n is kept: its P V beside the maxima of n + 1, then Q K^T of n + 2 ----
  template <int kBuffer>
  __device__ __forceinline__ void keep(Places& at) {
    want_value();
    Weights weights;
    softmax_step<kBuffer>(weights);
    const uint32_t value = ptx::uniform(this->value_operand(group));
    const int found = this->read_tile((at.issue - 1) % Smem::kKeyStages);
    await_qk_and_value(at, weights[20] >> 31);
    ptx::pin(scores[kBuffer ^ 1]);
    this->pv_gemm(weights, value);
    take<kBuffer ^ 1>(at.issue - 1, found);
    test_key(at);
    look<kBuffer ^ 1>();
    if (rises) look_again<kBuffer ^ 1>();
    const auto operands = next_operands(at);
    await_pv();  // behind the branch, as above
    issue_qk<kBuffer>(at, operands);
  }

  // ---- tile n is skipped: Q K^T of n + 2 beside the maxima of n + 1 ----
  template <int kBuffer>
  __device__ __forceinline__ void skip(Places& at) {
    ++skipped;
    const int found = this->read_tile((at.issue - 1) % Smem::kKeyStages);
    issue_qk<kBuffer>(at, next_operands(at));
    ptx::wgmma_wait<1>();
    take<kBuffer ^ 1>(at.issue - 2, found);
    look<kBuffer ^ 1>();
    if (rises) look_again<kBuffer ^ 1>();
  }

  // ---- the vote on tile n and what follows from it; returns whether n + 1 is the last ----
  template <int kBuffer>
  __device__ __forceinline__ bool turn(Places& at) {
    test_key(at);
    const bool last = at.issue == at.end;
    const bool skips = skip_vote();
    if (skips) {
      skip<kBuffer>(at);
    } else {
      keep<kBuffer>(at);
    }
    return last;
  }

  // ---- the last tile ----
  template <int kBuffer>
  __device__ __forceinline__ void finish(Places& at) {
    if (skip_vote()) {
      ++skipped;
      ptx::wgmma_wait<0>();
    } else {
      want_value();
      Weights weights;
      softmax_step<kBuffer>(weights);
      await_qk_and_value(at, weights[20] >> 31);
      this->pv_gemm(weights, ptx::uniform(this->value_operand(group)));
      await_pv();
    }
  }

  // ---- a tile of the other group alone ----
  __device__ __forceinline__ void pass_tile(uint32_t position) const {
    ptx::mbarrier_wait(key_full(position), position / Smem::kKeyStages % 2);
    release(position);
  }

  __device__ __forceinline__ void run(const Stream& stream) {
    auto& progress = this->progress();
    const bool has_rows = row0 < params.q_len;
    const uint32_t stream_begin = progress.tiles, stream_end = stream_begin + stream.length;
    const uint32_t begin = stream_begin + stream.begin(group), end = has_rows ? begin + stream.tiles : begin;
    __syncwarp();
    progress.tiles = stream_end;
    if (this->thread == 0) progress.visited = stream.tiles, progress.empty = 0;
    for (uint32_t position = stream_begin; position < begin; ++position) pass_tile(position);
    this->await_query();
    if (ptx::agreed(begin < end)) {
      Places at{begin, end, progress.value_parities};
      if constexpr (kHoldQuery) {
        this->load_query();
        this->release_query();
      }
      issue_qk<0>(at, next_operands(at));
      issue_qk<1>(at, next_operands(at));
      const int found = this->read_tile(begin % Smem::kKeyStages);
      ptx::wgmma_wait<1>();
      take<0>(begin, found);
      look<0>();
      look_again<0>();
      if (at.issue > at.end) {  // one tile
        finish<0>(at);
      } else {
        while (true) {
          if (turn<0>(at)) {
            finish<1>(at);
            break;
          }
          if (turn<1>(at)) {
            finish<0>(at);
            break;
          }
        }
      }
      if constexpr (!kHoldQuery) this->release_query();  // inside `finish`, beside P V, it costs registers that serialise all products
      progress.value_parities = at.value_parity;
    } else {
      this->release_query();
    }
    for (uint32_t position = end, last = progress.tiles; position < last; ++position) pass_tile(position);
    want_no_more();
    this->store_output();
  }
};

// One warp for each group: loads V of the tiles that it wants. P V of the tile before is over by then.
template <typename Smem>
__device__ __forceinline__ void load_wanted_values(const Params& params, Smem& smem, int group) {
  uint32_t blocks = 0;
  for (; receive_block(smem, blocks); ++blocks) {
    const Block block(smem.work[blocks % 2]);
    while (true) {
      ptx::barrier_sync(kWish + group, kWishers);
      const auto [tile, done] = ptx::load_pair(&smem.wish[group]);
      if (done != blocks) break;
      if (ptx::elect()) load_tile(smem.value[group], params.value_maps, smem.value_full[group], tile, block);
      __syncwarp();
    }
    release_block(smem, blocks);
  }
}
