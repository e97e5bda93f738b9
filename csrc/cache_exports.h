// The exports that write cache rows.
#pragma once

#include <cmath>
#include <optional>

#include "cache_write/kernel.h"
#include "indexer_write/kernel.h"
#include "query_exports.h"

namespace mla {

// The format of that name if data, kv_c, k_pe and the scale are what it takes.
inline std::optional<RowFormat> row_format(const tvm::ffi::String& name, const TensorView& data, const TensorView& kv_c,
                                           const TensorView& k_pe, const OptionalTensor& kv_scale,
                                           double kv_scale_value) {
  const int64_t rank = kv_c.size(1), rope = k_pe.size(1), row = data.size(2);
  const DLDataType dtype = data.dtype();
  if (name == "fp8") {
    const bool fits = (is_e4m3(data) || is_bytes(data)) && row == rank + rope && is_one_float(kv_scale) &&
                      kv_scale_value > 0 && std::isfinite(kv_scale_value);
    return fits ? std::optional(RowFormat::kFp8) : std::nullopt;
  }
  if (kv_scale.has_value()) return std::nullopt;
  if (name == "fp8_ds_mla") {
    const bool fits = is_bytes(data) && rank == 512 && rope == 64 && row == 656;
    return fits ? std::optional(RowFormat::kFp8DsMla) : std::nullopt;
  }
  const bool named = (name == "bf16" && dtype.code == kDLBfloat) ||
                     (name == "fp16" && dtype.code == kDLFloat && dtype.bits == 16) ||
                     (name == "fp32" && is_float32(data));
  return named && same_dtype(data, kv_c) && row == rank + rope ? std::optional(RowFormat::kCopy) : std::nullopt;
}

inline bool slots_fit(const TensorView& slots, const TensorView& rows) {
  return is_int(slots, 64) && slots.ndim() == 1 && slots.size(0) > 0 && shaped(rows, 2) && is_element(rows) &&
         rows.size(0) >= slots.size(0);
}

inline bool write_fits(const TensorView& data, const TensorView& kv_c, const TensorView& k_pe,
                       const TensorView& slots) {
  return shaped(data, 3) && slots_fit(slots, kv_c) && slots_fit(slots, k_pe) && same_dtype(kv_c, k_pe) &&
         on_one_device(data, {kv_c, k_pe, slots});
}

inline CacheWriteParams cache_write(const TensorView& data, const TensorView& kv_c, const TensorView& k_pe,
                                    const TensorView& slots, RowFormat format, const OptionalTensor& kv_scale,
                                    double kv_scale_value) {
  const int64_t item = item_bytes(data), rank = kv_c.size(1), rope = k_pe.size(1);
  return CacheWriteParams{
      .data = data_of<char>(data),
      .kv_c = data_of<char>(kv_c),
      .k_pe = data_of<char>(k_pe),
      .slots = data_of<int64_t>(slots),
      .kv_scale = data_of<float>(kv_scale),
      .kv_scale_value = static_cast<float>(kv_scale_value),
      .tokens = slots.size(0),
      .num_slots = data.size(0) * data.size(1),
      .page_size = data.size(1),
      .page_stride = step(data, 0) * item,
      .row_stride = step(data, 1) * item,
      .kv_c_stride = step(kv_c, 0),
      .k_pe_stride = step(k_pe, 0),
      .slot_stride = step(slots, 0),
      .rank = static_cast<int>(rank),
      .rope = static_cast<int>(rope),
      .format = format,
      .element = element_of(kv_c),
      .aligned = all_aligned({data, kv_c, k_pe}) && rank % kVectorValues == 0 && rope % kVectorValues == 0,
      .query_rope = nullptr,
      .query_from = nullptr,
      .query_tokens = 0,
      .query_heads = 0,
      .query_rope_bytes = 0,
      .query_rope_token_stride = 0,
      .query_rope_head_stride = 0,
      .query_from_token_stride = 0,
      .query_from_head_stride = 0,
  };
}

inline bool write_cache_op(TensorView data, TensorView kv_c, TensorView k_pe, TensorView slots, tvm::ffi::String format,
                           OptionalTensor kv_scale, double kv_scale_value) {
  if (!write_fits(data, kv_c, k_pe, slots) || !on_one_device(data, {}, {kv_scale})) return false;
  const std::optional<RowFormat> row = row_format(format, data, kv_c, k_pe, kv_scale, kv_scale_value);
  if (!row.has_value()) return false;
  const Launch launch(data);
  write_cache(cache_write(data, kv_c, k_pe, slots, *row, kv_scale, kv_scale_value), launch.stream());
  launch.check();
  return true;
}

inline bool write_cache_and_rope(TensorView rope, TensorView q_pe, TensorView data, TensorView kv_c, TensorView k_pe,
                                 TensorView slots, tvm::ffi::String format, OptionalTensor kv_scale,
                                 double kv_scale_value) {
  if (!write_fits(data, kv_c, k_pe, slots) || !tail_fits(rope, q_pe, OptionalTensor()) || q_pe.size(2) == 0 ||
      !on_one_device(data, {rope}, {kv_scale})) {
    return false;
  }
  const std::optional<RowFormat> row = row_format(format, data, kv_c, k_pe, kv_scale, kv_scale_value);
  if (!row.has_value()) return false;
  CacheWriteParams params = cache_write(data, kv_c, k_pe, slots, *row, kv_scale, kv_scale_value);
  const int item = item_bytes(q_pe);
  params.query_rope = data_of<char>(rope);
  params.query_from = data_of<char>(q_pe);
  params.query_tokens = q_pe.size(0);
  params.query_heads = static_cast<int>(q_pe.size(1));
  params.query_rope_bytes = static_cast<int>(q_pe.size(2)) * item;
  params.query_rope_token_stride = step(rope, 0) * item;
  params.query_rope_head_stride = step(rope, 1) * item;
  params.query_from_token_stride = step(q_pe, 0) * item;
  params.query_from_head_stride = step(q_pe, 1) * item;
  params.aligned = params.aligned && access_bytes({rope, q_pe}) == kVectorBytes;
  const Launch launch(data);
  write_cache(params, launch.stream());
  launch.check();
  return true;
}

inline bool write_indexer_cache(TensorView data, TensorView k, TensorView slots) {
  constexpr int64_t kKeyBytes = 128, kRowBytes = 132;
  const bool fits = shaped(data, 3) && is_bytes(data) && data.size(2) == kRowBytes &&
                    (data.size(1) == 1 || data.stride(1) == kRowBytes) && slots_fit(slots, k) &&
                    k.size(1) == kKeyBytes && on_one_device(data, {k, slots});
  if (!fits) return false;
  const Launch launch(data);
  write_indexer(
      IndexerWriteParams{
          .data = data_of<uint8_t>(data),
          .k = data_of<char>(k),
          .slots = data_of<int64_t>(slots),
          .tokens = slots.size(0),
          .num_slots = data.size(0) * data.size(1),
          .page_size = data.size(1),
          .page_stride = step(data, 0),
          .k_stride = step(k, 0),
          .slot_stride = step(slots, 0),
          .element = element_of(k),
          .aligned = aligned(k) && aligned(data, 4) && data.size(1) % 2 == 0 && step(data, 0) % 8 == 0 &&
                     reinterpret_cast<uintptr_t>(data.data_ptr()) % 8 == 0,
      },
      launch.stream());
  launch.check();
  return true;
}

}  // namespace mla
