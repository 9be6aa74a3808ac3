// Key masks. For the loops, a tile is one of three: without a key that takes part, and then it is not in the stream; with all keys as they are;
// or with some masked or added to, for which the producer gives a bias with K.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "plan.cuh"

// To be added to the key's raw scores; -inf: the key takes no part.
__device__ __forceinline__ float key_bias(const Params& params, int batch, int key) {
  if (key >= params.kv_len) return -INFINITY;
  if (params.mask == nullptr) return 0.f;
  const int64_t at = batch * params.mask_stride_batch + key * params.mask_stride_key;
  float added;
  switch (params.mask_type) {
    case MaskType::kBool: return static_cast<const uint8_t*>(params.mask)[at] != 0 ? 0.f : -INFINITY;
    case MaskType::kFloat32: added = static_cast<const float*>(params.mask)[at]; break;
    case MaskType::kBFloat16: added = __bfloat162float(static_cast<const __nv_bfloat16*>(params.mask)[at]); break;
    default: added = __half2float(static_cast<const __half*>(params.mask)[at]); break;
  }
  return added * params.bias_unit;
}

// In `tile_bits`, of each batch item that the CTA works on: a bit for each tile, whether some key takes part; then a bit, whether some key is not
// as it is. So many words each, and where those of an item begin:
__device__ __forceinline__ int tile_words(const Params& params) { return (params.tiles + 31) / 32; }
__device__ __forceinline__ int tile_bits_of(const Params& params, int batch) {
  return params.shares_blocks && params.mask_items > 1 ? 2 * batch * tile_words(params) : 0;
}

// By all threads of the CTA, `batch`: of the first block. A warp for each word.
template <typename Smem>
__device__ __forceinline__ void mark_tiles(const Params& params, Smem& smem, int batch, int items) {
  const int words = tile_words(params), lane = threadIdx.x % 32;
  for (int n = threadIdx.x / 32; n < items * words; n += kThreads / 32) {
    const int item = n / words, word = n % words;
    uint32_t live = 0, partial = 0;
#pragma unroll 4
    for (int t = 0; t < 32; ++t) {
      bool any = false, other = false;
#pragma unroll
      for (int key = lane; key < kTileKeys; key += 32) {
        const float bias = key_bias(params, items == 1 ? batch : item, (32 * word + t) * kTileKeys + key);
        any |= bias != -INFINITY;
        other |= bias != 0.f;
      }
      live |= static_cast<uint32_t>(__any_sync(~0u, any)) << t;
      partial |= static_cast<uint32_t>(__any_sync(~0u, other)) << t;
    }
    if (lane == 0) {
      smem.tile_bits[2 * item * words + word] = live;
      smem.tile_bits[(2 * item + 1) * words + word] = partial;
    }
  }
}
