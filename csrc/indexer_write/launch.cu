#include "kernel.cuh"

namespace mla {

void write_indexer(const IndexerWriteParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.tokens + kIndexerTokens - 1) / kIndexerTokens);
  with_element(p.element, [&](auto value) {
    using T = decltype(value);
    if (p.aligned) {
      write_indexer_kernel<T, true><<<blocks, kIndexerThreads, 0, stream>>>(p);
    } else {
      write_indexer_kernel<T, false><<<blocks, kIndexerThreads, 0, stream>>>(p);
    }
  });
}

}  // namespace mla
