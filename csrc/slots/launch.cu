#include "kernel.cuh"

namespace mla {
namespace {

dim3 grid_of(int64_t rows, int width) {
  return dim3(static_cast<unsigned>(rows), static_cast<unsigned>((width + kSlotThreads - 1) / kSlotThreads));
}

template <typename Position>
void select(const SelectSlotsParams& p, cudaStream_t stream) {
  if (p.page_bytes == 8) {
    select_slots_kernel<Position, int64_t><<<grid_of(p.rows, p.width), kSlotThreads, 0, stream>>>(p);
  } else {
    select_slots_kernel<Position, int><<<grid_of(p.rows, p.width), kSlotThreads, 0, stream>>>(p);
  }
}

}  // namespace

void select_slots(const SelectSlotsParams& p, cudaStream_t stream) {
  if (p.position_bytes == 8) return select<int64_t>(p, stream);
  select<int>(p, stream);
}

void sanitize_slots(const SanitizeSlotsParams& p, cudaStream_t stream) {
  sanitize_slots_kernel<<<grid_of(p.rows, p.width), kSlotThreads, 0, stream>>>(p);
}

void compact_slots(const CompactSlotsParams& p, cudaStream_t stream) {
  compact_slots_kernel<<<static_cast<unsigned>(p.rows), kSlotThreads, 0, stream>>>(p);
}

}  // namespace mla
