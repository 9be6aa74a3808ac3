#pragma once

#include "plan.cuh"
#include "ptx.cuh"

// 128 query rows of one head.
struct Block {
  int batch, head, kv_head, row0;

  // For a whole warp: in its registers, so is all that follows from it.
  __device__ __forceinline__ explicit Block(const Work& work)
      : batch(ptx::read_uniform(work.batch)), head(ptx::read_uniform(work.head)), kv_head(ptx::read_uniform(work.kv_head)), row0(ptx::read_uniform(work.row0)) {}
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
