// Slot tables as sparse kernels read them: every bad slot none, or the good ones moved to the front.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace mla {

// Strides in elements, last strides 1. A row is request * q_len + position.

struct GivenSlotsParams {
  const int* slots;  // [rows, topk]
  int64_t stride;
  int64_t num_slots;  // slots outside 0 <= slot < num_slots are none
};

struct SelectedSlotsParams {
  const void* positions;  // [requests, q_len, topk] of position_bytes
  const void* table;      // [requests, table_width] of page_bytes
  const int* seq_lens;    // [requests], or null
  int64_t num_slots;      // 1 to 2**31
  int q_len;
  int64_t table_width;
  int64_t page_size;
  int64_t positions_request_stride;
  int64_t positions_position_stride;
  int64_t table_stride;
  int position_bytes;  // 4 or 8
  int page_bytes;      // 4 or 8
};

struct SlotTableParams {
  int* out;  // [requests, q_len, width], -1 for none
  int64_t rows;
  int q_len;
  int width;
  int topk;
  int64_t request_stride;
  int64_t position_stride;
};

struct RowTableParams {
  int* out;     // [rows, width]: (slot / page_size) * rows_per_page + slot % page_size of the valid ones, then 0
  int* counts;  // [rows]
  int64_t rows;
  int width;
  int topk;
  int page_size;
  int rows_per_page;
  int64_t stride;
};

// `out` may be the slots.
void sanitize_slots(const GivenSlotsParams& from, const SlotTableParams& to, cudaStream_t stream);
void select_slots(const SelectedSlotsParams& from, const SlotTableParams& to, cudaStream_t stream);
void compact_slots(const GivenSlotsParams& from, const RowTableParams& to, cudaStream_t stream);
void select_rows(const SelectedSlotsParams& from, const RowTableParams& to, cudaStream_t stream);

}  // namespace mla
