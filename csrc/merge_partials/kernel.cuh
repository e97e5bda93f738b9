#pragma once

#include "../device.cuh"
#include "kernel.h"

namespace mla {

constexpr int kMergeThreads = 128;

// One warp a row.
template <typename T>
__global__ void __launch_bounds__(kMergeThreads) merge_partials_kernel(const __grid_constant__ MergePartialsParams p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kMergeThreads / kWarp) + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (row >= p.rows) return;
  float top = -INFINITY;
  bool undefined = false;  // fmaxf drops a NaN, which has to reach the result
  for (int part = 0; part < p.parts; ++part) {
    const float lse = p.lses[part * p.rows + row];
    undefined = undefined || isnan(lse);
    if (!isinf(lse)) top = fmaxf(top, lse);
  }
  float total = 0.0f;
  for (int part = 0; part < p.parts; ++part) {
    const float lse = p.lses[part * p.rows + row];
    if (!isinf(lse)) total += expf(lse - top);
  }
  if (undefined) total = NAN;
  const float divisor = total == 0.0f ? 1.0f : total;
  for (int column = lane; column < p.width; column += kWarp) {
    float sum = 0.0f;
    for (int part = 0; part < p.parts; ++part) {
      const float lse = p.lses[part * p.rows + row];
      if (isinf(lse)) continue;
      sum += expf(lse - top) * as_float(static_cast<const T*>(p.outs)[(part * p.rows + row) * p.width + column]);
    }
    static_cast<T*>(p.out)[row * p.width + column] = from_float<T>(sum / divisor);
  }
  if (lane == 0) p.lse[row] = total == 0.0f ? -INFINITY : top + logf(total);
}

}  // namespace mla
