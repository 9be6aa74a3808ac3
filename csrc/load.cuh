// One tile of K or V from global to shared memory.
#pragma once

#include "blocks.cuh"
#include "plan.cuh"
#include "ptx.cuh"

// A 128-key tile of K or V; zeros past the end of the keys. `sharers` = 2: this CTA loads one half for both CTAs of the cluster, which halves what the
// L2 has to deliver; the other half comes from the other CTA.
template <typename Element, int kPanels>
__device__ __forceinline__ void load_tile(Element (&target)[kPanels][kTileKeys][kPanel], const TileMaps& maps, uint64_t& full, int tile, const Block& block, int sharers = 1) {
  const uint32_t barrier = ptx::smem_address(&full);
  if (sharers == 1) {
    ptx::tma_load(ptx::smem_address(target), &maps.whole, barrier, tile * kTileKeys, 0, block.kv_head, block.batch);
  } else {
    const int half = ptx::cluster_rank(), panel = half % kPanels, key = half / kPanels * half_keys(kPanels);
    ptx::tma_load_multicast(ptx::smem_address(target[panel][key]), &maps.half, barrier, tile * kTileKeys + key, panel, block.kv_head, block.batch, uint16_t{3});
  }
  ptx::mbarrier_arrive_expect_bytes(barrier, sizeof(target));  // after the copies, which are awaited: what they bring is counted either way
}
