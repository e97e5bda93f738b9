// A kernel's rows in the one convention: natural lse, and rows that see no key out 0, lse -inf.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace mla {

// Token = request * q_len + position, or ragged. lse strides in elements, out strides in bytes.
struct FinishRowsParams {
  char* out;             // [requests, q_len, heads, row_bytes], or null: left as it is
  float* lse;            // [requests, q_len, heads], or null
  const float* raw_lse;  // the same shape, as the kernel gave it; may be lse; null where lse is
  const int* seq_lens;   // [requests], or null: empty is where raw_lse is infinite
  const int* cu_q_lens;  // [requests + 1], or null; with it q_len counts only for the strides and is 1
  int64_t tokens;
  int requests;
  int q_len;
  int heads;
  int64_t row_bytes;
  int64_t out_request_stride;
  int64_t out_position_stride;
  int64_t out_head_stride;
  int64_t lse_request_stride;
  int64_t lse_position_stride;
  int64_t lse_head_stride;
  int64_t raw_request_stride;
  int64_t raw_position_stride;
  int64_t raw_head_stride;
  bool causal;
  bool base2;
  int unit;  // bytes of one store to out: 16 or 1
};

void finish_rows(const FinishRowsParams& params, cudaStream_t stream);

}  // namespace mla
