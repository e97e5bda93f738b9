// A batched product with few rows, read at memory speed, and the rope tail of the same rows in one launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../element.h"

namespace mla {

constexpr int kAbsorbInner = 128;

// Strides in elements. Bases, outer strides and rope_width are multiples of 16 bytes (of 8 for `a`).
struct AbsorbParams {
  void* out;           // [heads, tokens, columns] of `element`, or e4m3 where scale is given
  const void* a;       // [heads, tokens, kAbsorbInner]
  const void* b;       // [heads, kAbsorbInner, columns]
  void* rope_out;      // [heads, tokens, rope_width] as out; null if rope_width is 0
  const void* rope;    // [heads, tokens, rope_width]; null if rope_width is 0
  const float* scale;  // one value on the device, or null
  int heads;
  int tokens;
  int columns;  // a multiple of 256
  int rope_width;
  int64_t out_head_stride;
  int64_t out_token_stride;
  int64_t a_head_stride;
  int64_t a_token_stride;
  int64_t b_head_stride;
  int64_t b_inner_stride;
  int64_t rope_out_head_stride;
  int64_t rope_out_token_stride;
  int64_t rope_head_stride;
  int64_t rope_token_stride;
  Element element;  // bf16 or fp16
};

void absorb(const AbsorbParams& params, cudaStream_t stream);

}  // namespace mla
