#pragma once

#include "../device.cuh"
#include "kernel.h"

namespace mla {

constexpr int kQuantizeThreads = 256;

// kLanes lanes a row; block (x, y) has token x and a group of heads.
template <typename T, int kLanes, bool kAligned>
__global__ void __launch_bounds__(kQuantizeThreads) quantize_kernel(const __grid_constant__ QuantizeParams p) {
  const int head = blockIdx.y * (kQuantizeThreads / kLanes) + threadIdx.x / kLanes;
  if (head >= p.heads) return;
  const int64_t token = blockIdx.x;
  const int lane = threadIdx.x % kLanes;
  const float scale = *p.scale;
  const T* from = reinterpret_cast<const T*>(p.from) + token * p.from_token_stride + head * p.from_head_stride;
  uint8_t* out = p.out + token * p.out_token_stride + head * p.out_head_stride;
  if constexpr (kAligned) {
    for (int i = lane * kVector; i < p.width; i += kLanes * kVector) {
      float values[kVector];
      load_vector<true>(from + i, values);
      divide(values, scale);
      store_bytes<true>(out + i, e4m3_vector(values));
    }
  } else {
    for (int i = lane; i < p.width; i += kLanes) out[i] = e4m3(divided(as_float(from[i]), scale));
  }
}

}  // namespace mla
