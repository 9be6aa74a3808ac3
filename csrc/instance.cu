// Compiled once per (INSTANCE_TYPE, INSTANCE_HEAD_DIM).
#include <algorithm>
#include <atomic>

#include "kernel.cuh"
#include "launch.h"

template <ElementType kType, int kHeadDim>
cudaError_t launch(const Params& params, bool measures, unsigned ctas, int device, cudaStream_t stream) {
  using Element = std::conditional_t<kType == ElementType::kBFloat16, __nv_bfloat16, __half>;
  constexpr int kBytes = std::max(sizeof(SharedMemory<Element, kHeadDim, Loop::kDense>), sizeof(SharedMemory<Element, kHeadDim, Loop::kAhead>));
  static_assert(kBytes <= 227 * 1024);
  constexpr int kMaxDevices = 64;
  static std::atomic<bool> prepared[kMaxDevices][2];  // more than 48 KB of shared memory must be asked for, once per device and kernel
  const auto kernel = measures ? attention_kernel<Element, kHeadDim, true> : attention_kernel<Element, kHeadDim, false>;
  if (device >= kMaxDevices || !prepared[device][measures].load(std::memory_order_acquire)) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    if (device < kMaxDevices) prepared[device][measures].store(true, std::memory_order_release);
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(params.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params);
}

template cudaError_t launch<ElementType::INSTANCE_TYPE, INSTANCE_HEAD_DIM>(const Params&, bool, unsigned, int, cudaStream_t);
