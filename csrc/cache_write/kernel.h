// The rows of T tokens into their cache slots, and, where given, the rope tail of a query buffer in the same launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../element.h"

namespace mla {

enum class RowFormat { kCopy, kFp8, kFp8DsMla };

struct CacheWriteParams {
  char* data;             // [pages, page_size, row]; strides in bytes
  const char* kv_c;       // [tokens, rank] of `element`; strides in elements
  const char* k_pe;       // [tokens, rope]
  const int64_t* slots;   // [tokens]; outside [0, num_slots) is skipped
  const float* kv_scale;  // fp8: one value on the device; null: kv_scale_value
  float kv_scale_value;
  int64_t tokens;
  int64_t num_slots;
  int64_t page_size;
  int64_t page_stride;
  int64_t row_stride;
  int64_t kv_c_stride;
  int64_t k_pe_stride;
  int64_t slot_stride;
  int rank;
  int rope;
  RowFormat format;
  Element element;
  bool aligned;  // bases and strides of all, and the widths, allow 16-byte reads and writes of eight values

  char* query_rope;        // [query_tokens, query_heads, query_rope_bytes], strides in bytes; null: no tail
  const char* query_from;  // the same
  int64_t query_tokens;
  int query_heads;
  int query_rope_bytes;
  int64_t query_rope_token_stride;
  int64_t query_rope_head_stride;
  int64_t query_from_token_stride;
  int64_t query_from_head_stride;
};

void write_cache(const CacheWriteParams& params, cudaStream_t stream);

}  // namespace mla
