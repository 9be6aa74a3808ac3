// One-line wrappers around the sm_90a instructions that the kernel uses. No logic here; names say what the instruction does.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace ptx {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// ---- mbarriers: addresses in shared memory, 8 bytes each; `parity` is that of the phase waited for ----

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// The same on a barrier of any CTA of the cluster; `barrier` is an address of its window.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Four bytes to a CTA of the cluster, which count on its barrier; addresses of its window.
__device__ __forceinline__ void store_async(uint32_t target, uint32_t value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(target), "r"(value), "r"(barrier) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {  // does not wait
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// ---- clusters ----

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// `address_smem` of this CTA, as the same place in the CTA of that rank.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t address_smem, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address_smem), "r"(rank));
  return mapped;
}
// All threads of the cluster; those that have returned count as arrived.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// ---- named barriers ----

__device__ __forceinline__ void barrier_sync(int id, int threads) { asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void barrier_arrive(int id, int threads) { asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// True iff `mine` holds for all `threads` threads; one instruction for reduction and barrier.
__device__ __forceinline__ bool barrier_all(int id, int threads, bool mine) {
  uint32_t all;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %3, 0; barrier.cta.red.and.pred q, %1, %2, p; selp.u32 %0, 1, 0, q; }"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(mine))
      : "memory");
  return all != 0;
}
__device__ __forceinline__ bool barrier_any(int id, int threads, bool mine) { return !barrier_all(id, threads, !mine); }

// ---- copies ----

// What this thread read and wrote in shared memory before comes before what the copy engine writes there, once it is told to.
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Load a box of a rank-5 tensor map into shared memory; elements outside the tensor arrive as zeros. Coordinates innermost first; the first is 0.
__device__ __forceinline__ void tma_load(uint32_t target_smem, const CUtensorMap* map, uint32_t barrier, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(target_smem),
      "l"(map), "r"(barrier), "r"(0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
// The same into the same place of every CTA in `mask`, each counting the bytes on its own barrier.
__device__ __forceinline__ void tma_load_multicast(uint32_t target_smem, const CUtensorMap* map, uint32_t barrier, int c1, int c2, int c3, int c4, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(target_smem),
      "l"(map), "r"(barrier), "r"(0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(mask)
      : "memory");
}

// Eight bytes at once, and not moved: so that no more are held than are used next.
template <typename Pair>
__device__ __forceinline__ Pair load_pair(const Pair* address) {
  static_assert(sizeof(Pair) == 8);
  uint32_t x[2];
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(smem_address(address)) : "memory");
  Pair pair;
  memcpy(&pair, x, sizeof(pair));
  return pair;
}

// In place, or the compiler keeps both versions of a tile's scores, and spills. s = sign * s + bias, and -inf where that is the bias: NaN too.
__device__ __forceinline__ void add_bias(float& s, float sign, float bias) {
  asm volatile("{ .reg .pred p; fma.rn.f32 %0, %0, %1, %2; setp.eq.f32 p, %2, 0fFF800000; @p mov.f32 %0, 0fFF800000; }" : "+f"(s) : "f"(sign), "f"(bias));
}
__device__ __forceinline__ void mask_beyond(float& s, int column, int last) {
  asm volatile("{ .reg .pred p; setp.gt.s32 p, %1, %2; @p mov.f32 %0, 0fFF800000; }" : "+f"(s) : "r"(column), "r"(last));
}

// Four 8x8 matrices of two-byte elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrix(uint32_t* x, uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row_smem) : "memory");
}

// Whether in some lane of the warp a[i] > b[i] or one of them is NaN, or x < 0.
__device__ __forceinline__ bool any_greater_or_negative(const float (&a)[2], const float (&b)[2], int x) {
  uint32_t any;
  asm volatile(
      "{ .reg .pred p; setp.lt.s32 p, %5, 0; setp.gtu.or.f32 p, %1, %2, p; setp.gtu.or.f32 p, %3, %4, p; vote.sync.any.pred p, p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
      : "=r"(any)
      : "f"(a[0]), "f"(b[0]), "f"(a[1]), "f"(b[1]), "r"(x));
  return any != 0;
}

// What all lanes have anyway, in a register of the warp: from there a wgmma takes its descriptors.
__device__ __forceinline__ uint32_t uniform(uint32_t x) {
  uint32_t y;
  asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

// Of a condition that the whole warp agrees on. From a vote the compiler knows that too: behind a branch on it no reconvergence (40 cycles), and in a
// loop that ends by it uniform registers.
__device__ __forceinline__ bool agreed(bool condition) { return __any_sync(~0u, condition); }

// True in one lane of a warp that is together. The compiler knows that it is one: a copy that it starts is not put into a loop over lanes.
__device__ __forceinline__ bool elect() {
  uint32_t mine;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(mine));
  return mine != 0;
}

__device__ __forceinline__ int read_uniform(const int& x) { return static_cast<int>(uniform(*const_cast<const volatile int*>(&x))); }

// ---- registers of a warpgroup ----

template <int kRegisters>
__device__ __forceinline__ void registers_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- arithmetic ----

__device__ __forceinline__ float exp2_approx(float x) {  // 2 ulp, 0 for -inf
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float max_nan(float a, float b) {  // NaN if either is: a NaN score must not get lost in the running maximum
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t y;
  asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t y;
  asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// ---- wgmma ----

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All warps of the group must come to the same one.
template <int kInFlight>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
}
// Ties a register array to this point of the program: reads and writes of it do not move across.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// Shared-memory matrix descriptor for 128-byte swizzled panels of 64 two-byte elements a row: start address, the stride between
// panels (`lead`, used where the panel dimension is the contiguous one) and between groups of 8 rows (1024 bytes).
// This is the low word; the high word is the same for all: swizzle 1 << 30, stride 1024 >> 4. 32-bit sums keep the chain between two wgmma short.
__device__ __forceinline__ uint32_t descriptor(uint32_t address_smem, uint32_t lead_bytes) {
  return ((lead_bytes >> 4) << 16) | ((address_smem >> 4) & 0x3FFF);
}
#define PTX_DESCRIPTOR(NAME, LOW) ".reg .b64 " NAME "; mov.b64 " NAME ", {" LOW ", 0x40000040}; "

#define PTX_F4(a, i) "+f"(a[i]), "+f"(a[i + 1]), "+f"(a[i + 2]), "+f"(a[i + 3])
#define PTX_F16(a, i) PTX_F4(a, i), PTX_F4(a, i + 4), PTX_F4(a, i + 8), PTX_F4(a, i + 12)
#define PTX_F32(a) PTX_F16(a, 0), PTX_F16(a, 16)
#define PTX_F64(a) PTX_F16(a, 0), PTX_F16(a, 16), PTX_F16(a, 32), PTX_F16(a, 48)
#define PTX_REGISTERS_32                                                                                                        \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
  "%26, %27, %28, %29, %30, %31}"
#define PTX_REGISTERS_64                                                                                                        \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
  "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "  \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// scores[64 x 128] (+)= A[64 x 16] B[128 x 16]^T, both from shared memory, K-major.
#define PTX_SCORES(TYPE)                                                                                                        \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; " PTX_DESCRIPTOR("a", "%64") PTX_DESCRIPTOR("b", "%65")                  \
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " PTX_REGISTERS_64 ", a, b, p, 1, 1, 0, 0; }"    \
               : PTX_F64(scores)                                                                                                \
               : "r"(a), "r"(b), "r"(static_cast<int>(accumulate)))
template <typename Element>
__device__ __forceinline__ void wgmma_scores(float (&scores)[64], uint32_t a, uint32_t b, bool accumulate) {
  if constexpr (std::is_same_v<Element, __half>) {
    PTX_SCORES("f16");
  } else {
    PTX_SCORES("bf16");
  }
}

// The same with A from registers.
#define PTX_SCORES_RS(TYPE)                                                                                                     \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; " PTX_DESCRIPTOR("b", "%68")                                             \
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " PTX_REGISTERS_64 ", {%64, %65, %66, %67}, b, p, 1, 1, 0; }" \
               : PTX_F64(scores)                                                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<int>(accumulate)))
template <typename Element>
__device__ __forceinline__ void wgmma_scores(float (&scores)[64], const uint32_t* a, uint32_t b, bool accumulate) {
  if constexpr (std::is_same_v<Element, __half>) {
    PTX_SCORES_RS("f16");
  } else {
    PTX_SCORES_RS("bf16");
  }
}

// out[64 x N] += P[64 x 16] V[16 x N], P from registers, V from shared memory with N contiguous.
#define PTX_OUT_128(TYPE)                                                                                                      \
  asm volatile("{ " PTX_DESCRIPTOR("b", "%68") "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " " PTX_REGISTERS_64                                \
               ", {%64, %65, %66, %67}, b, 1, 1, 1, 1; }"                                                                      \
               : PTX_F64(out)                                                                                                   \
               : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "r"(v))
#define PTX_OUT_64(TYPE)                                                                                                       \
  asm volatile("{ " PTX_DESCRIPTOR("b", "%36") "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " PTX_REGISTERS_32                                 \
               ", {%32, %33, %34, %35}, b, 1, 1, 1, 1; }"                                                                      \
               : PTX_F32(out)                                                                                                   \
               : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "r"(v))
template <typename Element>
__device__ __forceinline__ void wgmma_out(float (&out)[64], const uint32_t* p, uint32_t v) {
  if constexpr (std::is_same_v<Element, __half>) {
    PTX_OUT_128("f16");
  } else {
    PTX_OUT_128("bf16");
  }
}
template <typename Element>
__device__ __forceinline__ void wgmma_out(float (&out)[32], const uint32_t* p, uint32_t v) {
  if constexpr (std::is_same_v<Element, __half>) {
    PTX_OUT_64("f16");
  } else {
    PTX_OUT_64("bf16");
  }
}

}  // namespace ptx
