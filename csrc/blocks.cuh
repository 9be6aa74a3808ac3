// Which blocks of query rows a CTA works on. With more blocks than SMs, a CTA takes whichever is next when it has loaded all of the one before:
// the next Q and K then come while the consumers finish, and heads that skip much make room for others. Else each CTA has its own.
#pragma once

#include "block.cuh"
#include "plan.cuh"
#include "ptx.cuh"
#include "stream.cuh"

// One warp's: takes blocks, and tells the CTA. CTAs of a cluster that share copies take neighbours.
template <typename Smem>
struct BlockSource {
  const Params& params;
  Smem& smem;
  uint32_t taken = 0;

  // Whether there is a next block.
  __device__ __forceinline__ bool next() {
    const uint32_t slot = taken % 2, turn = taken / 2 % 2;
    const bool leads = threadIdx.x % 32 == 0;
    Work& work = smem.work[slot];
    if (leads) {
      const int index = take();
      ptx::mbarrier_wait(ptx::smem_address(&smem.block_empty[slot]), turn ^ 1);
      work.there = index;
    }
    __syncwarp();
    ++taken;
    const int index = ptx::read_uniform(work.there);
    if (index >= 0) {
      const Block block(params, index);
      if (leads) work.batch = block.batch, work.head = block.head, work.kv_head = block.kv_head, work.row0 = block.row0;
      __syncwarp();
      Stream::plan(params, smem, Block(work), work);
      __syncwarp();
    }
    if (leads) ptx::mbarrier_arrive(ptx::smem_address(&smem.block_full[slot]));
    __syncwarp();
    return index >= 0;
  }

 private:
  __device__ __forceinline__ int take() {
    if (!params.shares_blocks) return taken == 0 ? static_cast<int>(blockIdx.x) : -1;
    const int sharers = ::sharers<Smem>(params);
    const uint32_t slot = taken % 2, turn = taken / 2 % 2;
    const uint32_t peer_block = ptx::smem_address(&smem.peer_block[slot]), peer_full = ptx::smem_address(&smem.peer_block_full[slot]);
    if (sharers == 1 || ptx::cluster_rank() == 0) {
      const int block = draw(sharers);
      // The other has read what was in the slot, two blocks ago: this warp has since loaded the first K of the block before, into the first buffer as
      // in every block of the dense loop, which all warps of both had given back. So there must be a key.
      if (sharers > 1) ptx::store_async(ptx::map_to_rank(peer_block, 1), block, ptx::map_to_rank(peer_full, 1));
      return block;
    }
    ptx::mbarrier_arrive_expect_bytes(peer_full, sizeof(int));
    ptx::mbarrier_wait(peer_full, turn);
    const int block = *const_cast<volatile int*>(&smem.peer_block[slot]);
    return block < 0 ? block : block + 1;
  }

  // Counted where the tiles visited of the first head belong. Each of those that draw stops at its first -1, so the last draw is known, and
  // puts there what belongs there.
  __device__ __forceinline__ int draw(int sharers) const {
    const int block = atomicAdd(params.counts, sharers);
    if (block + sharers == params.all_draws) {
      int tiles = params.tiles;
      if (params.marks_tiles) {
        tiles = 0;
        for (int word = 0; 32 * word < params.tiles; ++word) tiles += __popc(smem.tile_bits[word]);  // of the first batch item
      }
      *params.counts = (params.q_len + kGroupRows - 1) / kGroupRows * tiles;
    }
    return block < params.blocks ? block : -1;
  }
};

// Whether there is an nth block for the CTA. For a whole warp: each of the consumers', those that load V and that which describes K. Its Work stays
// readable until released.
template <typename Smem>
__device__ __forceinline__ bool receive_block(Smem& smem, uint32_t n) {
  ptx::mbarrier_wait(ptx::smem_address(&smem.block_full[n % 2]), n / 2 % 2);
  return ptx::read_uniform(smem.work[n % 2].there) >= 0;
}
template <typename Smem>
__device__ __forceinline__ auto& progress_of_warp(Smem& smem) {  // of a consumer's
  return smem.progress[threadIdx.x / 32 - kWarpgroup / 32];
}
template <typename Smem>
__device__ __forceinline__ void release_block(Smem& smem, uint32_t n) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::smem_address(&smem.block_empty[n % 2]));
}
