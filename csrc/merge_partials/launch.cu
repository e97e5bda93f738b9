#include "kernel.cuh"

namespace mla {

void merge_partials(const MergePartialsParams& p, cudaStream_t stream) {
  constexpr int kRows = kMergeThreads / kWarp;
  with_element(p.element, [&](auto value) {
    using T = decltype(value);
    merge_partials_kernel<T><<<static_cast<unsigned>((p.rows + kRows - 1) / kRows), kMergeThreads, 0, stream>>>(p);
  });
}

}  // namespace mla
