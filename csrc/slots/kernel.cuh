// Rows of slots, from one of two sources: slots that somebody gave, or DSA's positions through a block table. Whatever
// no row of the cache belongs to is none. A row is written as it comes, or with its valid slots moved to the front.
#pragma once

#include "../device.cuh"
#include "kernel.h"

namespace mla {

constexpr int kSlotThreads = 256;
constexpr int kSlotWarps = kSlotThreads / kWarp;

// 0 <= slot < num_slots, or -1 for none.
struct GivenSlots {
  __device__ __forceinline__ explicit GivenSlots(const GivenSlotsParams& p, int64_t row)
      : row_(p.slots + row * p.stride), end_(p.num_slots) {}

  __device__ __forceinline__ int operator()(int column) const {
    const int slot = row_[column];
    return slot >= 0 && slot < end_ ? slot : -1;
  }

  const int* row_;
  int64_t end_;
};

template <typename Position, typename Page>
struct SelectedSlots {
  __device__ __forceinline__ explicit SelectedSlots(const SelectedSlotsParams& p, int64_t row)
      : page_size_(p.page_size), end_(p.num_slots), last_page_((p.num_slots - 1) / p.page_size) {
    const int64_t request = row / p.q_len, position = row % p.q_len;
    row_ = static_cast<const Position*>(p.positions) + request * p.positions_request_stride +
           position * p.positions_position_stride;
    table_ = static_cast<const Page*>(p.table) + request * p.table_stride;
    keys_ = p.table_width * p.page_size;
    if (p.seq_lens != nullptr) keys_ = min(keys_, static_cast<int64_t>(p.seq_lens[request]));
  }

  __device__ __forceinline__ int operator()(int column) const {
    const int64_t at = row_[column];
    if (at < 0 || at >= keys_) return -1;
    const int64_t page = at / page_size_;
    const int64_t id = table_[page];
    if (id < 0 || id > last_page_) return -1;  // before the product, which may not fit
    const int64_t slot = id * page_size_ + (at - page * page_size_);
    return slot < end_ ? static_cast<int>(slot) : -1;
  }

  const Position* row_;
  const Page* table_;
  int64_t page_size_, end_, last_page_, keys_;
};

// Block (x, y) has row x and a run of columns.
template <typename Source, typename Params>
__global__ void __launch_bounds__(kSlotThreads)
    slots_kernel(const __grid_constant__ Params from, const __grid_constant__ SlotTableParams to) {
  const int column = blockIdx.y * kSlotThreads + threadIdx.x;
  if (column >= to.width) return;
  const int64_t row = blockIdx.x, request = row / to.q_len, position = row % to.q_len;
  const int slot = column < to.topk ? Source(from, row)(column) : -1;
  to.out[request * to.request_stride + position * to.position_stride + column] = slot;
}

// One block a row, kRounds block widths of columns at a time, all of them loaded before the first is counted; the order
// of the slots is kept.
template <typename Source, typename Params>
__global__ void __launch_bounds__(kSlotThreads)
    compact_kernel(const __grid_constant__ Params from, const __grid_constant__ RowTableParams to) {
  constexpr int kRounds = 8;
  constexpr int kRuns = kRounds * kSlotWarps;  // of a warp's width, in the order of their columns
  static_assert(kRuns == 2 * kWarp);
  __shared__ int valid_before[kRuns];
  __shared__ int valid_here;
  const int64_t row = blockIdx.x;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Source source(from, row);
  int* out = to.out + row * to.stride;
  int count = 0;
  for (int first = 0; first < to.topk; first += kRounds * kSlotThreads) {
    int slots[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int column = first + round * kSlotThreads + threadIdx.x;
      slots[round] = column < to.topk ? source(column) : -1;
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const unsigned valid = __ballot_sync(kAllLanes, slots[round] >= 0);
      if (lane == 0) valid_before[round * kSlotWarps + warp] = __popc(valid);
    }
    __syncthreads();
    if (warp == 0) {
      const int even = valid_before[2 * lane], odd = valid_before[2 * lane + 1];
      int through = even + odd;
#pragma unroll
      for (int behind = 1; behind < kWarp; behind *= 2) {
        const int other = __shfl_up_sync(kAllLanes, through, behind);
        if (lane >= behind) through += other;
      }
      valid_before[2 * lane] = through - even - odd;
      valid_before[2 * lane + 1] = through - odd;
      if (lane == kWarp - 1) valid_here = through;
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int slot = slots[round];
      const unsigned valid = __ballot_sync(kAllLanes, slot >= 0);
      const int at = count + valid_before[round * kSlotWarps + warp] + __popc(valid & ((1u << lane) - 1));
      if (slot >= 0) out[at] = slot / to.page_size * to.rows_per_page + slot % to.page_size;
    }
    count += valid_here;
    __syncthreads();  // the next columns overwrite what was just read
  }
  for (int column = count + threadIdx.x; column < to.width; column += kSlotThreads) out[column] = 0;
  if (threadIdx.x == 0) to.counts[row] = count;
}

}  // namespace mla
