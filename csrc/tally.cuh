// Measuring: nothing is skipped, but for each of up to 32 lambdas the tiles are counted that it would skip. A skipped tile never raises a
// maximum, so one pass serves them all.
#pragma once

#include "blocks.cuh"
#include "plan.cuh"
#include "ptx.cuh"

// A thread's share of how far a tile is from being kept: the smallest m - tile_max, log2 units, over its rows that vote and have a key there,
// inf without any. A lambda skips the tile if that is more than -log2(lambda) in all threads. NaN is 0: its row objects to every skip.
__device__ __forceinline__ float skip_distance(const float (&tile_max)[2], const float (&running_max)[2], const int (&votes)[2], float unit) {
  float distance = INFINITY;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float below = (running_max[i] - tile_max[i]) * unit;
    if (votes[i] && tile_max[i] != -INFINITY) distance = fminf(distance, below > 0.f ? below : 0.f);
  }
  return distance;
}

// The counts of one group of rows. Lane n of its first warp counts for trial n. Wide: both groups decide together; for each tile that one counts
// which comes to it second.
template <typename Smem>
struct Tally {
  Smem& smem;
  const int lane, warp;    // of the consumers'
  const bool paired;
  const int trials;
  float limit = INFINITY;  // the lane's trial skips what is further
  int visited = 0, skipped = 0, tiles = 0;

  // alone: the other group has no rows
  __device__ __forceinline__ Tally(const Params& params, Smem& smem, bool alone)
      : smem(smem), lane(threadIdx.x % 32), warp((threadIdx.x - kWarpgroup) / 32), paired(params.wide && !alone), trials(params.trials) {
    if (lane < trials) limit = -log2f(clamp_threshold(params.threshold[lane * params.threshold_stride]));
  }

  // All threads of the group, for each tile in turn.
  __device__ __forceinline__ void add(float distance) {
    const uint32_t nearest = __reduce_min_sync(~0u, __float_as_uint(distance));  // in order, since not negative
    uint32_t* of_tile = smem.nearest[tiles % 2];  // written again after the next barrier, which the first warp reaches when it has read
    if (lane == 0) of_tile[warp] = nearest;
    ptx::barrier_sync(kTally + warp / 4, kWarpgroup);
    if (warp % 4 == 0) count(__reduce_min_sync(~0u, of_tile[warp + lane % 4]));
    ++tiles;
  }

  __device__ __forceinline__ void count(uint32_t nearest) {
    if (paired) {
      uint32_t& slot = smem.nearest_of_first[tiles % 8];
      uint32_t other = 0;
      if (lane == 0) {
        other = atomicExch(&slot, nearest);
        if (other != kNoTally) slot = kNoTally;  // before this group hands on the K that lets the other come here again
      }
      other = __shfl_sync(~0u, other, 0);
      if (other == kNoTally) return;
      nearest = min(nearest, other);
    }
    const float all = __uint_as_float(nearest);
    visited += all < INFINITY;
    skipped += all > limit && all < INFINITY;
  }

  __device__ __forceinline__ void store(const Params& params, const Block& block) const {
    if (warp % 4 != 0) return;
    int32_t* counts = params.counts + (1 + trials) * (int64_t{block.batch} * params.heads + block.head);
    if (lane == 0) atomicAdd(counts, visited);
    if (lane < trials && skipped > 0) atomicAdd(counts + 1 + lane, skipped);
  }
};

struct NoTally {
  template <typename Smem>
  __device__ __forceinline__ NoTally(const Params&, Smem&, bool) {}
};
