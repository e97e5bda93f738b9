// What several kernels share on the device: vectors of eight values, e4m3 bytes, power-of-two scales.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "element.h"

namespace mla {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kVector = 8;  // values a lane converts at once: 16 bytes of bf16 or fp16
constexpr float kE4m3Max = 448.0f;

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Eight neighbouring values as float32: 16-byte loads where the caller knows that `from` is aligned.
template <bool kAligned, typename T>
__device__ __forceinline__ void load_vector(const T* from, float (&values)[kVector]) {
  alignas(16) T raw[kVector];
  if constexpr (kAligned) {
    constexpr int kLoads = sizeof(raw) / sizeof(uint4);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) reinterpret_cast<uint4*>(raw)[i] = reinterpret_cast<const uint4*>(from)[i];
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) raw[i] = from[i];
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] = as_float(raw[i]);
}

template <bool kAligned>
__device__ __forceinline__ void store_bytes(uint8_t* to, uint64_t bytes) {
  if constexpr (kAligned) {
    *reinterpret_cast<uint64_t*>(to) = bytes;
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) to[i] = static_cast<uint8_t>(bytes >> (8 * i));
  }
}

// Eight values as bf16. Rounded in pairs: of the bf16 conversion of a single value, ptxas 13.0 stores as its low byte
// the integer that it is near as an fp16 (F2I.U8.F16 in the machine code); a pair is an ordinary register to it.
template <bool kAligned>
__device__ __forceinline__ void store_bf16(uint8_t* to, const float (&values)[kVector]) {
  alignas(16) uint32_t pairs[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
    pairs[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  if constexpr (kAligned) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(pairs);
  } else {
#pragma unroll
    for (int i = 0; i < kVector * 2; ++i) to[i] = static_cast<uint8_t>(pairs[i / 4] >> (8 * (i % 4)));
  }
}

// The e4m3 of x: nearest even, saturated, every NaN as 0x7f (the sign of a NaN differs between machines).
__device__ __forceinline__ uint8_t e4m3(float x) {
  return isnan(x) ? uint8_t{0x7f} : __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

// e4m3 of two values already divided by their scale, the first in the low byte.
__device__ __forceinline__ uint32_t e4m3_pair(float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, __NV_E4M3);  // cvt gives 0x7f for any NaN
#else
  return e4m3(x) | static_cast<uint32_t>(e4m3(y)) << 8;
#endif
}

__device__ __forceinline__ uint64_t e4m3_vector(const float (&values)[kVector]) {
  const uint32_t low = e4m3_pair(values[0], values[1]) | e4m3_pair(values[2], values[3]) << 16;
  const uint32_t high = e4m3_pair(values[4], values[5]) | e4m3_pair(values[6], values[7]) << 16;
  return static_cast<uint64_t>(high) << 32 | low;
}

// x / scale for e4m3, where many x have one scale: the IEEE quotient wherever e4m3 can tell, so that the bytes are
// those of the torch form, without the branches of a full division for each x.
//
// The scale is brought to [1, 2), or below where it is denormal, and x by the same power of two, which is exact. One
// step of refinement leaves the quotient within a unit in the last place; from there a second one rounds it correctly,
// since the inverse is correctly rounded (Markstein, IBM J. Res. Dev. 34, 1990). That takes finite numbers and loses
// the sign of zero: past 1024, where e4m3 has long saturated, and for an infinite scale the product stands, and the
// sign is always the product's.
class Divisor {
 public:
  __device__ __forceinline__ explicit Divisor(float scale) {
    constexpr uint32_t kLargest = 254;  // the biased exponent of the largest finite numbers; 255 has infinity and NaN
    const uint32_t exponent = __float_as_uint(scale) >> 23 & 0xff;
    shrink_ = exponent < kLargest ? __uint_as_float((kLargest - exponent) << 23) : 0x1p-127f;
    divisor_ = scale * shrink_;
    inverse_ = __frcp_rn(divisor_);
    limit_ = exponent <= kLargest ? 1024.0f : 0.0f;
  }

  __device__ __forceinline__ float operator()(float x) const {
    x *= shrink_;
    const float product = x * inverse_;
    float quotient = __fmaf_rn(__fmaf_rn(-divisor_, product, x), inverse_, product);
    quotient = __fmaf_rn(__fmaf_rn(-divisor_, quotient, x), inverse_, quotient);
    return fabsf(product) < limit_ ? copysignf(quotient, product) : product;
  }

  __device__ __forceinline__ void operator()(float (&values)[kVector]) const {
#pragma unroll
    for (float& value : values) value = (*this)(value);
  }

 private:
  float shrink_, divisor_, inverse_, limit_;
};

__device__ __forceinline__ float finite_magnitude(float x) {
  const uint32_t magnitude = __float_as_uint(x) & 0x7fffffffu;
  return magnitude < 0x7f800000u ? __uint_as_float(magnitude) : 0.0f;
}

__device__ __forceinline__ float finite_amax(const float (&values)[kVector]) {
  float amax = 0.0f;
#pragma unroll
  for (float value : values) amax = fmaxf(amax, finite_magnitude(value));
  return amax;
}

// The largest over `kLanes` neighbouring lanes, in each of them.
template <int kLanes>
__device__ __forceinline__ float max_over(float x) {
#pragma unroll
  for (int other = kLanes / 2; other > 0; other /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, other));
  return x;
}

// 2**ceil(log2(x)) of a positive normal x, from its bits: no rounding of a logarithm decides.
__device__ __forceinline__ float power_of_two_above(float x) {
  const uint32_t bits = __float_as_uint(x);
  return __uint_as_float((bits + 0x7fffffu) & 0xff800000u);
}

// Exact: x / scale for a power of two.
__device__ __forceinline__ void divide_by_power_of_two(float (&values)[kVector], float scale) {
  const float inverse = __uint_as_float((254u << 23) - __float_as_uint(scale));
#pragma unroll
  for (float& value : values) value *= inverse;
}

struct Place {
  int64_t page;
  int64_t offset;
};

// A slot's page and offset. 32-bit division where it fits: the 64-bit one costs a hundred instructions.
__device__ __forceinline__ Place place_of(int64_t slot, int64_t num_slots, int64_t page_size) {
  if (num_slots <= 0x7fffffff) {
    const auto narrow = static_cast<uint32_t>(slot), size = static_cast<uint32_t>(page_size);
    const uint32_t page = narrow / size;
    return {page, narrow - page * size};
  }
  return {slot / page_size, slot % page_size};
}

}  // namespace mla
