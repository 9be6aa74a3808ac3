// The consumer of the masked kernel: as in ahead.cuh, but Q K^T of a tile runs beside P V of the tile before, and V of every tile is loaded. It has
// too few registers for two buffers of scores.
#pragma once

#include "consumer.cuh"
#include "tally.cuh"

// A measurement is lambda = 0: only what is masked for all rows is passed over.
template <typename Element, int kHeadDim, bool kMeasures>
struct MaskedConsumer : Consumer<Element, kHeadDim, Loop::kMasked> {
  using Base = Consumer<Element, kHeadDim, Loop::kMasked>;
  using Smem = typename Base::Smem;
  using Base::exp_base, Base::exp_sum, Base::group, Base::lane, Base::out, Base::params, Base::row0, Base::row_votes,
      Base::skipped, Base::smem, Base::thread, Base::visited;

  // Where a group is in the stream: the buffers of this tile's K and V, and of the V that is due next.
  struct Places {
    RingPlace<Smem::kKeyStages> key, next_key;
    int tile, next_tile;
    RingPlace<Smem::kValueStages> value, due;
  };

  typename Base::Scores scores;
  typename Base::Weights weights;
  std::conditional_t<kMeasures, Tally<Smem>, NoTally> tally;
  bool take_turns;
  const int batch;
  const float log2_threshold;
  float running_max[2] = {-kInfinity, -kInfinity};  // of the tiles kept; log2 units
  bool rescales = false;                            // uniform over the warp: some base rose in this tile

  __device__ __forceinline__ MaskedConsumer(const Params& params, Smem& smem, const Block& block, int group, float log2_threshold)
      : Base(params, smem, block, group), tally(params, smem, group == 0 && row0 + kGroupRows >= params.q_len), batch(block.batch), log2_threshold(log2_threshold) {}

  // ---- this tile's key mask, one key a thread, to shared memory ----
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

  // The decision as in ahead.cuh; masked query rows have no vote either.
  __device__ __forceinline__ bool skip_vote(const float (&tile_max)[2]) const {
    bool agree = true;  // `|` and `&`: no branch may split the warp here
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      agree &= !row_votes[i] | (tile_max[i] == -kInfinity) | (tile_max[i] - running_max[i] < log2_threshold);
    }
    return ptx::barrier_all(kVote + group, kWarpgroup, agree);
  }

  // ---- the new maxima, and the base that the exps of this tile are relative to; returns what everything before is to be multiplied with ----
  __device__ __forceinline__ void raise_max(const float (&tile_max)[2], float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      running_max[i] = ptx::max_nan(running_max[i], this->row_max(tile_max[i]));
      const float old_base = exp_base[i];
      exp_base[i] = running_max[i];  // no slack, to save registers
      rescale[i] = ptx::exp2_approx(old_base - this->finite_base(i));
    }
    rescales = __any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f);
  }

  __device__ __forceinline__ void softmax_step(const float (&rescale)[2]) {
    float sum[2];
    this->exponentiate(scores, weights, sum);
#pragma unroll
    for (int i = 0; i < 2; ++i) exp_sum[i] = fmaf(exp_sum[i], rescale[i], sum[i]);
    if (rescales) this->rescale_out(rescale);
  }

  __device__ __forceinline__ void release(uint64_t& empty) const {
    if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&empty));
  }

  // One warpgroup issues its products while the other does its softmax.
  __device__ __forceinline__ void wait_for_turn() const {
    if (take_turns) ptx::barrier_sync(kTurn + group, kGroups * kWarpgroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (take_turns) ptx::barrier_arrive(kTurn + (group ^ 1), kGroups * kWarpgroup);
  }

  __device__ __forceinline__ void issue_due_pv(const Places& at) {
    ptx::mbarrier_wait(ptx::smem_address(&smem.value_full[at.due.stage]), at.due.parity());
    this->pv_gemm(weights, this->value_operand(at.due.stage));
  }
  __device__ __forceinline__ void await_due_pv(const Places& at) {
    ptx::wgmma_wait<0>();
    ptx::pin(out);
    release(smem.value_empty[at.due.stage]);
  }

  // ---- one key tile; returns whether it was kept, that is whether P V of it is due in the next step ----
  // kPending: P V of the step before is due, and runs beside this step's Q K^T and its vote. `owes_value`: V of the tile
  // before was skipped; it is handed back now that this tile's K shows that the producer is past it.
  template <bool kPending>
  __device__ __forceinline__ bool step(Places& at, int tiles, bool owes_value) {
    const int tile = at.tile;
    stage_key_bias(tile);
    ptx::mbarrier_wait(ptx::smem_address(&smem.key_full[at.key.stage]), at.key.parity());
    if constexpr (!kPending) {
      if (owes_value) release(smem.value_empty[at.due.stage]);
    }
    wait_for_turn();
    this->qk_gemm(scores, at.key.stage);
    if constexpr (kPending) issue_due_pv(at);
    pass_turn();
    // The next step's place, while the products run: forty dependent instructions that would otherwise delay them (200 cycles, measured).
    at.next_key = at.key;
    at.next_key.advance();
    at.next_tile = at.tile + 1 == tiles ? 0 : at.tile + 1;
    asm volatile("" : "+r"(at.next_key.stage), "+r"(at.next_key.parities), "+r"(at.next_tile));
    ptx::wgmma_wait<kPending ? 1 : 0>();
    ptx::pin(scores);
    release(smem.key_empty[at.key.stage]);
    if constexpr (kPending) await_due_pv(at);  // here, since masking needs its registers

    this->mask_scores(scores, tile, this->is_cut(tile));
    float tile_max[2], rescale[2];
    this->own_max(scores, tile_max);
    ++visited;
    const bool keep = !skip_vote(tile_max);
    if (keep) raise_max(tile_max, rescale);
    if constexpr (kMeasures) tally.add(skip_distance(tile_max, running_max, row_votes, 1.f));
    if (keep) {
      softmax_step(rescale);
    } else {
      const bool any = (row_votes[0] && tile_max[0] != -kInfinity) || (row_votes[1] && tile_max[1] != -kInfinity);
      const bool masked = !ptx::barrier_any(kVote + group, kWarpgroup, any);
      masked ? --visited : ++skipped;
    }
    return keep;
  }

  // ---- a tile of the other group alone: hand its buffers on ----
  __device__ __forceinline__ void pass_tile(const Places& at, bool owes_value) {
    ptx::mbarrier_wait(ptx::smem_address(&smem.key_full[at.key.stage]), at.key.parity());
    release(smem.key_empty[at.key.stage]);
    if (owes_value) release(smem.value_empty[at.due.stage]);
  }

  __device__ __forceinline__ void run(const Stream& stream) {
    const bool has_rows = row0 < params.q_len;
    const int begin = stream.begin(group), end = has_rows ? begin + stream.tiles : begin;
    take_turns = stream.offset1 == 0 && row0 - group * kGroupRows + kGroupRows < params.q_len && stream.tiles > 0;
    this->await_query();
    if (take_turns && group == 1) ptx::barrier_arrive(kTurn + 0, kGroups * kWarpgroup);

    Places at;
    bool pending = false, owes_value = false;  // V of the tile before: P V of it is due; skipped, and not handed back yet
    const auto advance_value = [&] {
      at.due = at.value;
      at.value.advance();
      owes_value = !pending;
    };
    int position = 0;
    for (; position < begin; ++position, at.key.advance(), advance_value()) pass_tile(at, owes_value);
    at.tile = stream.tile(begin);
    for (; position < end; ++position, at.key = at.next_key, at.tile = at.next_tile, advance_value()) {
      if (pending) {
        pending = step<true>(at, stream.tiles, owes_value);
      } else {
        pending = step<false>(at, stream.tiles, owes_value);
      }
    }
    if (pending) {
      issue_due_pv(at);
      await_due_pv(at);
      pending = owes_value = false;
    }
    for (; position < stream.length; ++position, at.key.advance(), advance_value()) pass_tile(at, owes_value);
    if (take_turns && group == 0) ptx::barrier_sync(kTurn + 0, kGroups * kWarpgroup);  // takes the turn that nobody waits for
    this->template store_output<kMeasures>();
    if constexpr (kMeasures) {
      if (has_rows) tally.store(params, this->block());
    }
  }
};
