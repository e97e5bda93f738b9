#pragma once

#include "../device.cuh"
#include "kernel.h"

namespace mla {

constexpr int kQuantizeThreads = 256;

// kLanes lanes a row, kSteps vectors a lane at once; block (x, y) has token x and a group of heads.
template <typename T, int kLanes, int kSteps, bool kAligned>
__global__ void __launch_bounds__(kQuantizeThreads) quantize_kernel(const __grid_constant__ QuantizeParams p) {
  const int head = blockIdx.y * (kQuantizeThreads / kLanes) + threadIdx.x / kLanes;
  if (head >= p.heads) return;
  const int64_t token = blockIdx.x;
  const int lane = threadIdx.x % kLanes;
  const float scale = *p.scale;
  const T* from = reinterpret_cast<const T*>(p.from) + token * p.from_token_stride + head * p.from_head_stride;
  uint8_t* out = p.out + token * p.out_token_stride + head * p.out_head_stride;
  if constexpr (kAligned) {
    // The scale and the first values are asked for before either is used, so that the two waits overlap.
    const int vectors = p.width / kVector;
    float held[kSteps][kVector];
    const auto load = [&](int first) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int i = first + step * kLanes;
        if (i < vectors) load_vector<true>(from + i * kVector, held[step]);
      }
    };
    load(lane);
    const Divisor divided(scale);
    for (int first = lane; first < vectors; first += kLanes * kSteps) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int i = first + step * kLanes;
        if (i >= vectors) continue;
        divided(held[step]);
        store_bytes<true>(out + i * kVector, e4m3_vector(held[step]));
      }
      load(first + kLanes * kSteps);
    }
  } else {
    const Divisor divided(scale);
    for (int i = lane; i < p.width; i += kLanes) out[i] = e4m3(divided(as_float(from[i])));
  }
}

}  // namespace mla
