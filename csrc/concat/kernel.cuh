#pragma once

#include "../device.cuh"
#include "kernel.h"

namespace mla {

constexpr int kConcatThreads = 256;
constexpr int kConcatSteps = 3;  // 512 + 64 bf16 values are 72 vectors: three for a lane, all in flight together

// Streaming: the lines are the first to leave L2 again.
template <bool kStreams, typename Unit>
__device__ __forceinline__ Unit load_unit(const Unit* from) {
  if constexpr (kStreams) {
    return __ldcs(from);
  } else {
    return *from;
  }
}

template <bool kStreams, typename Unit>
__device__ __forceinline__ void store_unit(Unit* to, const Unit& unit) {
  if constexpr (kStreams) {
    __stcs(to, unit);
  } else {
    *to = unit;
  }
}

// kLanes lanes a row; a block has one token and the y-th group of its heads. Blocks run token by token, or, streaming,
// group by group of one token after another, so that the output is written in line.
template <typename Unit, int kLanes, bool kStreams>
__global__ void __launch_bounds__(kConcatThreads) concat_kernel(const __grid_constant__ ConcatParams p) {
  constexpr int kHeads = kConcatThreads / kLanes;
  unsigned token = blockIdx.x, group = blockIdx.y;
  if constexpr (kStreams) {
    const unsigned groups = (p.heads + kHeads - 1) / kHeads;
    token = blockIdx.x / groups;
    group = blockIdx.x % groups;
  }
  const int head = static_cast<int>(group) * kHeads + threadIdx.x / kLanes;
  if (head >= p.heads) return;
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
      if (i < units) held[step] = load_unit<kStreams>(from);
    }
#pragma unroll
    for (int step = 0; step < kConcatSteps; ++step) {
      const int i = first + step * kLanes;
      if (i < units) store_unit<kStreams>(out + i, held[step]);
    }
  }
}

}  // namespace mla
