#include "kernel.cuh"

namespace mla {
namespace {

template <typename Unit, int kLanes>
void launch(const ConcatParams& p, cudaStream_t stream) {
  constexpr int kHeads = kConcatThreads / kLanes;
  const dim3 grid(static_cast<unsigned>(p.tokens), static_cast<unsigned>((p.heads + kHeads - 1) / kHeads));
  concat_kernel<Unit, kLanes><<<grid, kConcatThreads, 0, stream>>>(p);
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
