// Partial results over disjoint keys into one, weighted by exp(lse); a part with an infinite lse is neutral.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../element.h"

namespace mla {

// A row is one of B * q * H.
struct MergePartialsParams {
  void* out;          // [rows, width] of `element`, contiguous
  float* lse;         // [rows], contiguous
  const void* outs;   // [parts, rows, width] of `element`, contiguous
  const float* lses;  // [parts, rows], contiguous
  int parts;
  int64_t rows;
  int width;
  Element element;
};

void merge_partials(const MergePartialsParams& params, cudaStream_t stream);

}  // namespace mla
