// In which order key tiles pass through a CTA, and through its buffers.
#pragma once

#include "plan.cuh"

// Place in a ring of kStages buffers: which buffer, and the parity of its use.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The key tiles that pass through a CTA, in order: position 0, 1, ..., length - 1. Each group is active for `tiles` positions in a
// row, from its own offset on; the offsets differ only where "own_first" gives the two groups different first tiles.
struct Stream {
  int start, tiles, offset1, length;  // offset1: that of group 1; group 0 starts at position 0

  __device__ __forceinline__ Stream(const Params& params, int row0, bool own_first) {
    tiles = params.tiles;
    if (params.is_causal) tiles = min(tiles, (min(row0 + kBlockRows, params.q_len) + kTileKeys - 1) / kTileKeys);
    int first[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int64_t twice_middle = 2 * int64_t{row0} + (params.wide ? kBlockRows : (2 * g + 1) * kGroupRows);
      const int64_t own = own_first ? twice_middle * params.kv_len / (int64_t{2} * params.q_len * kTileKeys) : 0;
      const int tile = static_cast<int>(min(own, int64_t{params.tiles - 1}));
      first[g] = tile < tiles ? tile : 0;  // causal: the tiles from `tiles` on are masked for all rows, so the order wraps at once
    }
    start = first[0];
    offset1 = row0 + kGroupRows < params.q_len ? (first[1] - first[0] + tiles) % max(tiles, 1) : 0;
    length = tiles + offset1;
  }
  __device__ __forceinline__ int begin(int group) const { return group == 0 ? 0 : offset1; }
  __device__ __forceinline__ int tile(int position) const {
    int t = start + position;
    if (t >= tiles) t -= tiles;
    return t >= tiles ? t - tiles : t;
  }
};
