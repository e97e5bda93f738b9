// DSA indexer keys as e4m3 with a power-of-two scale each: keys first, then scales, in every page.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../element.h"

namespace mla {

struct IndexerWriteParams {
  uint8_t* data;         // per page: [page_size, 128] e4m3, then [page_size] float32; page_stride in bytes
  const char* k;         // [tokens, 128] of `element`; stride in elements
  const int64_t* slots;  // [tokens]; outside [0, num_slots) is skipped
  int64_t tokens;
  int64_t num_slots;
  int64_t page_size;
  int64_t page_stride;
  int64_t k_stride;
  int64_t slot_stride;
  Element element;
  bool aligned;  // k by 16 bytes, pages by 8
};

void write_indexer(const IndexerWriteParams& params, cudaStream_t stream);

}  // namespace mla
