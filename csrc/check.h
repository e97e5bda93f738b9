// Host side of an export: whether the arguments keep the op's contract, and the launch.
//
// An export returns false, with nothing done, for arguments that break the contract. Python words the refusal then:
// eager calls reach a kernel without a check in Python, which costs as much as the launch.
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

constexpr int kVectorBytes = 16;

inline int item_bytes(const TensorView& x) { return x.dtype().bits * x.dtype().lanes / 8; }

inline Element element_of(const TensorView& x) {
  const DLDataType dtype = x.dtype();
  if (dtype.code == kDLBfloat && dtype.bits == 16) return Element::kBf16;
  if (dtype.code == kDLFloat && dtype.bits == 16) return Element::kFp16;
  TVM_FFI_ICHECK(dtype.code == kDLFloat && dtype.bits == 32);
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

inline bool same_dtype(const TensorView& x, const TensorView& y) {
  const DLDataType a = x.dtype(), b = y.dtype();
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

inline bool is_e4m3(const TensorView& x) { return x.dtype().code == kDLFloat8_e4m3fn; }

inline bool is_bytes(const TensorView& x) { return x.dtype().code == kDLUInt && x.dtype().bits == 8; }

inline bool is_int(const TensorView& x, int bits) { return x.dtype().code == kDLInt && x.dtype().bits == bits; }

inline bool is_float32(const TensorView& x) { return x.dtype().code == kDLFloat && x.dtype().bits == 32; }

// bf16, fp16 or float32.
inline bool is_element(const TensorView& x) {
  const DLDataType dtype = x.dtype();
  return (dtype.code == kDLBfloat && dtype.bits == 16) ||
         (dtype.code == kDLFloat && (dtype.bits == 16 || dtype.bits == 32));
}

inline bool is_one_float(const OptionalTensor& x) {
  return !x.has_value() || (is_float32(x.value()) && x.value().numel() == 1);
}

inline bool is_lengths(const OptionalTensor& x) {
  return !x.has_value() || (is_int(x.value(), 32) && x.value().ndim() == 1 && x.value().IsContiguous());
}

// So many dimensions, none of them empty but perhaps the last, the last dense.
inline bool shaped(const TensorView& x, int ndim) {
  if (x.ndim() != ndim) return false;
  for (int i = 0; i + 1 < ndim; ++i) {
    if (x.size(i) == 0) return false;
  }
  return x.stride(-1) == 1 || x.size(-1) <= 1;
}

// All with memory of one device, and `written` with some for each of its values. A fake tensor has none.
inline bool on_one_device(const TensorView& written, std::initializer_list<TensorView> tensors,
                          std::initializer_list<OptionalTensor> optional = {}) {
  const DLDevice device = written.device();
  if (device.device_type != kDLCUDA) return false;
  const auto here = [&](const TensorView& x) {
    return x.device().device_type == device.device_type && x.device().device_id == device.device_id &&
           (x.data_ptr() != nullptr || x.numel() == 0);
  };
  if (!here(written)) return false;
  for (int i = 0; i < written.ndim(); ++i) {
    if (written.size(i) > 1 && written.stride(i) == 0) return false;
  }
  for (const TensorView& x : tensors) {
    if (!here(x)) return false;
  }
  for (const OptionalTensor& x : optional) {
    if (x.has_value() && !here(x.value())) return false;
  }
  return true;
}

constexpr int kVectorValues = 8;

// A stride that nothing steps over may be anything in torch; 0 keeps it from deciding an address or an alignment.
inline int64_t step(const TensorView& x, int dim) { return x.size(dim) > 1 ? x.stride(dim) : 0; }

// Largest access, of 16, 4, 2 and 1 bytes, that divides every base, outer stride and width.
inline int access_bytes(std::initializer_list<TensorView> tensors) {
  for (int unit : {16, 4, 2}) {
    bool fits = true;
    for (const TensorView& x : tensors) fits = fits && aligned(x, unit) && x.size(-1) * item_bytes(x) % unit == 0;
    if (fits) return unit;
  }
  return 1;
}

// B * q_len tokens of seq_lens [B], or ragged by cu_q_lens [B + 1].
inline bool requests_fit(int64_t tokens, const OptionalTensor& seq_lens, const OptionalTensor& cu_q_lens,
                         int64_t q_len) {
  if (!is_lengths(seq_lens) || !is_lengths(cu_q_lens)) return false;
  if (cu_q_lens.has_value()) {
    const int64_t ends = cu_q_lens.value().size(0);
    return ends >= 1 && (!seq_lens.has_value() || ends == seq_lens.value().size(0) + 1);
  }
  return q_len >= 1 && (!seq_lens.has_value() || seq_lens.value().size(0) * q_len == tokens);
}

// Makes the tensor's device current and holds torch's current stream of it; throws on what a launch left behind.
class Launch {
 public:
  explicit Launch(const TensorView& x)
      : guard_(x.device().device_id),
        stream_(static_cast<cudaStream_t>(TVMFFIEnvGetStream(x.device().device_type, x.device().device_id))) {}

  cudaStream_t stream() const { return stream_; }

  void check() const { TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError()); }

 private:
  tvm::ffi::CUDADeviceGuard guard_;
  cudaStream_t stream_;
};

}  // namespace mla
