// The kernel: one CTA takes 128 query rows of one head. A producer thread streams key tiles in, two warpgroups consume them.
#pragma once

#include "plan.cuh"
#include "ptx.cuh"

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

#include "consumer.cuh"

// One thread: Q of both groups once, then K of every tile, and V where the groups share it.
template <bool kMasked, typename Smem>
__device__ __forceinline__ void produce(const Params& params, Smem& smem, const Stream& stream, int batch, int head, int row0, bool dense, int sharers) {
  const int kv_head = head / params.heads_per_kv_head;
  for (int group = 0; group < kGroups && row0 + group * kGroupRows < params.q_len; ++group) {
    const uint32_t full = ptx::smem_address(&smem.query_full[group]);
    ptx::mbarrier_arrive_expect_bytes(full, sizeof(typename Smem::Query));
    for (int panel = 0; panel < Smem::kPanels; ++panel) {
      ptx::tma_load(ptx::smem_address(smem.query(group)[panel]), &params.query_map, full, panel * kPanel, row0 + group * kGroupRows, head, batch);
    }
  }
  RingPlace<Smem::kKeyStages> key_at;
  RingPlace<Smem::kValueStages> value_at;
  // Dense: V of a tile after K of the next, since it is needed one step later. With votes: before it, since a group that skips hands V
  // back when it sees the next K, and must not be ahead of this thread.
  const int lag = kMasked ? 0 : 1;
  for (int position = 0; position < stream.length + lag; ++position) {
    if (position < stream.length) {
      ptx::mbarrier_wait(ptx::smem_address(&smem.key_empty[key_at.stage]), key_at.parity ^ 1);
      load_tile(smem.key[key_at.stage], &params.key_map, smem.key_full[key_at.stage], stream.tile(position), kv_head, batch, sharers);
      key_at.advance();
    }
    if ((dense || kMasked) && position >= lag) {
      if (!kMasked && position == lag) ptx::mbarrier_wait(ptx::smem_address(&smem.query_free), 0);  // Q came through two of these buffers
      ptx::mbarrier_wait(ptx::smem_address(&smem.value_empty[value_at.stage]), value_at.parity ^ 1);
      if (kMasked) ptx::mbarrier_wait(ptx::smem_address(&smem.value_full[value_at.stage]), value_at.parity ^ 1);  // nobody awaits a skipped V
      load_tile(smem.value[value_at.stage], &params.value_map, smem.value_full[value_at.stage], stream.tile(position - lag), kv_head, batch, sharers);
      value_at.advance();
    }
  }
  if constexpr (kMasked) {  // V of skipped tiles is awaited by nobody else, and must not land after the CTA's end
    for (int s = 0; s < Smem::kValueStages; ++s, value_at.advance()) ptx::mbarrier_wait(ptx::smem_address(&smem.value_full[value_at.stage]), value_at.parity ^ 1);
  }
}

// NaN and negative act as 0, more than 1 as 1.
__device__ __forceinline__ float clamp_threshold(float lambda) { return lambda > 0.f ? fminf(lambda, 1.f) : 0.f; }

template <typename Element, int kHeadDim, bool kMasked>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ Params params) {
  using Smem = SharedMemory<Element, kHeadDim, kMasked>;
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  Smem& smem = *reinterpret_cast<Smem*>(dynamic_smem);

  const int block = blockIdx.x % params.q_blocks;
  const int batch_head = blockIdx.x / params.q_blocks;
  const int batch = batch_head / params.heads, head = batch_head % params.heads;
  const int row0 = (params.is_causal ? params.q_blocks - 1 - block : block) * kBlockRows;  // causal: the longest first
  const float lambda = clamp_threshold(params.threshold[batch * params.threshold_stride]);
  const bool dense = !kMasked && lambda == 0.f;
  // Without votes two neighbouring CTAs share what they load, if the launch paired them. The order then means nothing but rounding; ascending
  // gives both the same.
  const int sharers = dense ? params.cluster : 1;
  const Stream stream(params, row0, params.own_first && !dense);

  if (threadIdx.x == 0) {
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
  ptx::cluster_sync();

  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == 0) {
    ptx::registers_lower<kProducerRegisters>();
    if (threadIdx.x == 0) produce<kMasked>(params, smem, stream, batch, head, row0, dense, sharers);
  } else {
    ptx::registers_raise<kConsumerRegisters>();
    const int group = warpgroup - 1;
    const bool together = stream.offset1 == 0 && row0 + kGroupRows < params.q_len && stream.tiles > 0;
    Consumer<Element, kHeadDim, kMasked> consumer(params, smem, batch, head, group, row0 + group * kGroupRows, kMasked && together, log2f(lambda));
    if constexpr (kMasked) {
      consumer.template run<true>(stream);
    } else if (dense) {
      consumer.template run<false>(stream);
    } else {
      consumer.template run<true>(stream);
    }
  }
  if (sharers > 1) ptx::cluster_sync();  // until then the other CTA may arrive at barriers of this one
}
