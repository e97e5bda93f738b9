// Two rows side by side: nope and rope into one query row. With nope_bytes 0 it is the rope tail alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace mla {

// Strides in bytes, as the kernel does not care what it moves.
struct ConcatParams {
  char* out;         // [tokens, heads, nope_bytes + rope_bytes]
  const char* nope;  // [tokens, heads, nope_bytes], null if nope_bytes is 0
  const char* rope;  // [tokens, heads, rope_bytes], a head stride of 0 gives one head to all; null if rope_bytes is 0
  int64_t tokens;
  int heads;
  int nope_bytes;
  int rope_bytes;
  int64_t out_token_stride;
  int64_t out_head_stride;
  int64_t nope_token_stride;
  int64_t nope_head_stride;
  int64_t rope_token_stride;
  int64_t rope_head_stride;
  int unit;  // bytes of one access: 16, 4, 2 or 1; divides bases, strides and widths
};

void concat(const ConcatParams& params, cudaStream_t stream);

}  // namespace mla
