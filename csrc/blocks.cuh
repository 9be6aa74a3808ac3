// Which blocks of query rows a CTA works on. With more blocks than SMs, a CTA takes whichever is next when it has loaded all of the one before:
// the next Q and K then come while the consumers finish, and heads that skip much make room for others. Else each CTA has its own.
#pragma once

#include "plan.cuh"
#include "ptx.cuh"

// 128 query rows of one head.
struct Block {
  int batch, head, kv_head, row0;

  __device__ __forceinline__ Block(const Params& params, int index) {
    int q_blocks = params.q_blocks, heads = params.heads, heads_per_kv_head = params.heads_per_kv_head;
    asm volatile("" : "+r"(q_blocks), "+r"(heads), "+r"(heads_per_kv_head));  // or their reciprocals are kept, in registers that the producer does not have
    const int of_head = index % q_blocks, batch_head = index / q_blocks;
    batch = batch_head / heads;
    head = batch_head % heads;
    kv_head = head / heads_per_kv_head;
    row0 = (params.is_causal ? q_blocks - 1 - of_head : of_head) * kBlockRows;  // causal: the longest first
  }
};

// For a whole warp: in its registers, so is all that follows from it.
template <typename Smem>
__device__ __forceinline__ int read_block(const Smem& smem, uint32_t n) {
  return static_cast<int>(ptx::uniform(*const_cast<const volatile int*>(&smem.block[n % 2])));
}

// One warp's: takes blocks, and tells the CTA. CTAs of a cluster that share copies take neighbours.
template <typename Smem>
struct BlockSource {
  const Params& params;
  Smem& smem;
  uint32_t taken = 0;

  // The next block, or -1.
  __device__ __forceinline__ int next() {
    if (threadIdx.x % 32 == 0) {
      const int block = take();
      const uint32_t slot = taken % 2, turn = taken / 2 % 2;
      ptx::mbarrier_wait(ptx::smem_address(&smem.block_empty[slot]), turn ^ 1);
      smem.block[slot] = block;
      ptx::mbarrier_arrive(ptx::smem_address(&smem.block_full[slot]));
    }
    __syncwarp();
    ++taken;
    return read_block(smem, taken - 1);
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
      if (params.mask != nullptr) {
        tiles = 0;
        for (int word = 0; 32 * word < params.tiles; ++word) tiles += __popc(smem.tile_bits[word]);  // of the first batch item
      }
      *params.counts = (params.q_len + kGroupRows - 1) / kGroupRows * tiles;
    }
    return block < params.blocks ? block : -1;
  }
};

// The CTA's nth block, or -1. For a whole warp: each of the consumers', and those that load V alone. It stays readable until released.
template <typename Smem>
__device__ __forceinline__ int receive_block(Smem& smem, uint32_t n) {
  const uint32_t slot = n % 2;
  ptx::mbarrier_wait(ptx::smem_address(&smem.block_full[slot]), n / 2 % 2);
  return read_block(smem, n);
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
