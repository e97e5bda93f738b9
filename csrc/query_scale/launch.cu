#include <algorithm>

#include "kernel.cuh"

namespace mla {
namespace {

// One block reads this much about as fast as a second graph node starts (the memset that several blocks need).
constexpr int64_t kOneBlockBytes = 160 * 1024;
constexpr int64_t kMostBlocks = 1024;

}  // namespace

cudaError_t query_scale(const QueryScaleParams& p, cudaStream_t stream) {
  const int64_t bytes = p.tokens * p.heads * (p.rank + p.rope_width) * bytes_of(p.element);
  const int64_t blocks = bytes <= kOneBlockBytes ? 1 : std::min(p.tokens, kMostBlocks);
  if (blocks > 1) {
    const cudaError_t cleared = cudaMemsetAsync(p.out, 0, sizeof(float), stream);
    if (cleared != cudaSuccess) return cleared;
  }
  with_element(p.element, [&](auto value) {
    using T = decltype(value);
    if (p.aligned) {
      query_scale_kernel<T, true><<<static_cast<unsigned>(blocks), kScaleThreads, 0, stream>>>(p);
    } else {
      query_scale_kernel<T, false><<<static_cast<unsigned>(blocks), kScaleThreads, 0, stream>>>(p);
    }
  });
  return cudaSuccess;
}

}  // namespace mla
