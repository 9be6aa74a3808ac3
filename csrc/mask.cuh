// Key masks. For the loops, a tile is one of three: without a key that takes part, and then it is not in the stream (if the tiles are marked); with all
// scores as they are; or with some masked or added to (or causal, or of a scale that is not positive), for which the producer gives biases with K.
#pragma once

#include <cuda_fp16.h>

#include "plan.cuh"

constexpr int kLaneKeys = kTileKeys / 32;

// To be added to the raw scores of the lane's keys of a tile, 4 * lane and so on; -inf: the key takes no part. What is finite is held within 1e6: beside
// a base further away the exps would overflow by the base's rounding, and scores are rounded to whole units there anyway.
__device__ __forceinline__ void key_biases(const Params& params, int batch, int tile, float (&bias)[kLaneKeys]) {
  const int first = tile * kTileKeys + kLaneKeys * (threadIdx.x % 32);
  const MaskType type = params.mask_type;
  const char* at = static_cast<const char*>(params.mask) + batch * params.mask_stride_batch + int64_t{first} * params.mask_stride_key;
  const uint32_t masked = type == MaskType::kBool ? 0 : type == MaskType::kBFloat16 ? 0xFF80 : type == MaskType::kFloat16 ? 0xFC00 : 0xFF800000;
  uint32_t raw[kLaneKeys];
#pragma unroll
  for (int i = 0; i < kLaneKeys; ++i, at += params.mask_stride_key) {  // all loads before what is made of them
    raw[i] = masked;
    if (first + i < params.kv_len) {
      if (type == MaskType::kNone) {
        raw[i] = 0;
      } else if (type == MaskType::kBool) {
        raw[i] = *reinterpret_cast<const uint8_t*>(at);
      } else if (type == MaskType::kFloat32) {
        raw[i] = *reinterpret_cast<const uint32_t*>(at);
      } else {
        raw[i] = *reinterpret_cast<const uint16_t*>(at);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kLaneKeys; ++i) {
    float added = __uint_as_float(raw[i]);
    if (type == MaskType::kBool) added = raw[i] != 0 ? 0.f : -INFINITY;
    if (type == MaskType::kBFloat16) added = __uint_as_float(raw[i] << 16);
    if (type == MaskType::kFloat16) added = __half2float(__ushort_as_half(raw[i]));
    if (fabsf(added) > 1e6f && fabsf(added) != INFINITY) added = copysignf(1e6f, added);
    bias[i] = added * params.bias_unit;
  }
}

// In `tile_bits`, of each batch item that the CTA works on: a bit for each tile, whether some key takes part; then a bit, whether some key is not
// as it is. So many words each, and where those of an item begin:
__device__ __forceinline__ int tile_words(const Params& params) { return (params.tiles + 31) / 32; }
__device__ __forceinline__ int tile_bits_of(const Params& params, int batch) {
  return params.shares_blocks && params.mask_items > 1 ? 2 * batch * tile_words(params) : 0;
}

// By all threads of the CTA, `batch`: of the first block. A warp for eight tiles, a byte of each.
template <typename Smem>
__device__ __forceinline__ void mark_tiles(const Params& params, Smem& smem, int batch, int items) {
  const int bytes = 4 * tile_words(params);
  uint8_t* marks = reinterpret_cast<uint8_t*>(smem.tile_bits);
  for (int n = threadIdx.x / 32; n < items * bytes; n += kThreads / 32) {
    const int item = n / bytes, byte = n % bytes;
    uint32_t live = 0, partial = 0;
#pragma unroll 1
    for (int t = 0; t < 8; ++t) {
      float bias[kLaneKeys];
      key_biases(params, items == 1 ? batch : item, 8 * byte + t, bias);
      bool any = false, other = false;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) any |= bias[i] != -INFINITY, other |= bias[i] != 0.f;
      live |= static_cast<uint32_t>(__any_sync(~0u, any)) << t;
      partial |= static_cast<uint32_t>(__any_sync(~0u, other)) << t;
    }
    if (threadIdx.x % 32 == 0) {
      marks[2 * item * bytes + byte] = live;
      marks[(2 * item + 1) * bytes + byte] = partial;
    }
  }
}
