#include "kernel.cuh"

namespace mla {
namespace {

template <typename T, int kLanes, int kSteps>
void launch(const QuantizeParams& p, cudaStream_t stream) {
  constexpr int kHeads = kQuantizeThreads / kLanes;
  const dim3 grid(static_cast<unsigned>(p.tokens), static_cast<unsigned>((p.heads + kHeads - 1) / kHeads));
  if (p.aligned) {
    quantize_kernel<T, kLanes, kSteps, true><<<grid, kQuantizeThreads, 0, stream>>>(p);
  } else {
    quantize_kernel<T, kLanes, kSteps, false><<<grid, kQuantizeThreads, 0, stream>>>(p);
  }
}

}  // namespace

void quantize(const QuantizeParams& p, cudaStream_t stream) {
  with_element(p.element, [&](auto value) {
    using T = decltype(value);
    if (p.width <= 8 * kVector) return launch<T, 8, 1>(p, stream);
    launch<T, kWarp, 3>(p, stream);  // 512 + 64 values are 72 vectors
  });
}

}  // namespace mla
