// The kernel: one CTA takes 128 query rows of one head. A producer thread streams key tiles in, two warpgroups consume them.
#pragma once

#include "blocks.cuh"
#include "plan.cuh"
#include "ptx.cuh"
#include "stream.cuh"

// A 128-key tile of K or V, D / 64 panels; zeros past the end of the keys. `sharers` = 2: this CTA loads one half for both CTAs
// of the cluster, which halves what the L2 has to deliver; the other half comes from the other CTA.
template <typename Element, int kPanels>
__device__ __forceinline__ void load_tile(Element (&target)[kPanels][kTileKeys][kPanel], const CUtensorMap* map, uint64_t& full, int tile, const Block& block, int sharers = 1) {
  const uint32_t barrier = ptx::smem_address(&full);
  ptx::mbarrier_arrive_expect_bytes(barrier, sizeof(target));
  const auto copy = [&](int half, auto load, auto... mask) {
    const int panel = half % kPanels, key = half / kPanels * copy_keys(kPanels);
    load(ptx::smem_address(target[panel][key]), map, barrier, panel * kPanel, tile * kTileKeys + key, block.kv_head, block.batch, mask...);
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

// Where a loop takes the buffers from the first one on in every block, the compiler knows the stage to be the same in all threads, and wgmma
// takes its descriptors from registers of the warp.
template <typename Smem, int kStages>
__device__ __forceinline__ void begin_block(RingPlace<kStages>& at) {
  if constexpr (Smem::kLoop == Loop::kDense) at.stage = 0;
}

// Q of both groups; past the last row too, as zeros: the barriers stay in step.
template <typename Smem>
__device__ __forceinline__ void load_query(const Params& params, Smem& smem, const Block& block, uint32_t turn) {
#pragma unroll 1
  for (int group = 0; group < kGroups; ++group) {
    const uint32_t full = ptx::smem_address(&smem.query_full[group]);
    ptx::mbarrier_wait(ptx::smem_address(&smem.query_empty[group]), turn ^ 1);
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive_expect_bytes(full, sizeof(typename Smem::Query));
      for (int panel = 0; panel < Smem::kPanels; ++panel) {
        ptx::tma_load(ptx::smem_address(smem.query(group)[panel]), &params.query_map, full, panel * kPanel, block.row0 + group * kGroupRows, block.head, block.batch);
      }
    }
    __syncwarp();
  }
}

template <typename Smem>
__device__ __forceinline__ void load_key(const Params& params, Smem& smem, RingPlace<Smem::kKeyStages>& at, int tile, const Block& block, int sharers) {
  ptx::mbarrier_wait(ptx::smem_address(&smem.key_empty[at.stage]), at.parity() ^ 1);
  if (threadIdx.x % 32 == 0) load_tile(smem.key[at.stage], &params.key_map, smem.key_full[at.stage], tile, block, sharers);
  __syncwarp();
  at.advance();
}

template <typename Smem>
__device__ __forceinline__ void load_value(const Params& params, Smem& smem, RingPlace<Smem::kValueStages>& at, int tile, const Block& block, int sharers) {
  ptx::mbarrier_wait(ptx::smem_address(&smem.value_empty[at.stage]), at.parity() ^ 1);
  if (Smem::kLoop == Loop::kMasked) ptx::mbarrier_wait(ptx::smem_address(&smem.value_full[at.stage]), at.parity() ^ 1);  // nobody awaits a skipped V
  if (threadIdx.x % 32 == 0) load_tile(smem.value[at.stage], &params.value_map, smem.value_full[at.stage], tile, block, sharers);
  __syncwarp();
  at.advance();
}

// One warp: K of every tile, and Q. K first: the buffer of Q is free last. Masked: V too, before the next K, since a group that skips hands V
// back when it sees the next K, and must not be ahead of this warp.
template <typename Smem>
__device__ __forceinline__ void load_blocks(const Params& params, Smem& smem, bool own_first, int sharers) {
  constexpr bool kMasked = Smem::kLoop == Loop::kMasked;
  BlockSource<Smem> blocks{params, smem, sharers};
  RingPlace<Smem::kKeyStages> key_at;
  RingPlace<Smem::kValueStages> value_at;
  for (int index; (index = blocks.next()) >= 0;) {
    const Block block(params, index);
    const Stream stream(params, block.row0, own_first, Smem::kLoop == Loop::kAhead);
    const int early = kMasked ? 0 : min(Smem::kKeyStages, stream.length);
    int tile = stream.start;
    begin_block<Smem>(key_at);
#pragma unroll 1
    for (int position = 0; position <= stream.length; ++position) {
      if (position == early) load_query(params, smem, block, (blocks.taken - 1) % 2);
      if (position == stream.length) break;
      load_key(params, smem, key_at, tile, block, sharers);
      if constexpr (kMasked) load_value(params, smem, value_at, tile, block, sharers);
      tile = tile + 1 == stream.tiles ? 0 : tile + 1;
    }
  }
  if constexpr (kMasked) {  // V of skipped tiles is awaited by nobody else, and must not land after the CTA's end
    for (int s = 0; s < Smem::kValueStages; ++s, value_at.advance()) ptx::mbarrier_wait(ptx::smem_address(&smem.value_full[value_at.stage]), value_at.parity() ^ 1);
  }
}

// One warp of the dense loop.
template <typename Smem>
__device__ __forceinline__ void load_values(const Params& params, Smem& smem, bool own_first, int sharers) {
  RingPlace<Smem::kValueStages> value_at;
  uint32_t blocks = 0;
  for (int index; (index = receive_block(smem, blocks)) >= 0; ++blocks) {
    const Block block(params, index);
    const Stream stream(params, block.row0, own_first, Smem::kLoop == Loop::kAhead);
    begin_block<Smem>(value_at);
    if (Smem::kQueryInRing) ptx::mbarrier_wait(ptx::smem_address(&smem.query_free), blocks % 2);
    int tile = stream.start;
#pragma unroll 1
    for (int n = 0; n < stream.tiles; ++n, tile = tile + 1 == stream.tiles ? 0 : tile + 1) {
      load_value(params, smem, value_at, tile, block, sharers);
    }
    release_block(smem, blocks);
  }
}

// The producer warpgroup.
template <typename Smem>
__device__ __forceinline__ void produce(const Params& params, Smem& smem, bool own_first, int sharers) {
  const int warp = threadIdx.x / 32;
  if (warp == 0) load_blocks(params, smem, own_first, sharers);
  if constexpr (Smem::kLoop == Loop::kDense) {
    if (warp == 1) load_values(params, smem, own_first, sharers);
  } else if constexpr (Smem::kLoop == Loop::kAhead) {
    if (warp == 1 || warp == 2) load_kept_values(params, smem, own_first, warp - 1);
  }
}

// A consumer warpgroup.
template <typename Element, int kHeadDim, bool kMeasures, typename Smem>
__device__ __forceinline__ void consume(const Params& params, Smem& smem, bool own_first, float log2_lambda) {
  using Plain = std::conditional_t<Smem::kLoop == Loop::kDense, DenseConsumer<Element, kHeadDim, kMeasures>, AheadConsumer<Element, kHeadDim>>;
  using Consumer = std::conditional_t<Smem::kLoop == Loop::kMasked, MaskedConsumer<Element, kHeadDim, kMeasures>, Plain>;
  const int group = threadIdx.x / kWarpgroup - 1;
  auto& progress = smem.progress[threadIdx.x / 32 - kWarpgroup / 32];
  progress = {};
  for (int index; (index = receive_block(smem, progress.blocks)) >= 0;) {
    const Block block(params, index);
    const Stream stream(params, block.row0, own_first, Smem::kLoop == Loop::kAhead);
    Consumer(params, smem, block, group, log2_lambda).run(stream);
    const uint32_t done = progress.blocks;
    release_block(smem, done);
    progress.blocks = done + 1;
    __syncwarp();
  }
}

template <typename Smem>
__device__ __forceinline__ void init_barriers(Smem& smem, int sharers) {
  const auto init = [](uint64_t& barrier, int arrivals) { ptx::mbarrier_init(ptx::smem_address(&barrier), arrivals); };
  for (int g = 0; g < kGroups; ++g) {
    init(smem.query_full[g], 1);
    init(smem.query_empty[g], kConsumerWarps / kGroups);
  }
  init(smem.query_free, sharers * kConsumerWarps);
  for (int s = 0; s < Smem::kKeyStages; ++s) {
    init(smem.key_full[s], 1);
    init(smem.key_empty[s], sharers * kConsumerWarps);
  }
  for (int s = 0; s < Smem::kValueStages; ++s) {
    init(smem.value_full[s], 1);
    init(smem.value_empty[s], sharers * kConsumerWarps);
  }
  for (int s = 0; s < 2; ++s) {
    init(smem.block_full[s], 1);
    init(smem.block_empty[s], kConsumerWarps + Smem::kValueWarps);
    init(smem.peer_block_full[s], 1);
  }
  for (uint32_t& slot : smem.nearest_of_first) slot = kNoTally;
  ptx::mbarrier_init_fence();
}

template <typename Element, int kHeadDim, bool kMasked, bool kMeasures>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];

  // Where the CTAs share blocks there is one lambda for all.
  const float lambda = kMeasures ? 0.f : clamp_threshold(params.threshold[Block(params, blockIdx.x).batch * params.threshold_stride]);
  const bool dense = !kMasked && lambda == 0.f;
  // Without votes two neighbouring CTAs share what they load, if the launch paired them. The order then means nothing but rounding; ascending
  // gives both the same. A measurement has the order of the votes that it foresees.
  const int sharers = dense ? params.cluster : 1;
  const bool own_first = params.own_first && (kMeasures || !dense);

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
  __syncwarp();
  ptx::cluster_sync();

  if (threadIdx.x < kWarpgroup) {
    ptx::registers_lower<kProducerRegisters>();
    with_smem([&](auto& smem) { produce(params, smem, own_first, sharers); });
  } else {
    ptx::registers_raise<kConsumerRegisters>();
    with_smem([&](auto& smem) { consume<Element, kHeadDim, kMeasures>(params, smem, own_first, log2f(lambda)); });
  }
  if (sharers > 1) ptx::cluster_sync();  // until then the other CTA may arrive at barriers of this one
}
