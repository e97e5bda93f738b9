// One block a token: most rows are live, and of those only the lse is touched.
#pragma once

#include "../device.cuh"
#include "../request.cuh"
#include "kernel.h"

namespace mla {

constexpr int kFinishThreads = 128;
constexpr float kLn2 = 0.693147180559945309f;

template <typename Unit>
__global__ void __launch_bounds__(kFinishThreads) finish_rows_kernel(const __grid_constant__ FinishRowsParams p) {
  const int64_t token = blockIdx.x;
  const Request request = request_of(token, p.cu_q_lens, p.requests, p.q_len);
  const int64_t major = token / p.q_len, minor = token % p.q_len;
  bool no_key = !request.held;
  if (p.seq_lens != nullptr && request.held) {
    no_key = p.seq_lens[request.index] + (p.causal ? request.behind : 0) <= 0;
  }
  const float* raw_lse = p.raw_lse + major * p.raw_request_stride + minor * p.raw_position_stride;
  float* lse = p.lse + major * p.lse_request_stride + minor * p.lse_position_stride;
  char* out = p.out + major * p.out_request_stride + minor * p.out_position_stride;
  const int units = static_cast<int>(p.row_bytes / static_cast<int64_t>(sizeof(Unit)));
  const int lane = threadIdx.x % kWarp;

  // A warp takes 32 heads: each lane one lse, then together the rows that are empty.
  for (int first = threadIdx.x - lane; first < p.heads; first += kFinishThreads) {
    const int head = first + lane;
    bool empty = no_key;
    if (head < p.heads && p.raw_lse != nullptr) {
      const float raw = raw_lse[head * p.raw_head_stride];
      if (p.seq_lens == nullptr) empty = empty || isinf(raw);
      if (p.lse != nullptr) lse[head * p.lse_head_stride] = empty ? -INFINITY : (p.base2 ? raw * kLn2 : raw);
    }
    if (p.out == nullptr) continue;
    unsigned rows = __ballot_sync(kAllLanes, empty && head < p.heads);
    for (; rows != 0; rows &= rows - 1) {
      auto* row = reinterpret_cast<Unit*>(out + (first + __ffs(rows) - 1) * p.out_head_stride);
      for (int i = lane; i < units; i += kWarp) row[i] = Unit{};
    }
  }
}

}  // namespace mla
