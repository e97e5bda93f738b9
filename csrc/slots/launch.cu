#include "kernel.cuh"

namespace mla {
namespace {

template <typename Source, typename Params>
void launch(const Params& from, const SlotTableParams& to, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(to.rows), static_cast<unsigned>((to.width + kSlotThreads - 1) / kSlotThreads));
  slots_kernel<Source><<<grid, kSlotThreads, 0, stream>>>(from, to);
}

template <typename Source, typename Params>
void launch(const Params& from, const RowTableParams& to, cudaStream_t stream) {
  compact_kernel<Source><<<static_cast<unsigned>(to.rows), kSlotThreads, 0, stream>>>(from, to);
}

template <typename Table>
void select(const SelectedSlotsParams& from, const Table& to, cudaStream_t stream) {
  const bool wide_positions = from.position_bytes == 8, wide_pages = from.page_bytes == 8;
  if (wide_positions && wide_pages) return launch<SelectedSlots<int64_t, int64_t>>(from, to, stream);
  if (wide_positions) return launch<SelectedSlots<int64_t, int>>(from, to, stream);
  if (wide_pages) return launch<SelectedSlots<int, int64_t>>(from, to, stream);
  launch<SelectedSlots<int, int>>(from, to, stream);
}

}  // namespace

void sanitize_slots(const GivenSlotsParams& from, const SlotTableParams& to, cudaStream_t stream) {
  launch<GivenSlots>(from, to, stream);
}

void select_slots(const SelectedSlotsParams& from, const SlotTableParams& to, cudaStream_t stream) {
  select(from, to, stream);
}

void compact_slots(const GivenSlotsParams& from, const RowTableParams& to, cudaStream_t stream) {
  launch<GivenSlots>(from, to, stream);
}

void select_rows(const SelectedSlotsParams& from, const RowTableParams& to, cudaStream_t stream) {
  select(from, to, stream);
}

}  // namespace mla
