#include "kernel.cuh"

namespace mla {
namespace {

// No L2 of today holds more (a B200's has 126 MB), so whoever reads the output will not find it there.
constexpr int64_t kStreamBytes = int64_t{128} << 20;

template <typename Unit, int kLanes>
void launch(const ConcatParams& p, cudaStream_t stream) {
  constexpr int kHeads = kConcatThreads / kLanes;
  const int64_t groups = (p.heads + kHeads - 1) / kHeads, row_bytes = p.nope_bytes + p.rope_bytes;
  if constexpr (sizeof(Unit) == sizeof(uint4) && kLanes == kWarp) {
    if (p.tokens * p.heads * row_bytes >= kStreamBytes && p.tokens * groups <= 0x7fffffff) {
      concat_kernel<Unit, kLanes, true><<<static_cast<unsigned>(p.tokens * groups), kConcatThreads, 0, stream>>>(p);
      return;
    }
  }
  const dim3 grid(static_cast<unsigned>(p.tokens), static_cast<unsigned>(groups));
  concat_kernel<Unit, kLanes, false><<<grid, kConcatThreads, 0, stream>>>(p);
}

template <typename Unit>
void launch(const ConcatParams& p, cudaStream_t stream) {
  const int units = (p.nope_bytes + p.rope_bytes) / static_cast<int>(sizeof(Unit));
  if (units <= 8) return launch<Unit, 8>(p, stream);
  launch<Unit, kWarp>(p, stream);
}

}  // namespace

void concat(const ConcatParams& p, cudaStream_t stream) {
  switch (p.unit) {
    case 16:
      return launch<uint4>(p, stream);
    case 4:
      return launch<uint32_t>(p, stream);
    case 2:
      return launch<uint16_t>(p, stream);
    default:
      return launch<uint8_t>(p, stream);
  }
}

}  // namespace mla
