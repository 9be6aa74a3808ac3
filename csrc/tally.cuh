// Measuring: nothing is skipped, but for each of up to 32 lambdas the tiles are counted that it would skip. A skipped tile never raises a
// maximum, so one pass serves them all.
#pragma once

#include "plan.cuh"
#include "ptx.cuh"

// A thread's share of how far a tile is from being kept: the smallest m - tile_max, log2 units, over its rows that vote and have a key there,
// inf without any. A lambda skips the tile if that is more than -log2(lambda) in all threads. NaN is 0: its row objects to every skip.
__device__ __forceinline__ float skip_distance(const float (&tile_max)[2], const float (&running_max)[2], const bool (&votes)[2], float unit) {
  float distance = INFINITY;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float below = (running_max[i] - tile_max[i]) * unit;
    if (votes[i] && tile_max[i] != -INFINITY) distance = fminf(distance, below > 0.f ? below : 0.f);
  }
  return distance;
}

// The counts of one group of rows. Lane n of its first warp counts for trial n. Wide: both groups are one, and the first counts.
template <typename Smem>
struct Tally {
  Smem& smem;
  const int lane, warp;     // of the consumers'
  const int first, warps;   // warps that decide together
  const int trials;
  float limit = INFINITY;   // the lane's trial skips what is further
  int visited = 0, skipped = 0, slot = 0;

  // alone: the other group has no rows
  __device__ __forceinline__ Tally(const Params& params, Smem& smem, bool alone)
      : smem(smem), lane(threadIdx.x % 32), warp((threadIdx.x - kWarpgroup) / 32), first(params.wide ? 0 : warp / 4 * 4), warps(params.wide && !alone ? 8 : 4), trials(params.trials) {
    if (lane < trials) limit = -log2f(clamp_threshold(params.threshold[lane * params.threshold_stride]));
  }

  // All threads of the group, or of both, for each tile in turn.
  __device__ __forceinline__ void add(float distance) {
    const uint32_t nearest = __reduce_min_sync(~0u, __float_as_uint(distance));  // in order, since not negative
    if (lane == 0) smem.nearest[slot][warp] = nearest;
    ptx::barrier_sync(kTally + first / 4, warps * 32);
    if (warp == first) {
      const float all = __uint_as_float(__reduce_min_sync(~0u, smem.nearest[slot][first + lane % warps]));
      visited += all < INFINITY;
      skipped += all > limit && all < INFINITY;
    }
    slot ^= 1;  // written again after the next barrier, which the first warp reaches when it has read
  }

  __device__ __forceinline__ void store(const Params& params, int batch, int head) const {
    if (warp != first) return;
    int32_t* counts = params.counts + (1 + trials) * (int64_t{batch} * params.heads + head);
    if (lane == 0) atomicAdd(counts, visited);
    if (lane < trials && skipped > 0) atomicAdd(counts + 1 + lane, skipped);
  }
};

struct NoTally {
  template <typename Smem>
  __device__ __forceinline__ NoTally(const Params&, Smem&, bool) {}
  __device__ __forceinline__ void store(const Params&, int, int) const {}
};
