// The kernel: one CTA takes 128 query rows of one head. A producer thread streams key tiles in, two warpgroups consume them.
#pragma once

#include "plan.cuh"
#include "ptx.cuh"
#include "stream.cuh"

// A 128-key tile of K or V, D / 64 panels; zeros past the end of the keys. `sharers` = 2: this CTA loads one half for both CTAs
// of the cluster, which halves what the L2 has to deliver; the other half comes from the other CTA.
template <typename Element, int kPanels>
__device__ __forceinline__ void load_tile(Element (&target)[kPanels][kTileKeys][kPanel], const CUtensorMap* map, uint64_t& full, int tile, int kv_head, int batch, int sharers = 1) {
  const uint32_t barrier = ptx::smem_address(&full);
  ptx::mbarrier_arrive_expect_bytes(barrier, sizeof(target));
  const auto copy = [&](int half, auto load, auto... mask) {
    const int panel = half % kPanels, key = half / kPanels * copy_keys(kPanels);
    load(ptx::smem_address(target[panel][key]), map, barrier, panel * kPanel, tile * kTileKeys + key, kv_head, batch, mask...);
  };
  if (sharers == 1) {
    copy(0, ptx::tma_load);
    copy(1, ptx::tma_load);
  } else {
    copy(ptx::cluster_rank(), ptx::tma_load_multicast, uint16_t{3});
  }
}

#include "ahead.cuh"
#include "dense.cuh"
#include "masked.cuh"

// One thread: Q of both groups once, then K of every tile, and V where the groups share it.
template <typename Smem>
__device__ __forceinline__ void load_tiles(const Params& params, Smem& smem, const Stream& stream, int batch, int head, int kv_head, int row0, int sharers) {
  constexpr bool kDense = Smem::kLoop == Loop::kDense, kMasked = Smem::kLoop == Loop::kMasked;
  for (int group = 0; group < kGroups && row0 + group * kGroupRows < params.q_len; ++group) {
    const uint32_t full = ptx::smem_address(&smem.query_full[group]);
    ptx::mbarrier_arrive_expect_bytes(full, sizeof(typename Smem::Query));
    for (int panel = 0; panel < Smem::kPanels; ++panel) {
      ptx::tma_load(ptx::smem_address(smem.query(group)[panel]), &params.query_map, full, panel * kPanel, row0 + group * kGroupRows, head, batch);
    }
  }
  RingPlace<Smem::kKeyStages> key_at;
  RingPlace<Smem::kValueStages> value_at;
  // Dense: V of a tile after K of the next, since it is needed one step later. Masked: before it, since a group that skips hands V back when
  // it sees the next K, and must not be ahead of this thread.
  constexpr int kLag = kDense ? 1 : 0;
  for (int position = 0; position < stream.length + kLag; ++position) {
    if (position < stream.length) {
      ptx::mbarrier_wait(ptx::smem_address(&smem.key_empty[key_at.stage]), key_at.parity ^ 1);
      load_tile(smem.key[key_at.stage], &params.key_map, smem.key_full[key_at.stage], stream.tile(position), kv_head, batch, sharers);
      key_at.advance();
    }
    if ((kDense || kMasked) && position >= kLag) {
      if (kDense && position == kLag) ptx::mbarrier_wait(ptx::smem_address(&smem.query_free), 0);  // Q came through two of these buffers
      ptx::mbarrier_wait(ptx::smem_address(&smem.value_empty[value_at.stage]), value_at.parity ^ 1);
      if (kMasked) ptx::mbarrier_wait(ptx::smem_address(&smem.value_full[value_at.stage]), value_at.parity ^ 1);  // nobody awaits a skipped V
      load_tile(smem.value[value_at.stage], &params.value_map, smem.value_full[value_at.stage], stream.tile(position - kLag), kv_head, batch, sharers);
      value_at.advance();
    }
  }
  if constexpr (kMasked) {  // V of skipped tiles is awaited by nobody else, and must not land after the CTA's end
    for (int s = 0; s < Smem::kValueStages; ++s, value_at.advance()) ptx::mbarrier_wait(ptx::smem_address(&smem.value_full[value_at.stage]), value_at.parity ^ 1);
  }
}

// The producer warpgroup.
template <typename Smem>
__device__ __forceinline__ void produce(const Params& params, Smem& smem, const Stream& stream, int batch, int head, int row0, int sharers) {
  const int kv_head = head / params.heads_per_kv_head, warp = threadIdx.x / 32, group = warp - 1;
  if (threadIdx.x == 0) load_tiles(params, smem, stream, batch, head, kv_head, row0, sharers);
  if constexpr (Smem::kLoop == Loop::kAhead) {
    if (warp > 0 && group < kGroups && row0 + group * kGroupRows < params.q_len) load_kept_values(params, smem, stream, batch, kv_head, group);
  }
}

// A consumer warpgroup.
template <typename Element, int kHeadDim, bool kMeasures, typename Smem>
__device__ __forceinline__ void consume(const Params& params, Smem& smem, const Stream& stream, int batch, int head, int row0, float lambda) {
  const int group = threadIdx.x / kWarpgroup - 1, group_row0 = row0 + group * kGroupRows;
  if constexpr (Smem::kLoop == Loop::kDense) {
    DenseConsumer<Element, kHeadDim, kMeasures>(params, smem, batch, head, group, group_row0).run(stream);
  } else if constexpr (Smem::kLoop == Loop::kAhead) {
    AheadConsumer<Element, kHeadDim>(params, smem, batch, head, group, group_row0, log2f(lambda)).run(stream);
  } else {
    const bool take_turns = stream.offset1 == 0 && row0 + kGroupRows < params.q_len && stream.tiles > 0;
    MaskedConsumer<Element, kHeadDim, kMeasures>(params, smem, batch, head, group, group_row0, take_turns, log2f(lambda)).run(stream);
  }
}

template <typename Smem>
__device__ __forceinline__ void init_barriers(Smem& smem, int sharers) {
  for (int g = 0; g < kGroups; ++g) ptx::mbarrier_init(ptx::smem_address(&smem.query_full[g]), 1);
  ptx::mbarrier_init(ptx::smem_address(&smem.query_free), sharers * kConsumerWarps);
  for (int s = 0; s < Smem::kKeyStages; ++s) {
    ptx::mbarrier_init(ptx::smem_address(&smem.key_full[s]), 1);
    ptx::mbarrier_init(ptx::smem_address(&smem.key_empty[s]), sharers * kConsumerWarps);
  }
  for (int s = 0; s < Smem::kValueStages; ++s) {
    ptx::mbarrier_init(ptx::smem_address(&smem.value_full[s]), 1);
    ptx::mbarrier_init(ptx::smem_address(&smem.value_empty[s]), sharers * kConsumerWarps);
  }
  ptx::mbarrier_init_fence();
}

template <typename Element, int kHeadDim, bool kMasked, bool kMeasures>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];

  const int block = blockIdx.x % params.q_blocks;
  const int batch_head = blockIdx.x / params.q_blocks;
  const int batch = batch_head / params.heads, head = batch_head % params.heads;
  const int row0 = (params.is_causal ? params.q_blocks - 1 - block : block) * kBlockRows;  // causal: the longest first
  const float lambda = kMeasures ? 0.f : clamp_threshold(params.threshold[batch * params.threshold_stride]);
  const bool dense = !kMasked && lambda == 0.f;
  // Without votes two neighbouring CTAs share what they load, if the launch paired them. The order then means nothing but rounding; ascending
  // gives both the same. A measurement has the order of the votes that it foresees.
  const int sharers = dense ? params.cluster : 1;
  const Stream stream(params, row0, params.own_first && (kMeasures || !dense));

  const auto with_smem = [&](auto run) {
    if constexpr (kMasked) {
      run(*reinterpret_cast<SharedMemory<Element, kHeadDim, Loop::kMasked>*>(dynamic_smem));
    } else if constexpr (kMeasures) {
      run(*reinterpret_cast<SharedMemory<Element, kHeadDim, Loop::kDense>*>(dynamic_smem));
    } else if (dense) {
      run(*reinterpret_cast<SharedMemory<Element, kHeadDim, Loop::kDense>*>(dynamic_smem));
    } else {
      run(*reinterpret_cast<SharedMemory<Element, kHeadDim, Loop::kAhead>*>(dynamic_smem));
    }
  };
  if (threadIdx.x == 0) with_smem([&](auto& smem) { init_barriers(smem, sharers); });
  ptx::cluster_sync();

  if (threadIdx.x < kWarpgroup) {
    ptx::registers_lower<kProducerRegisters>();
    with_smem([&](auto& smem) { produce(params, smem, stream, batch, head, row0, sharers); });
  } else {
    ptx::registers_raise<kConsumerRegisters>();
    with_smem([&](auto& smem) { consume<Element, kHeadDim, kMeasures>(params, smem, stream, batch, head, row0, lambda); });
  }
  if (sharers > 1) ptx::cluster_sync();  // until then the other CTA may arrive at barriers of this one
}
