// Slot tables as sparse kernels read them: from positions, with every bad slot none, or moved to the front.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace mla {

// Strides in elements, last strides 1.
struct SelectSlotsParams {
  int* out;               // [requests, q_len, width], -1 for none
  const void* positions;  // [requests, q_len, topk] of position_bytes
  const void* table;      // [requests, table_width] of page_bytes
  const int* seq_lens;    // [requests], or null
  int64_t rows;           // requests * q_len
  int q_len;
  int width;
  int topk;
  int64_t table_width;
  int64_t page_size;
  int64_t out_request_stride;
  int64_t out_position_stride;
  int64_t positions_request_stride;
  int64_t positions_position_stride;
  int64_t table_stride;
  int position_bytes;  // 4 or 8
  int page_bytes;      // 4 or 8
};

void select_slots(const SelectSlotsParams& params, cudaStream_t stream);

struct SanitizeSlotsParams {
  int* out;          // [rows, width]; may be slots
  const int* slots;  // [rows, topk]
  int64_t rows;
  int width;
  int topk;
  int64_t num_slots;
  int64_t out_stride;
  int64_t slots_stride;
};

void sanitize_slots(const SanitizeSlotsParams& params, cudaStream_t stream);

struct CompactSlotsParams {
  int* out;          // [rows, width]: (slot / page_size) * rows_per_page + slot % page_size, then 0
  int* counts;       // [rows]
  const int* slots;  // [rows, topk]
  int64_t rows;
  int width;
  int topk;
  int64_t num_slots;
  int page_size;
  int rows_per_page;
  int64_t out_stride;
  int64_t slots_stride;
};

void compact_slots(const CompactSlotsParams& params, cudaStream_t stream);

}  // namespace mla
