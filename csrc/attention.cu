// The library's entry points: they check a call, describe it to the kernel, launch it. No allocation, no synchronisation.
#include <cudaTypedefs.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "launch.h"

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

#define REQUIRE(condition, error) \
  if (!(condition)) TVM_FFI_THROW(ValueError) << error

void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorString(error);
}

int multiprocessors(int device) {
  int count = 0;
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

// Makes `device` current for the life of the object.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device_) check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;

 private:
  int device_, before_ = 0;
};

// The driver's function, found at run time so that the library loads on machines without a driver.
PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const PFN_cuTensorMapEncodeTiled_v12000 encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result), "cudaGetDriverEntryPointByVersion");
    if (result != cudaDriverEntryPointSuccess) TVM_FFI_THROW(RuntimeError) << "the CUDA driver has no cuTensorMapEncodeTiled; it must be 12.0 or newer";
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

bool is_type(DLDataType type, uint8_t code, uint8_t bits) { return type.code == code && type.bits == bits && type.lanes == 1; }
void* data(const TensorView& tensor) { return static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset(); }

// Tensor [B, H, S, D] as the copy engine sees it: boxes of `rows` tokens x `panels` panels of 64 elements, 128-byte swizzled.
CUtensorMap tensor_map(const TensorView& tensor, const char* name, CUtensorMapDataType type, int rows, int panels) {
  const auto size = [&](int i) { return static_cast<uint64_t>(std::max<int64_t>(tensor.size(i), 1)); };
  const auto stride = [&](int i) {  // in bytes; that of a dimension of size 1 means nothing, but must still be legal
    const int64_t elements = size(i) == 1 ? 8 : tensor.stride(i);
    REQUIRE(elements >= 0 && elements % 8 == 0, name << " must have strides in multiples of 16 bytes, got " << elements << " elements; use .contiguous()");
    return static_cast<uint64_t>(elements) * 2;
  };
  const uint64_t sizes[5] = {kPanel, size(2), size(3) / kPanel, size(1), size(0)}, strides[4] = {stride(2), kPanel * 2, stride(1), stride(0)};
  REQUIRE(tensor.stride(3) == 1, name << " must have a unit last stride, got " << tensor.stride(3) << "; use .contiguous()");
  REQUIRE(reinterpret_cast<uintptr_t>(data(tensor)) % 16 == 0, name << " must start at a multiple of 16 bytes; use .clone()");
  const uint32_t box[5] = {kPanel, static_cast<uint32_t>(rows), static_cast<uint32_t>(panels), 1, 1}, element_strides[5] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = tensor_map_encoder()(&map, type, 5, data(tensor), sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    TVM_FFI_THROW(ValueError) << name << " cannot be described to the copy engine (CUresult " << result << "): sizes " << tensor.shape() << ", strides " << tensor.strides();
  }
  return map;
}

void describe_mask(Params& params, const TensorView& mask, int batch) {
  const auto type = mask.dtype();
  params.mask_type = type.code == kDLBool || is_type(type, kDLUInt, 8) ? MaskType::kBool
                     : is_type(type, kDLFloat, 32)                     ? MaskType::kFloat32
                     : is_type(type, kDLBfloat, 16)                    ? MaskType::kBFloat16
                     : is_type(type, kDLFloat, 16)                     ? MaskType::kFloat16
                                                                       : MaskType::kNone;
  REQUIRE(params.mask_type != MaskType::kNone, "attn_mask must be boolean, float32, bfloat16 or float16");
  const int rank = mask.ndim();
  REQUIRE(rank <= 4, "attn_mask must have at most 4 dimensions, got " << mask.shape());
  for (int i = 0; i < rank; ++i) {  // from the last dimension backwards: keys, rows, heads, batch
    const int64_t size = mask.size(rank - 1 - i);
    const bool fits = size == 1 || (i == 0 && size == params.kv_len) || (i == 3 && size == batch);
    REQUIRE(fits, "attn_mask must broadcast from [batch, 1, 1, keys] = [" << batch << ", 1, 1, " << params.kv_len << "], got " << mask.shape());
  }
  params.mask = data(mask);
  const int64_t bytes = type.bits / 8, key_stride = rank >= 1 && mask.size(rank - 1) > 1 ? bytes * mask.stride(rank - 1) : 0;
  REQUIRE(std::abs(key_stride) <= std::numeric_limits<int>::max(), "attn_mask must not have 2 GB from key to key; use .contiguous()");
  params.mask_stride_key = static_cast<int>(key_stride);
  params.mask_stride_batch = rank == 4 && mask.size(0) > 1 ? bytes * mask.stride(0) : 0;
  params.mask_items = params.mask_stride_batch != 0 ? batch : 1;
  params.marks_tiles = params.tiles <= 32 * kTileWords;
  params.meets_empty_tiles = params.is_causal || !params.marks_tiles;
}

void describe_query_mask(Params& params, const TensorView& mask, int batch) {
  REQUIRE(mask.dtype().code == kDLBool || is_type(mask.dtype(), kDLUInt, 8), "query_mask must be boolean");
  REQUIRE(mask.ndim() == 4 && (mask.size(0) == 1 || mask.size(0) == batch) && mask.size(1) == 1 && (mask.size(2) == 1 || mask.size(2) == params.q_len) && mask.size(3) == 1,
          "query_mask must be [batch, 1, rows, 1] = [" << batch << ", 1, " << params.q_len << ", 1], got " << mask.shape());
  params.query_mask = static_cast<const uint8_t*>(data(mask));
  params.query_mask_stride_batch = mask.size(0) > 1 ? mask.stride(0) : 0;
  params.query_mask_stride_row = mask.size(2) > 1 ? mask.stride(2) : 0;
}

// What both entry points share. query [B,Hq,Sq,D], key and value [B,Hkv,Skv,D], attn_mask from [B,1,1,Skv], query_mask [B,1,Sq,1]; written: out
// [B,Hq,Sq,D] and counts int32 [B,Hq,columns], contiguous. `params` has what differs. On the caller's current stream.
void run(Params params, TensorView query, TensorView key, TensorView value, Optional<TensorView> attn_mask, Optional<TensorView> query_mask, TensorView out,
         TensorView counts, int64_t columns, bool is_causal, double scale, bool own_first, bool measures) {
  const auto type = query.dtype();
  const bool half = is_type(type, kDLFloat, 16);
  REQUIRE(half || is_type(type, kDLBfloat, 16), "query must be bfloat16 or float16");
  for (const TensorView* tensor : {&query, &key, &value, &out}) {
    REQUIRE(tensor->ndim() == 4, "query, key, value and out must have 4 dimensions, got " << tensor->shape());
    REQUIRE(is_type(tensor->dtype(), type.code, 16), "query, key, value and out must have one dtype");
    REQUIRE(tensor->device().device_type == kDLCUDA && tensor->device().device_id == query.device().device_id, "query, key, value and out must be on one CUDA device");
  }
  const int64_t batch = query.size(0), heads = query.size(1), q_len = query.size(2), head_dim = query.size(3), kv_heads = key.size(1), kv_len = key.size(2);
  REQUIRE(head_dim == 64 || head_dim == 128, "head_dim must be 64 or 128, got " << head_dim);
  REQUIRE(key.size(0) == batch && key.size(3) == head_dim && kv_heads > 0 && heads % kv_heads == 0,
          "key must be [batch, kv_heads, keys, head_dim] with query's batch and head_dim and a divisor of its heads, got " << key.shape() << " for query " << query.shape());
  for (int i = 0; i < 4; ++i) {
    REQUIRE(value.size(i) == key.size(i), "value must have key's shape " << key.shape() << ", got " << value.shape());
    REQUIRE(out.size(i) == query.size(i), "out must have query's shape " << query.shape() << ", got " << out.shape());
  }
  REQUIRE(is_type(counts.dtype(), kDLInt, 32) && counts.IsContiguous() && counts.numel() == columns * batch * heads,
          "counts must be int32 [batch, heads, " << columns << "], contiguous");
  constexpr int64_t kLimit = std::numeric_limits<int>::max() - 2 * kBlockRows;
  REQUIRE(q_len <= kLimit && kv_len <= kLimit, "at most " << kLimit << " rows and keys, got " << q_len << " and " << kv_len);

  const int device = query.device().device_id;
  const DeviceGuard guard(device);
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
  if (batch * heads == 0) return;
  check_cuda(cudaMemsetAsync(data(counts), 0, sizeof(int32_t) * columns * batch * heads, stream), "zeroing counts");
  if (q_len == 0) return;

  const auto map_type = half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const int panels = static_cast<int>(head_dim) / kPanel;
  params.query_map = tensor_map(query, "query", map_type, kGroupRows, panels);
  params.key_maps.whole = tensor_map(key, "key", map_type, kTileKeys, panels);
  params.value_maps.whole = tensor_map(value, "value", map_type, kTileKeys, panels);
  params.out = data(out);
  params.out_stride_batch = out.stride(0);
  params.out_stride_head = out.stride(1);
  params.out_stride_row = out.stride(2);
  REQUIRE(out.stride(3) == 1 && reinterpret_cast<uintptr_t>(params.out) % 16 == 0 && out.stride(0) % 8 == 0 && out.stride(1) % 8 == 0 && out.stride(2) % 8 == 0,
          "out must have a unit last stride, and start and other strides in multiples of 16 bytes");
  params.counts = static_cast<int32_t*>(data(counts));
  params.heads = static_cast<int>(heads);
  params.heads_per_kv_head = static_cast<int>(heads / kv_heads);
  params.q_len = static_cast<int>(q_len);
  params.kv_len = static_cast<int>(kv_len);
  params.tiles = static_cast<int>((kv_len + kTileKeys - 1) / kTileKeys);
  params.tiles_per_half_row = static_cast<double>(kv_len) / (2. * static_cast<double>(q_len) * kTileKeys);
  params.is_causal = is_causal;
  params.own_first = own_first;
  // The loops take the largest raw score for the largest score: a scale that is not positive is applied before, to the raw scores.
  params.sign = static_cast<float>((scale > 0) - (scale < 0));
  params.scale_log2 = scale == 0 ? 1.f : static_cast<float>(std::abs(scale) * 1.4426950408889634);
  params.bias_unit = 1.4426950408889634f / params.scale_log2;
  if (attn_mask.has_value()) describe_mask(params, attn_mask.value(), static_cast<int>(batch));
  if (query_mask.has_value()) describe_query_mask(params, query_mask.value(), static_cast<int>(batch));
  // Without votes a pair of CTAs shares copies (see load.cuh); an odd number of blocks costs an idle one in each head.
  const int64_t q_blocks = (q_len + kBlockRows - 1) / kBlockRows;
  params.cluster = !attn_mask.has_value() && !measures && !is_causal && (q_blocks % 2 == 0 || q_blocks > 16) ? 2 : 1;
  if (params.cluster > 1) {
    params.key_maps.half = tensor_map(key, "key", map_type, half_keys(panels), 1);
    params.value_maps.half = tensor_map(value, "value", map_type, half_keys(panels), 1);
  }
  params.q_blocks = static_cast<int>((q_blocks + params.cluster - 1) / params.cluster * params.cluster);
  const int64_t blocks = batch * heads * params.q_blocks;
  REQUIRE(blocks <= std::numeric_limits<int>::max() - (1 << 16), "batch * heads * ceil(rows / 128) must be below 2^31 - 2^16, got " << blocks);
  params.blocks = static_cast<int>(blocks);
  const bool marks_fit = !attn_mask.has_value() || (params.marks_tiles && params.mask_items * ((params.tiles + 31) / 32) <= kTileWords);
  const bool could_share = marks_fit && !query_mask.has_value() && !measures && !is_causal && params.threshold_stride == 0 && kv_len > 0;
  const int places = could_share ? multiprocessors(device) / params.cluster * params.cluster : 0;
  params.all_draws = params.blocks + places;
  params.shares_blocks = could_share && blocks > places;
  const auto launch_typed = half ? (head_dim == 128 ? launch<ElementType::kFloat16, 128> : launch<ElementType::kFloat16, 64>)
                                 : (head_dim == 128 ? launch<ElementType::kBFloat16, 128> : launch<ElementType::kBFloat16, 64>);
  check_cuda(launch_typed(params, measures, static_cast<unsigned>(params.shares_blocks ? places : params.blocks), device, stream), "launching the attention kernel");
}

// As above, with threshold float32 [] or [B], and lse float32 [B,Hq,Sq], contiguous, written too.
void attention(TensorView query, TensorView key, TensorView value, TensorView threshold, Optional<TensorView> attn_mask, Optional<TensorView> query_mask,
               TensorView out, TensorView lse, TensorView counts, bool is_causal, double scale, bool own_first) {
  REQUIRE(query.ndim() == 4, "query must have 4 dimensions, got " << query.shape());
  const int64_t batch = query.size(0);
  REQUIRE(is_type(threshold.dtype(), kDLFloat, 32) && (threshold.ndim() == 0 || (threshold.ndim() == 1 && (threshold.size(0) == batch))),
          "threshold must be float32 [] or [batch] = [" << batch << "], got " << threshold.shape());
  REQUIRE(is_type(lse.dtype(), kDLFloat, 32) && lse.IsContiguous() && lse.numel() == batch * query.size(1) * query.size(2), "lse must be float32 [batch, heads, rows], contiguous");
  Params params{};
  params.lse = static_cast<float*>(data(lse));
  params.threshold = static_cast<const float*>(data(threshold));
  params.threshold_stride = threshold.ndim() == 1 && batch > 1 ? threshold.stride(0) : 0;
  run(params, query, key, value, attn_mask, query_mask, out, counts, 2, is_causal, scale, own_first, false);
}

// Dense attention that counts the tiles that each of the lambdas in `thresholds`, float32 [n], would skip. wide: groups of 128 rows, not 64.
void measure(TensorView query, TensorView key, TensorView value, TensorView thresholds, Optional<TensorView> attn_mask, Optional<TensorView> query_mask,
             TensorView out, TensorView counts, bool is_causal, double scale, bool own_first, bool wide) {
  REQUIRE(is_type(thresholds.dtype(), kDLFloat, 32) && thresholds.ndim() == 1 && thresholds.size(0) >= 1 && thresholds.size(0) <= kMostTrials,
          "thresholds must be float32 [n] with n from 1 to " << kMostTrials << ", got " << thresholds.shape());
  Params params{};
  params.threshold = static_cast<const float*>(data(thresholds));
  params.threshold_stride = thresholds.stride(0);
  params.trials = static_cast<int>(thresholds.size(0));
  params.wide = wide;
  run(params, query, key, value, attn_mask, query_mask, out, counts, 1 + params.trials, is_causal, scale, own_first, true);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention, attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(measure, measure);
