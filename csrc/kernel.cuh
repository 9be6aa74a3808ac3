// The kernel: a CTA takes blocks of 128 query rows of one head. The warps of the producer stream key tiles in, two warpgroups consume them.
#pragma once

#include "ahead.cuh"
#include "blocks.cuh"
#include "dense.cuh"
#include "load.cuh"
#include "mask.cuh"
#include "plan.cuh"
#include "ptx.cuh"
#include "stream.cuh"

// Q of both groups; past the last row too, as zeros: the barriers stay in step.
template <typename Smem>
__device__ __forceinline__ void load_query(const Params& params, Smem& smem, const Block& block, uint32_t turn) {
#pragma unroll 1
  for (int group = 0; group < kGroups; ++group) {
    const uint32_t full = ptx::smem_address(&smem.query_full[group]);
    ptx::mbarrier_wait(ptx::smem_address(&smem.query_empty[group]), turn ^ 1);
    if (threadIdx.x % 32 == 0) {
      ptx::mbarrier_arrive_expect_bytes(full, sizeof(typename Smem::Query));
      ptx::tma_load(ptx::smem_address(smem.query[group]), &params.query_map, full, block.row0 + group * kGroupRows, 0, block.head, block.batch);
    }
    __syncwarp();
  }
}

template <typename Smem>
__device__ __forceinline__ void load_key(const Params& params, Smem& smem, RingPlace<Smem::kKeyStages>& at, int tile, const Block& block) {
  ptx::mbarrier_wait(ptx::smem_address(&smem.key_empty[at.stage]), at.parity() ^ 1);
  if (threadIdx.x % 32 == 0) load_tile(smem.key[at.stage], params.key_maps, smem.key_full[at.stage], tile, block, sharers<Smem>(params));
  __syncwarp();
  at.advance();
}

// One warp: K of every tile, and Q. K first: the buffer of Q is free last.
template <typename Smem>
__device__ __forceinline__ void load_blocks(const Params& params, Smem& smem) {
  BlockSource<Smem> blocks{params, smem};
  RingPlace<Smem::kKeyStages> at;
  while (blocks.next()) {
    const Work& work = smem.work[(blocks.taken - 1) % 2];
    const Block block(work);
    const Stream stream(work);
    const int early = min(Smem::kKeyStages, stream.length);
    int tile = stream.first[0];
    if constexpr (Smem::kLoop == Loop::kDense) at.stage = 0;  // as its consumers; and see BlockSource::take
#pragma unroll 1
    for (int position = 0; position <= stream.length; ++position) {
      if (position == early) load_query(params, smem, block, (blocks.taken - 1) % 2);
      if (position == stream.length) break;
      load_key(params, smem, at, tile, block);
      tile = stream.keys.next(smem, tile);
    }
  }
}

// One warp: says what K of every tile is, with it. What it needs of the block it reads again for each: registers.
template <typename Smem>
__device__ __forceinline__ void describe_keys(const Params& params, Smem& smem) {
  RingPlace<Smem::kKeyStages> at;
  uint32_t blocks = 0;
  for (; receive_block(smem, blocks); ++blocks) {
    const Work& work = smem.work[blocks % 2];
    int tile = work.first[0];
    if constexpr (Smem::kLoop == Loop::kDense) at.stage = 0;
#pragma unroll 1
    for (int left = work.tiles + work.offset1; left > 0; --left) {
      const int end = (tile + 1) * kTileKeys;
      bool cut = end > params.kv_len || (params.is_causal && end > work.row0 + 1) || params.sign != 1.f;
      if (work.bits >= 0) {
        cut |= smem.tile_bits[work.bits + tile_words(params) + tile / 32] >> tile % 32 & 1;
      } else {
        cut |= params.mask != nullptr;
      }
      ptx::mbarrier_wait(ptx::smem_address(&smem.key_empty[at.stage]), at.parity() ^ 1);
      if (cut) {
        float bias[kLaneKeys];
        key_biases(params, work.batch, tile, bias);
        *reinterpret_cast<float4*>(&smem.key_bias[at.stage][kLaneKeys * (threadIdx.x % 32)]) = {bias[0], bias[1], bias[2], bias[3]};
        __syncwarp();
      }
      if (threadIdx.x % 32 == 0) {
        smem.key_tile[at.stage] = cut ? ~tile : tile;
        ptx::mbarrier_arrive(ptx::smem_address(&smem.key_full[at.stage]));
      }
      __syncwarp();
      at.advance();
      tile = KeyTiles{work.bits, work.end}.next(smem, tile);
    }
    release_block(smem, blocks);
  }
}

// One warp of the dense loop: V of every tile.
template <typename Smem>
__device__ __forceinline__ void load_values(const Params& params, Smem& smem) {
  RingPlace<Smem::kValueStages> at;
  uint32_t blocks = 0;
  for (; receive_block(smem, blocks); ++blocks) {
    const Work& work = smem.work[blocks % 2];
    const Block block(work);
    const Stream stream(work);
    int tile = stream.first[0];
    at.stage = 0;
#pragma unroll 1
    for (int position = 0; position < stream.length; ++position, tile = stream.keys.next(smem, tile), at.advance()) {
      ptx::mbarrier_wait(ptx::smem_address(&smem.value_empty[at.stage]), at.parity() ^ 1);
      if (threadIdx.x % 32 == 0) load_tile(smem.value[at.stage], params.value_maps, smem.value_full[at.stage], tile, block, sharers<Smem>(params));
      __syncwarp();
    }
    release_block(smem, blocks);
  }
}

// The producer warpgroup.
template <typename Smem>
__device__ __forceinline__ void produce(const Params& params, Smem& smem) {
  const int warp = threadIdx.x / 32;
  if (warp == 0) load_blocks(params, smem);
  if (warp == 3) describe_keys(params, smem);
  if constexpr (Smem::kLoop == Loop::kDense) {
    if (warp == 1) load_values(params, smem);
  } else {
    if (warp == 1 || warp == 2) load_wanted_values(params, smem, warp - 1);
  }
}

// A consumer warpgroup.
template <typename Element, int kHeadDim, bool kMeasures, typename Smem>
__device__ __forceinline__ void consume(const Params& params, Smem& smem) {
  using Consumer = std::conditional_t<Smem::kLoop == Loop::kDense, DenseConsumer<Element, kHeadDim, kMeasures>, AheadConsumer<Element, kHeadDim>>;
  const int group = threadIdx.x / kWarpgroup - 1;
  auto& progress = progress_of_warp(smem);
  progress = {};
  __syncwarp();
  while (receive_block(smem, progress.blocks)) {
    const Work& work = smem.work[progress.blocks % 2];
    const Block block(work);
    const Stream stream(work);
    Consumer(params, smem, block, group).run(stream);
    const uint32_t done = progress.blocks;
    release_block(smem, done);
    progress.blocks = done + 1;
    __syncwarp();
  }
}

template <typename Smem>
__device__ __forceinline__ void init_barriers(const Params& params, Smem& smem) {
  const int sharers = ::sharers<Smem>(params);
  const auto init = [](uint64_t& barrier, int arrivals) { ptx::mbarrier_init(ptx::smem_address(&barrier), arrivals); };
  for (int g = 0; g < kGroups; ++g) {
    init(smem.query_full[g], 1);
    init(smem.query_empty[g], kConsumerWarps / kGroups);
  }
  for (int s = 0; s < Smem::kKeyStages; ++s) {
    init(smem.key_full[s], 2);  // K, and what it is
    init(smem.key_empty[s], sharers * kConsumerWarps);
  }
  for (int s = 0; s < Smem::kValueStages; ++s) {
    init(smem.value_full[s], 1);
    init(smem.value_empty[s], sharers * kConsumerWarps);
  }
  for (int s = 0; s < 2; ++s) {
    init(smem.block_full[s], 1);
    init(smem.block_empty[s], Smem::kBlockReaders);
    init(smem.peer_block_full[s], 1);
  }
  for (uint32_t& slot : smem.nearest_of_first) slot = kNoTally;
  for (auto& wish : smem.wish) wish.blocks = 0;
  ptx::mbarrier_init_fence();
}

template <typename Element, int kHeadDim, bool kMeasures>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];

  // Where the CTAs share blocks there is one lambda for all.
  const int batch = Block(params, blockIdx.x).batch;
  const float lambda = kMeasures ? 0.f : clamp_threshold(params.threshold[batch * params.threshold_stride]);
  // V of an empty tile must not be read: a vote, which nothing but those passes. (A measurement does multiply it by zeros.)
  const bool dense = lambda == 0.f && !params.meets_empty_tiles;

  const auto with_smem = [&](auto run) {
    if constexpr (kMeasures) {
      run(*reinterpret_cast<SharedMemory<Element, kHeadDim, Loop::kDense>*>(dynamic_smem));
    } else if (dense) {
      run(*reinterpret_cast<SharedMemory<Element, kHeadDim, Loop::kDense>*>(dynamic_smem));
    } else {
      run(*reinterpret_cast<SharedMemory<Element, kHeadDim, Loop::kAhead>*>(dynamic_smem));
    }
  };
  with_smem([&](auto& smem) {
    if (threadIdx.x == 0) {
      init_barriers(params, smem);
      smem.log2_lambda = lambda == 0.f ? kNoMax : log2f(lambda);
    }
    if (params.marks_tiles) mark_tiles(params, smem, batch, params.shares_blocks ? params.mask_items : 1);
  });
  __syncwarp();
  ptx::cluster_sync();

  if (threadIdx.x < kWarpgroup) {
    ptx::registers_lower<kProducerRegisters>();
    with_smem([&](auto& smem) { produce(params, smem); });
  } else {
    ptx::registers_raise<kConsumerRegisters>();
    with_smem([&](auto& smem) { consume<Element, kHeadDim, kMeasures>(params, smem); });
  }
  if (params.cluster > 1) ptx::cluster_sync();  // until then the other CTA may arrive at barriers of this one
}
