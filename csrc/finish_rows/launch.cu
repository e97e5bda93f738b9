#include "kernel.cuh"

namespace mla {

void finish_rows(const FinishRowsParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(p.tokens);
  if (p.unit == 16) {
    finish_rows_kernel<uint4><<<blocks, kFinishThreads, 0, stream>>>(p);
  } else {
    finish_rows_kernel<uint8_t><<<blocks, kFinishThreads, 0, stream>>>(p);
  }
}

}  // namespace mla
