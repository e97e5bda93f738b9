// Which request a token belongs to, found by a whole block at once.
#pragma once

#include <cstdint>

namespace mla {

struct Request {
  int index;   // meaningless where not held
  int behind;  // 0 for the request's last token, -1 for the one before it
  bool held;   // false past the end of the last request
};

// Every thread of the block calls this; every thread gets the answer. The request is the number of ends at or before
// the token, counted a block's width at a time: one wait on memory instead of a binary search's many.
__device__ __forceinline__ Request request_of(int64_t token, const int* cu_q_lens, int requests, int q_len) {
  if (cu_q_lens == nullptr) {
    const int64_t index = token / q_len;
    return {static_cast<int>(index), static_cast<int>(token - index * q_len) - q_len + 1, true};
  }
  int index = 0;
  for (int first = 0; first < requests; first += blockDim.x) {
    const int i = first + threadIdx.x;
    const int passed = __syncthreads_count(i < requests && cu_q_lens[i + 1] <= token);
    index += passed;
    if (passed < static_cast<int>(blockDim.x)) break;
  }
  if (index >= requests) return {0, 0, false};
  return {index, static_cast<int>(token - cu_q_lens[index + 1]) + 1, true};
}

}  // namespace mla
