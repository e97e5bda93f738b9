#include "kernel.cuh"

namespace mla {
namespace {

// Below this many blocks of four column tiles the multiprocessors are not all busy, so four warps split the inner
// dimension of one column tile instead.
constexpr int kFewBlocks = 132;

template <typename T, int kInnerWarps, int kSteps>
void launch(const AbsorbParams& p, cudaStream_t stream) {
  const int columns = kAbsorbWarps / kInnerWarps * kWarpColumns;
  const dim3 grid(static_cast<unsigned>(p.columns / columns), static_cast<unsigned>(p.heads));
  absorb_kernel<T, kInnerWarps, kSteps><<<grid, kAbsorbThreads, 0, stream>>>(p);
}

template <typename T>
void launch(const AbsorbParams& p, cudaStream_t stream) {
  if (p.heads * (p.columns / (kAbsorbWarps * kWarpColumns)) < kFewBlocks) return launch<T, 4, 2>(p, stream);
  launch<T, 1, 8>(p, stream);
}

}  // namespace

void absorb(const AbsorbParams& p, cudaStream_t stream) {
  if (p.element == Element::kFp16) return launch<__half>(p, stream);
  launch<__nv_bfloat16>(p, stream);
}

}  // namespace mla
