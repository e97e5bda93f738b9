// Query rows to e4m3 by a scale on the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../element.h"

namespace mla {

// Strides in elements.
struct QuantizeParams {
  uint8_t* out;        // [tokens, heads, width] e4m3
  const char* from;    // [tokens, heads, width] of `element`
  const float* scale;  // one value on the device
  int64_t tokens;
  int heads;
  int width;
  int64_t out_token_stride;
  int64_t out_head_stride;
  int64_t from_token_stride;
  int64_t from_head_stride;
  Element element;
  bool aligned;  // `from` by 16 bytes, `out` by 8, width a multiple of 8
};

void quantize(const QuantizeParams& params, cudaStream_t stream);

}  // namespace mla
