// max |q| / 448 over the finite values of live rows, for an e4m3 query.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../element.h"

namespace mla {

// Strides in elements.
struct QueryScaleParams {
  float* out;            // one value
  const char* latent;    // [tokens, heads, rank] of `element`
  const char* rope;      // [tokens, heads, rope_width]; null if rope_width is 0
  const int* seq_lens;   // [requests], or null: every request is live
  const int* cu_q_lens;  // [requests + 1], or null: request = token / q_len
  int64_t tokens;
  int requests;
  int q_len;
  int heads;
  int rank;
  int rope_width;
  int64_t latent_token_stride;
  int64_t latent_head_stride;
  int64_t rope_token_stride;
  int64_t rope_head_stride;
  Element element;
  bool aligned;  // by 16 bytes, widths multiples of 8
};

cudaError_t query_scale(const QueryScaleParams& params, cudaStream_t stream);

}  // namespace mla
