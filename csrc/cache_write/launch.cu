#include "kernel.cuh"

namespace mla {
namespace {

unsigned blocks(const CacheWriteParams& p) {
  constexpr int kHeads = kWriteThreads / 8;
  const int64_t cache = (p.tokens + kWriteWarps - 1) / kWriteWarps;
  const int64_t query = p.query_rope == nullptr ? 0 : p.query_tokens * ((p.query_heads + kHeads - 1) / kHeads);
  return static_cast<unsigned>(cache + query);
}

template <typename T, RowFormat kFormat>
void launch(const CacheWriteParams& p, cudaStream_t stream) {
  if (p.aligned) {
    write_cache_kernel<T, kFormat, true><<<blocks(p), kWriteThreads, 0, stream>>>(p);
  } else {
    write_cache_kernel<T, kFormat, false><<<blocks(p), kWriteThreads, 0, stream>>>(p);
  }
}

}  // namespace

void write_cache(const CacheWriteParams& p, cudaStream_t stream) {
  if (p.format == RowFormat::kCopy) return launch<float, RowFormat::kCopy>(p, stream);
  with_element(p.element, [&](auto value) {
    using T = decltype(value);
    if (p.format == RowFormat::kFp8) return launch<T, RowFormat::kFp8>(p, stream);
    launch<T, RowFormat::kFp8DsMla>(p, stream);
  });
}

}  // namespace mla
