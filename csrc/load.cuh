// One tile of K or V from global to shared memory.
#pragma once

#include "blocks.cuh"
#include "plan.cuh"
#include "ptx.cuh"

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
