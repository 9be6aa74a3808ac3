// In which order key tiles pass through a CTA, and through its buffers.
#pragma once

#include "block.cuh"
#include "mask.cuh"
#include "plan.cuh"

// Place in a ring of kStages buffers: which buffer, and the parity of its use.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parities = 0;  // bit s: of the next use of buffer s
  __device__ __forceinline__ uint32_t parity() const { return parities >> stage & 1; }
  __device__ __forceinline__ void advance() {
    parities ^= 1u << stage;
    if (++stage == kStages) stage = 0;
  }
};

// The key tiles of a block: those before `end` in which some key takes part, where that is marked.
struct KeyTiles {
  int bits;  // where in `tile_bits`; -1: all tiles
  int end;

  // This tile or the next, after the last the first. There must be one.
  template <typename Smem>
  __device__ __forceinline__ int from(const Smem& smem, int tile) const {
    while (true) {
      if (tile >= end) tile = 0;
      if (bits < 0) return tile;
      const uint32_t rest = smem.tile_bits[bits + tile / 32] >> tile % 32;
      tile = rest != 0 ? tile + __ffs(rest) - 1 : tile / 32 * 32 + 32;
      if (rest != 0 && tile < end) return tile;
    }
  }
  template <typename Smem>
  __device__ __forceinline__ int next(const Smem& smem, int tile) const {
    return from(smem, tile + 1);
  }

  // How many before this one. By a whole warp.
  template <typename Smem>
  __device__ __forceinline__ int before(const Smem& smem, int tile) const {
    if (bits < 0) return tile;
    int count = 0;
    for (int word = threadIdx.x % 32; 32 * word < tile; word += 32) {
      const int left = tile - 32 * word;
      count += __popc(smem.tile_bits[bits + word] & (left < 32 ? (1u << left) - 1 : ~0u));
    }
    return __reduce_add_sync(~0u, count);
  }
};

// The key tiles that pass through a CTA, in order: position 0, 1, ..., length - 1. Each group is active for `tiles` positions in a
// row, from its own offset on; the offsets differ only where "own_first" gives the two groups different first tiles.
struct Stream {
  KeyTiles keys;
  int first[kGroups];
  int tiles, offset1, length;  // offset1: that of group 1; group 0 starts at position 0

  __device__ __forceinline__ explicit Stream(const Work& work)
      : keys{ptx::read_uniform(work.bits), ptx::read_uniform(work.end)}, first{ptx::read_uniform(work.first[0]), ptx::read_uniform(work.first[1])},
        tiles(ptx::read_uniform(work.tiles)), offset1(ptx::read_uniform(work.offset1)), length(tiles + offset1) {}
  // floor(twice_middle * kv_len / (2 * q_len * kTileKeys)): at most 1 off before it is corrected. A 64-bit division takes more registers than the producer has.
  __device__ __forceinline__ static int own_tile(const Params& params, uint32_t twice_middle) {
    int tile = static_cast<int>(twice_middle * params.tiles_per_half_row);
    const int64_t exact = int64_t{twice_middle} * params.kv_len, of_a_tile = int64_t{params.q_len} * (2 * kTileKeys);
    if (tile * of_a_tile > exact) --tile;
    if ((tile + 1) * of_a_tile <= exact) ++tile;
    return tile;
  }
  __device__ __forceinline__ int begin(int group) const { return group == 0 ? 0 : offset1; }

  // Of the block, into `work`; by a whole warp, of which the first lane writes. Without votes the order means nothing but rounding; ascending gives both
  // CTAs of a cluster the same. A measurement has the order of the votes that it foresees. Step by step, since the producer has few registers.
  template <typename Smem>
  __device__ __forceinline__ static void plan(const Params& params, const Smem& smem, const Block& block, Work& work) {
    const bool own_first = params.own_first && (Smem::kLoop != Loop::kDense || params.trials > 0);
    const bool writes = threadIdx.x % 32 == 0;
    // A block without rows fills up a cluster: of use where it copies for the other CTA.
    int end = Smem::kLoop == Loop::kAhead && block.row0 >= params.q_len ? 0 : params.tiles;
    if (params.is_causal) end = min(end, (min(block.row0 + kBlockRows, params.q_len) + kTileKeys - 1) / kTileKeys);
    const KeyTiles keys{params.marks_tiles ? tile_bits_of(params, block.batch) : -1, end};
    const int tiles = keys.before(smem, end);
    if (writes) work.bits = keys.bits, work.end = end, work.offset1 = 0, work.tiles = tiles;
    if (tiles == 0) return;
#pragma unroll 1
    for (int g = 0; g < kGroups; ++g) {
      const int own = own_first ? own_tile(params, 2u * block.row0 + (params.wide ? kBlockRows : (2 * g + 1) * kGroupRows)) : 0;
      const int first = keys.from(smem, min(own, params.tiles - 1));  // causal: the tiles from `end` on are masked for all rows, so the order wraps at once
      if (writes) work.first[g] = first;
      __syncwarp();
      if (g == 1 && block.row0 + kGroupRows < params.q_len) {
        const int offset = keys.before(smem, first) - keys.before(smem, ptx::read_uniform(work.first[0]));
        if (writes) work.offset1 = offset < 0 ? offset + tiles : offset;
      }
    }
  }
};
