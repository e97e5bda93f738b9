#pragma once

#include "../device.cuh"
#include "kernel.h"

namespace mla {

constexpr int kConcatThreads = 256;
constexpr int kConcatSteps = 3;  // 512 + 64 bf16 values are 72 vectors: three for a lane, all in flight together

// kLanes lanes a row; block (x, y) has token x and a group of heads.
template <typename Unit, int kLanes>
__global__ void __launch_bounds__(kConcatThreads) concat_kernel(const __grid_constant__ ConcatParams p) {
  const int head = blockIdx.y * (kConcatThreads / kLanes) + threadIdx.x / kLanes;
  if (head >= p.heads) return;
  const int64_t token = blockIdx.x;
  const int lane = threadIdx.x % kLanes;
  const int nope_units = p.nope_bytes / static_cast<int>(sizeof(Unit));
  const int units = nope_units + p.rope_bytes / static_cast<int>(sizeof(Unit));
  const auto* nope = reinterpret_cast<const Unit*>(p.nope + token * p.nope_token_stride + head * p.nope_head_stride);
  const auto* rope = reinterpret_cast<const Unit*>(p.rope + token * p.rope_token_stride + head * p.rope_head_stride);
  auto* out = reinterpret_cast<Unit*>(p.out + token * p.out_token_stride + head * p.out_head_stride);

  for (int first = lane; first < units; first += kLanes * kConcatSteps) {
    Unit held[kConcatSteps];
#pragma unroll
    for (int step = 0; step < kConcatSteps; ++step) {
      const int i = first + step * kLanes;
      const Unit* from = i < nope_units ? nope + i : rope + (i - nope_units);
      if (i < units) held[step] = *from;
    }
#pragma unroll
    for (int step = 0; step < kConcatSteps; ++step) {
      const int i = first + step * kLanes;
      if (i < units) out[i] = held[step];
    }
  }
}

}  // namespace mla
