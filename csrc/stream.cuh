// In which order key tiles pass through a CTA, and through its buffers.
#pragma once

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

// The key tiles that pass through a CTA, in order: position 0, 1, ..., length - 1. Each group is active for `tiles` positions in a
// row, from its own offset on; the offsets differ only where "own_first" gives the two groups different first tiles.
struct Stream {
  int start, tiles, offset1, length;  // offset1: that of group 1; group 0 starts at position 0

  // alone: the CTA copies for no other, so a block without rows, which fills up a cluster, needs nothing
  __device__ __forceinline__ Stream(const Params& params, int row0, bool own_first, bool alone) {
    tiles = alone && row0 >= params.q_len ? 0 : params.tiles;
    if (params.is_causal) tiles = min(tiles, (min(row0 + kBlockRows, params.q_len) + kTileKeys - 1) / kTileKeys);
    int first[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int own = own_first ? own_tile(params, 2u * row0 + (params.wide ? kBlockRows : (2 * g + 1) * kGroupRows)) : 0;
      const int tile = min(own, params.tiles - 1);
      first[g] = tile < tiles ? tile : 0;  // causal: the tiles from `tiles` on are masked for all rows, so the order wraps at once
    }
    start = first[0];
    offset1 = row0 + kGroupRows < params.q_len ? (first[1] - first[0] + tiles) % max(tiles, 1) : 0;
    length = tiles + offset1;
  }
  // floor(twice_middle * kv_len / (2 * q_len * kTileKeys)): at most 1 off before it is corrected. A 64-bit division takes more registers than the producer has.
  __device__ __forceinline__ static int own_tile(const Params& params, uint32_t twice_middle) {
    int tile = static_cast<int>(twice_middle * params.tiles_per_half_row);
    const int64_t exact = int64_t{twice_middle} * params.kv_len, of_a_tile = int64_t{params.q_len} * (2 * kTileKeys);
    if (tile * of_a_tile > exact) --tile;
    if ((tile + 1) * of_a_tile <= exact) ++tile;
    return tile;
  }
  __device__ __forceinline__ int begin(int group) const { return group == 0 ? 0 : offset1; }
  __device__ __forceinline__ int tile(int position) const {
    int t = start + position;
    if (t >= tiles) t -= tiles;
    return t >= tiles ? t - tiles : t;
  }
};
