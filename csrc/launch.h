// Between the host code and the kernels' own translation units (one per element type and head size, so that they compile in parallel).
#pragma once

#include <cuda_runtime.h>

#include "plan.cuh"

enum class ElementType : int { kBFloat16, kFloat16 };

template <ElementType kType, int kHeadDim>
cudaError_t launch(const Params& params, bool measures, unsigned ctas, int device, cudaStream_t stream);
