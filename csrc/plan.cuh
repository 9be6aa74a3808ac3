// What the kernel is made of: tile sizes, roles, barriers, the shared-memory plan and the parameters of a launch.
#pragma once

#include <cuda.h>

#include <cstdint>

constexpr int kGroupRows = 64;       // query rows that vote together: one consumer warpgroup
constexpr int kGroups = 2;           // consumer warpgroups of a CTA
constexpr int kBlockRows = kGroupRows * kGroups;
constexpr int kTileKeys = 128;       // keys of a tile, the contract's tile_k
constexpr int kPanel = 64;           // two-byte elements in a 128-byte swizzled row
constexpr int kWarpgroup = 128;      // threads
constexpr int kThreads = kWarpgroup * (1 + kGroups);  // one producer warpgroup, then the consumers
constexpr int kConsumerWarps = 4 * kGroups;
constexpr int kMostTrials = 32;       // lambdas of a measurement: a lane each
constexpr uint32_t kNoTally = ~0u;
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;  // 24 * 128 + 240 * 256 = 64512 = 384 * 168, what the launch gives; more deadlocks
constexpr int kTileWords = 32;        // of 32 tiles: the most that are marked where there is a key mask, see mask.cuh

// Half a tile of K or V has this many keys: it is one of two panels, or half of the only panel.
__host__ __device__ constexpr int half_keys(int panels) { return kTileKeys * panels / 2; }

// Named barriers (0 is __syncthreads). Each consumer warpgroup has its own of each kind: id + group.
enum NamedBarrier : int { kVote = 1, kTally = 3, kStore = 5, kWish = 7 };

// The loop that a consumer runs: without votes (lambda = 0, if there are no empty tiles), or with votes and Q K^T one tile ahead.
enum class Loop { kDense, kAhead };

// What a CTA does next, in shared memory: see Block and Stream, which one warp makes for all.
struct Work {
  int there;  // -1: nothing
  int batch, head, kv_head, row0;
  int bits, end, first[kGroups], tiles, offset1;
};

// Shared memory of a CTA. Every two-byte array is in panels of 64 columns, 128-byte swizzled, as TMA writes and wgmma reads it.
//
// `value` is a ring that both groups share. Not so in the ahead loop: there each group has one buffer of its own, into which a warp of the
// producer loads V of the tiles that it keeps, after its vote, so a skipped tile costs no copy.
//
// The output leaves through Q's place or, with votes, V's; at D = 64 the dense loop has room for both, and the next Q comes early.
// D = 128, in 32 KB of the SM's 227: 1 of Q + 3 of K + 3 of V; ahead 1 + 4 + 2.
template <typename Element_, int kHeadDim, Loop kLoop_>
struct __align__(1024) SharedMemory {
  using Element = Element_;
  static constexpr Loop kLoop = kLoop_;
  static constexpr bool kOutputApart = kLoop == Loop::kDense && kHeadDim == 64;
  static constexpr int kPanels = kHeadDim / kPanel;
  static constexpr int kKeyStages = kHeadDim == 128 ? (kLoop == Loop::kAhead ? 4 : 3) : (kLoop == Loop::kAhead ? 8 : 4);
  static constexpr int kValueStages = kLoop == Loop::kAhead ? kGroups : kHeadDim == 64 ? 4 : 3;
  static constexpr int kBlockReaders = kConsumerWarps + 1 + (kLoop == Loop::kDense ? 1 : kGroups);  // warps: the consumers', that which describes K, and those that load V
  using Query = Element[kPanels][kGroupRows][kPanel];
  using Tile = Element[kPanels][kTileKeys][kPanel];

  Tile key[kKeyStages];
  Tile value[kValueStages];
  Query query[kGroups];
  Query own_output[kOutputApart ? kGroups : 0];
  alignas(16) float key_bias[kKeyStages][kTileKeys];  // what to add to a key's scores, raw; -inf masks
  int key_tile[kKeyStages];                  // which tile; ~tile: one whose scores need `key_bias`
  uint32_t tile_bits[2 * kTileWords];        // see mask.cuh
  uint64_t query_full[kGroups];
  uint64_t query_empty[kGroups];             // the next block's may come
  uint64_t key_full[kKeyStages];
  uint64_t key_empty[kKeyStages];
  uint64_t value_full[kValueStages];
  uint64_t value_empty[kValueStages];
  uint64_t block_full[2], block_empty[2], peer_block_full[2];  // see blocks.cuh
  float log2_lambda;
  struct __align__(8) Wish {
    int tile;                                // whose V the group waits for
    uint32_t blocks;                         // done by the group
  } wish[kGroups];
  Work work[2];
  int peer_block[2];
  struct {                                   // of each consumer warp, over the blocks before: here, since the loops have no register to spare
    uint32_t blocks, tiles, key_parities, value_parities;
    int visited, empty;                      // of this block, by the first thread of the group: tiles; those that count as nothing
  } progress[kConsumerWarps];
  uint32_t nearest[2][kConsumerWarps];       // see tally.cuh
  uint32_t nearest_of_first[8];              // more tiles than a group can be ahead of the other

  // Where the output passes through: free once the group's last product is done.
  __device__ __forceinline__ void* output(int group) {
    if constexpr (kOutputApart) {
      return own_output[group];
    } else if constexpr (kLoop == Loop::kAhead) {
      return value[group];
    } else {
      return query[group];
    }
  }
};

enum class MaskType : int { kNone = 0, kBool, kFloat32, kBFloat16, kFloat16 };

// Rank 5, innermost first: 64 elements, S, panels of them, H, B.
struct TileMaps {
  CUtensorMap whole, half;  // a tile at a time, or half of one; the latter only where CTAs share copies
};

struct Params {
  CUtensorMap query_map;                      // 64 rows at a time, as TileMaps
  TileMaps key_maps, value_maps;
  void* out;                                  // [B, Hq, Sq, D], strides in elements
  int64_t out_stride_batch, out_stride_head, out_stride_row;
  float* lse;                                 // [B, Hq, Sq], contiguous, natural log; not written by a measurement
  int32_t* counts;                            // [B, Hq, 2 or 1 + trials], zeroed before the launch: tiles visited, tiles skipped
  const float* threshold;                     // lambda, [B] or one for all (stride 0); to measure: [trials]
  int64_t threshold_stride;
  int trials;                                 // of a measurement
  bool wide;                                  // a measurement's groups are of kBlockRows rows
  const void* mask;                           // key mask [B, Skv] or nullptr, strides in bytes
  MaskType mask_type;
  int64_t mask_stride_batch;
  int mask_stride_key;
  int mask_items;                             // B, or 1 for all
  bool marks_tiles;                           // they fit into kTileWords
  bool meets_empty_tiles;                     // a group may see nothing of a tile: causal and a key mask leave no key together, or no marks
  const uint8_t* query_mask;                  // [B, Sq] or nullptr, strides in elements
  int64_t query_mask_stride_batch, query_mask_stride_row;
  int heads, heads_per_kv_head;
  int q_len, kv_len;
  int q_blocks;                               // ceil(Sq / kBlockRows), rounded up to whole clusters
  int blocks;                                 // of all heads
  int all_draws;                              // blocks and CTAs: each CTA also draws one that is not there
  bool shares_blocks;                         // the CTAs take blocks one after the other, counting them in counts[0]; else each has its own
  int tiles;                                  // ceil(Skv / kTileKeys)
  double tiles_per_half_row;                  // Skv / (2 * Sq * kTileKeys)
  int cluster;                                // CTAs of a cluster: 1, or 2, which then are neighbours in one head (q_blocks is even)
  bool is_causal, own_first;
  float scale_log2;                           // |scale| * log2(e), or 1 where scale is 0
  float sign;                                 // of scale
  float bias_unit;                            // from the key mask's values to raw scores
};

// CTAs that share what they load: those that the launch paired. Not with votes, where they would wait for each other's.
template <typename Smem>
__device__ __forceinline__ int sharers(const Params& params) {
  return Smem::kLoop == Loop::kDense ? params.cluster : 1;
}

// NaN and negative act as 0, more than 1 as 1.
__device__ __forceinline__ float clamp_threshold(float lambda) { return lambda > 0.f ? fminf(lambda, 1.f) : 0.f; }
