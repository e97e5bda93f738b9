#pragma once

#include "../device.cuh"
#include "kernel.h"

namespace mla {

constexpr int kSlotThreads = 256;
constexpr int64_t kMostSlot = 0x7fffffff;

// Block (x, y) has row x and a run of columns.
template <typename Position, typename Page>
__global__ void __launch_bounds__(kSlotThreads) select_slots_kernel(const __grid_constant__ SelectSlotsParams p) {
  const int column = blockIdx.y * kSlotThreads + threadIdx.x;
  if (column >= p.width) return;
  const int64_t request = blockIdx.x / p.q_len, position = blockIdx.x % p.q_len;
  int64_t slot = -1;
  if (column < p.topk) {
    const auto* row = static_cast<const Position*>(p.positions) + request * p.positions_request_stride +
                      position * p.positions_position_stride;
    const int64_t at = row[column];
    const int64_t end = p.seq_lens != nullptr ? p.seq_lens[request] : p.table_width * p.page_size;
    const int64_t page = at < 0 ? -1 : at / p.page_size;
    if (at >= 0 && at < end && page < p.table_width) {
      const int64_t id = static_cast<const Page*>(p.table)[request * p.table_stride + page];
      slot = id * p.page_size + (at - page * p.page_size);
      if (id < 0 || slot > kMostSlot) slot = -1;
    }
  }
  p.out[request * p.out_request_stride + position * p.out_position_stride + column] = static_cast<int>(slot);
}

__global__ void __launch_bounds__(kSlotThreads) sanitize_slots_kernel(const __grid_constant__ SanitizeSlotsParams p) {
  const int column = blockIdx.y * kSlotThreads + threadIdx.x;
  if (column >= p.width) return;
  const int64_t row = blockIdx.x;
  int slot = -1;
  if (column < p.topk) {
    slot = p.slots[row * p.slots_stride + column];
    if (slot < 0 || slot >= p.num_slots) slot = -1;
  }
  p.out[row * p.out_stride + column] = slot;
}

// One block a row, a block's width of columns at a time; the order of the slots is kept.
__global__ void __launch_bounds__(kSlotThreads) compact_slots_kernel(const __grid_constant__ CompactSlotsParams p) {
  __shared__ int warps_valid[kSlotThreads / kWarp];
  const int64_t row = blockIdx.x;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int* out = p.out + row * p.out_stride;
  int count = 0;
  for (int first = 0; first < p.topk; first += kSlotThreads) {
    const int column = first + threadIdx.x;
    const int slot = column < p.topk ? p.slots[row * p.slots_stride + column] : -1;
    const bool valid = slot >= 0 && slot < p.num_slots;
    const unsigned mask = __ballot_sync(kAllLanes, valid);
    if (lane == 0) warps_valid[warp] = __popc(mask);
    __syncthreads();
    int before = count, here = 0;
#pragma unroll
    for (int other = 0; other < kSlotThreads / kWarp; ++other) {
      if (other < warp) before += warps_valid[other];
      here += warps_valid[other];
    }
    if (valid) {
      out[before + __popc(mask & ((1u << lane) - 1))] = slot / p.page_size * p.rows_per_page + slot % p.page_size;
    }
    count += here;
    __syncthreads();  // the next round overwrites warps_valid
  }
  for (int column = count + threadIdx.x; column < p.width; column += kSlotThreads) out[column] = 0;
  if (threadIdx.x == 0) p.counts[row] = count;
}

}  // namespace mla
