// A maximum does not depend on its order, so blocks may meet in one atomic and every run gives the same bits.
#pragma once

#include "../device.cuh"
#include "../request.cuh"
#include "kernel.h"

namespace mla {

constexpr int kScaleThreads = 512;
constexpr float kLeastQueryScale = 0x1p-64f;

template <typename T, bool kAligned>
__device__ __forceinline__ float row_amax(const T* row, int width, int lane) {
  float amax = 0.0f;
  if constexpr (kAligned) {
    for (int i = lane * kVector; i < width; i += kWarp * kVector) {
      float values[kVector];
      load_vector<true>(row + i, values);
      amax = fmaxf(amax, finite_amax(values));
    }
  } else {
    for (int i = lane; i < width; i += kWarp) amax = fmaxf(amax, finite_magnitude(as_float(row[i])));
  }
  return amax;
}

// Blocks take tokens in turn. *out starts at 0 where there is more than one block; positive floats order as integers.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kScaleThreads) query_scale_kernel(const __grid_constant__ QueryScaleParams p) {
  __shared__ float warps_amax[kScaleThreads / kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float amax = 0.0f;
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const Request request = request_of(token, p.cu_q_lens, p.requests, p.q_len);
    if (!request.held || (p.seq_lens != nullptr && p.seq_lens[request.index] <= 0)) continue;
    const T* latent = reinterpret_cast<const T*>(p.latent) + token * p.latent_token_stride;
    const T* rope = reinterpret_cast<const T*>(p.rope) + token * p.rope_token_stride;
    for (int head = warp; head < p.heads; head += kScaleThreads / kWarp) {
      amax = fmaxf(amax, row_amax<T, kAligned>(latent + head * p.latent_head_stride, p.rank, lane));
      if (p.rope_width > 0)
        amax = fmaxf(amax, row_amax<T, kAligned>(rope + head * p.rope_head_stride, p.rope_width, lane));
    }
  }
  amax = max_over<kWarp>(amax);
  if (lane == 0) warps_amax[warp] = amax;
  __syncthreads();
  if (warp != 0) return;
  amax = max_over<kWarp>(lane < kScaleThreads / kWarp ? warps_amax[lane] : 0.0f);
  if (lane != 0) return;
  const float scale = fmaxf(__fdiv_rn(amax, kE4m3Max), kLeastQueryScale);
  if (gridDim.x == 1) {
    *p.out = scale;
  } else {
    atomicMax(reinterpret_cast<int*>(p.out), __float_as_int(scale));
  }
}

}  // namespace mla
