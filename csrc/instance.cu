// Compiled once per (INSTANCE_TYPE, INSTANCE_HEAD_DIM).
#include <algorithm>
#include <atomic>

#include "kernel.cuh"
#include "launch.h"

template <ElementType kType, int kHeadDim>
cudaError_t launch(const Params& params, bool masked, bool measures, unsigned ctas, int device, cudaStream_t stream) {
  using Element = std::conditional_t<kType == ElementType::kBFloat16, __nv_bfloat16, __half>;
  constexpr int kPlainBytes = std::max(sizeof(SharedMemory<Element, kHeadDim, Loop::kDense>), sizeof(SharedMemory<Element, kHeadDim, Loop::kAhead>));
  constexpr int kMaskedBytes = sizeof(SharedMemory<Element, kHeadDim, Loop::kMasked>);
  static_assert(kPlainBytes <= 227 * 1024 && kMaskedBytes <= 227 * 1024);
  const int bytes = masked ? kMaskedBytes : kPlainBytes;
  constexpr int kMaxDevices = 64;
  static std::atomic<bool> prepared[kMaxDevices][4];  // more than 48 KB of shared memory must be asked for, once per device and kernel
  constexpr void (*kKernels[])(Params) = {attention_kernel<Element, kHeadDim, false, false>, attention_kernel<Element, kHeadDim, true, false>,
                                          attention_kernel<Element, kHeadDim, false, true>, attention_kernel<Element, kHeadDim, true, true>};
  const int which = 2 * measures + masked;
  const auto kernel = kKernels[which];
  if (device >= kMaxDevices || !prepared[device][which].load(std::memory_order_acquire)) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    if (device < kMaxDevices) prepared[device][which].store(true, std::memory_order_release);
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(params.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

template cudaError_t launch<ElementType::INSTANCE_TYPE, INSTANCE_HEAD_DIM>(const Params&, bool, bool, unsigned, int, cudaStream_t);
