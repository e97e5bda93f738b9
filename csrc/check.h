// Host side of an export: what Python promised is asserted and thrown, never printed, and nothing exits.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <initializer_list>

#include "element.h"

namespace mla {

using tvm::ffi::TensorView;
using OptionalTensor = tvm::ffi::Optional<TensorView>;

#define MLA_ASSERT(condition) TVM_FFI_ICHECK(condition)

constexpr int kVectorBytes = 16;

inline int item_bytes(const TensorView& x) { return x.dtype().bits * x.dtype().lanes / 8; }

inline Element element_of(const TensorView& x) {
  const DLDataType dtype = x.dtype();
  if (dtype.code == kDLBfloat && dtype.bits == 16) return Element::kBf16;
  if (dtype.code == kDLFloat && dtype.bits == 16) return Element::kFp16;
  MLA_ASSERT(dtype.code == kDLFloat && dtype.bits == 32);
  return Element::kFp32;
}

template <typename T>
T* data_of(const TensorView& x) {
  return static_cast<T*>(x.data_ptr());
}

template <typename T>
T* data_of(const OptionalTensor& x) {
  return x.has_value() ? static_cast<T*>(x.value().data_ptr()) : nullptr;
}

// Whether the base and every outer stride are multiples of `bytes`; the strides of dimensions of one do not count.
inline bool aligned(const TensorView& x, int64_t bytes = kVectorBytes) {
  if (reinterpret_cast<uintptr_t>(x.data_ptr()) % bytes != 0) return false;
  for (int i = 0; i + 1 < x.ndim(); ++i) {
    if (x.size(i) > 1 && x.stride(i) * item_bytes(x) % bytes != 0) return false;
  }
  return true;
}

inline bool all_aligned(std::initializer_list<TensorView> tensors) {
  for (const TensorView& x : tensors) {
    if (!aligned(x)) return false;
  }
  return true;
}

// Makes the tensor's device current and holds torch's current stream of it; throws on what a launch left behind.
class Launch {
 public:
  explicit Launch(const TensorView& x)
      : guard_(x.device().device_id),
        stream_(static_cast<cudaStream_t>(TVMFFIEnvGetStream(x.device().device_type, x.device().device_id))) {
    MLA_ASSERT(x.device().device_type == kDLCUDA);
  }

  cudaStream_t stream() const { return stream_; }

  void check() const { TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError()); }

 private:
  tvm::ffi::CUDADeviceGuard guard_;
  cudaStream_t stream_;
};

}  // namespace mla
