// The exports on finished rows and on slots.
#pragma once

#include <algorithm>

#include "check.h"
#include "finish_rows/kernel.h"
#include "merge_partials/kernel.h"
#include "slots/kernel.h"

namespace mla {

// The rows' strides of [requests, q_len, heads, ..] or of [tokens, heads, ..], where token = request * q_len +
// position.
struct RowStrides {
  int64_t request, position, head;
};

inline RowStrides row_strides(const OptionalTensor& tensor, int trailing, int64_t q_len) {
  if (!tensor.has_value()) return {0, 0, 0};
  const TensorView x = tensor.value();
  if (x.ndim() == 3 + trailing) return {x.stride(0), x.stride(1), x.stride(2)};
  return {x.stride(0) * q_len, x.stride(0), x.stride(1)};
}

inline bool finish_rows_op(OptionalTensor lse, OptionalTensor out, OptionalTensor raw_lse, OptionalTensor seq_lens,
                           OptionalTensor cu_q_lens, int64_t q_len, bool causal, bool base2) {
  if (!lse.has_value() && !out.has_value()) return false;
  const TensorView rows = lse.has_value() ? lse.value() : out.value();
  const int trailing = lse.has_value() ? 0 : 1, dims = rows.ndim() - trailing;
  const bool grouped = dims == 3, ragged = cu_q_lens.has_value();
  const auto of_rows = [&](const OptionalTensor& x, int extra) {
    if (!x.has_value()) return true;
    if (x.value().ndim() != dims + extra) return false;
    for (int i = 0; i < dims; ++i) {
      if (x.value().size(i) != rows.size(i) || rows.size(i) == 0) return false;
    }
    return true;
  };
  const int64_t tokens = rows.size(0) * (grouped ? rows.size(1) : 1);
  const bool fits =
      (dims == 2 || grouped) && of_rows(out, 1) && of_rows(lse, 0) && of_rows(raw_lse, 0) &&
      (!out.has_value() || shaped(out.value(), dims + 1)) && (!lse.has_value() || is_float32(lse.value())) &&
      (!raw_lse.has_value() || is_float32(raw_lse.value())) &&
      (raw_lse.has_value() || (!lse.has_value() && seq_lens.has_value())) &&
      (!grouped || (!ragged && rows.size(1) == q_len)) && requests_fit(tokens, seq_lens, cu_q_lens, q_len) &&
      on_one_device(rows, {}, {out, lse, raw_lse, seq_lens, cu_q_lens});
  if (!fits) return false;
  if (ragged) q_len = 1;
  const RowStrides out_strides = row_strides(out, 1, q_len);
  const RowStrides lse_strides = row_strides(lse, 0, q_len);
  const RowStrides raw_strides = row_strides(raw_lse, 0, q_len);
  const int64_t item = out.has_value() ? item_bytes(out.value()) : 1;
  const int64_t row_bytes = out.has_value() ? out.value().size(-1) * item : 0;
  const Launch launch(rows);
  finish_rows(
      FinishRowsParams{
          .out = data_of<char>(out),
          .lse = data_of<float>(lse),
          .raw_lse = data_of<float>(raw_lse),
          .seq_lens = data_of<int>(seq_lens),
          .cu_q_lens = data_of<int>(cu_q_lens),
          .tokens = tokens,
          .requests = ragged ? static_cast<int>(cu_q_lens.value().size(0) - 1) : 0,
          .q_len = static_cast<int>(q_len),
          .heads = static_cast<int>(rows.size(dims - 1)),
          .row_bytes = row_bytes,
          .out_request_stride = out_strides.request * item,
          .out_position_stride = out_strides.position * item,
          .out_head_stride = out_strides.head * item,
          .lse_request_stride = lse_strides.request,
          .lse_position_stride = lse_strides.position,
          .lse_head_stride = lse_strides.head,
          .raw_request_stride = raw_strides.request,
          .raw_position_stride = raw_strides.position,
          .raw_head_stride = raw_strides.head,
          .causal = causal,
          .base2 = base2,
          .unit = out.has_value() && aligned(out.value()) && row_bytes % kVectorBytes == 0 ? kVectorBytes : 1,
      },
      launch.stream());
  launch.check();
  return true;
}

inline bool is_ids(const TensorView& x) { return is_int(x, 32) || is_int(x, 64); }

constexpr int64_t kMostSlots = int64_t{1} << 31;  // a slot is an int32

// Positions [B, (q,) topk] of requests whose pages are block_table [B, W].
inline bool selection_fits(const TensorView& out, const TensorView& positions, const TensorView& block_table,
                           int64_t page_size, const OptionalTensor& seq_lens, int64_t num_slots) {
  const int dims = positions.ndim();
  return (dims == 2 || dims == 3) && shaped(positions, dims) && shaped(block_table, 2) && is_ids(positions) &&
         is_ids(block_table) && is_lengths(seq_lens) && page_size >= 1 && num_slots >= 1 && num_slots <= kMostSlots &&
         block_table.size(0) == positions.size(0) &&
         (!seq_lens.has_value() || seq_lens.value().size(0) == positions.size(0)) &&
         on_one_device(out, {positions, block_table}, {seq_lens});
}

inline SelectedSlotsParams selection_of(const TensorView& positions, const TensorView& block_table, int64_t page_size,
                                        const OptionalTensor& seq_lens, int64_t num_slots) {
  const bool grouped = positions.ndim() == 3;
  return {
      .positions = positions.data_ptr(),
      .table = block_table.data_ptr(),
      .seq_lens = data_of<int>(seq_lens),
      .num_slots = num_slots,
      .q_len = grouped ? static_cast<int>(positions.size(1)) : 1,
      .table_width = block_table.size(1),
      .page_size = page_size,
      .positions_request_stride = step(positions, 0),
      .positions_position_stride = grouped ? step(positions, 1) : 0,
      .table_stride = step(block_table, 0),
      .position_bytes = item_bytes(positions),
      .page_bytes = item_bytes(block_table),
  };
}

inline GivenSlotsParams given_slots(const TensorView& slots, int64_t num_slots) {
  return {.slots = data_of<int>(slots), .stride = step(slots, 0), .num_slots = num_slots};
}

// out [B, (q,) width] of rows of topk slots.
inline SlotTableParams slot_table(const TensorView& out, int64_t topk) {
  const bool grouped = out.ndim() == 3;
  return {
      .out = data_of<int>(out),
      .rows = out.size(0) * (grouped ? out.size(1) : 1),
      .q_len = grouped ? static_cast<int>(out.size(1)) : 1,
      .width = static_cast<int>(out.size(-1)),
      .topk = static_cast<int>(topk),
      .request_stride = step(out, 0),
      .position_stride = grouped ? step(out, 1) : 0,
  };
}

inline RowTableParams row_table(const TensorView& out, const TensorView& counts, int64_t topk, int64_t page_size,
                                int64_t rows_per_page) {
  return {
      .out = data_of<int>(out),
      .counts = data_of<int>(counts),
      .rows = out.size(0),
      .width = static_cast<int>(out.size(1)),
      .topk = static_cast<int>(topk),
      .page_size = static_cast<int>(page_size),
      .rows_per_page = static_cast<int>(rows_per_page),
      .stride = step(out, 0),
  };
}

// out [rows, width] and counts [rows], with every row id an int32.
inline bool rows_fit(const TensorView& out, const TensorView& counts, int64_t rows, int64_t topk, int64_t num_slots,
                     int64_t page_size, int64_t rows_per_page) {
  constexpr int64_t kMost = kMostSlots - 1;
  return shaped(out, 2) && is_int(out, 32) && out.size(0) == rows && out.size(1) >= topk && out.size(1) > 0 &&
         is_lengths(counts) && counts.size(0) == rows && page_size >= 1 && rows_per_page >= 1 && page_size <= kMost &&
         rows_per_page <= kMost && num_slots <= kMostSlots &&
         std::max<int64_t>(num_slots - 1, 0) / page_size * rows_per_page + page_size - 1 <= kMost &&
         on_one_device(out, {counts});
}

inline bool select_slots_op(TensorView out, TensorView positions, TensorView block_table, int64_t page_size,
                            OptionalTensor seq_lens, int64_t num_slots) {
  const int dims = positions.ndim();
  const bool fits = selection_fits(out, positions, block_table, page_size, seq_lens, num_slots) && shaped(out, dims) &&
                    is_int(out, 32) && out.size(0) == positions.size(0) &&
                    (dims == 2 || out.size(1) == positions.size(1)) && out.size(-1) >= positions.size(-1) &&
                    out.size(-1) > 0;
  if (!fits) return false;
  const Launch launch(out);
  select_slots(selection_of(positions, block_table, page_size, seq_lens, num_slots),
               slot_table(out, positions.size(-1)), launch.stream());
  launch.check();
  return true;
}

inline bool select_rows_op(TensorView out, TensorView counts, TensorView positions, TensorView block_table,
                           int64_t page_size, OptionalTensor seq_lens, int64_t num_slots, int64_t rows_per_page) {
  if (!selection_fits(out, positions, block_table, page_size, seq_lens, num_slots)) return false;
  const int64_t rows = positions.size(0) * (positions.ndim() == 3 ? positions.size(1) : 1), topk = positions.size(-1);
  if (!rows_fit(out, counts, rows, topk, num_slots, page_size, rows_per_page)) return false;
  const Launch launch(out);
  select_rows(selection_of(positions, block_table, page_size, seq_lens, num_slots),
              row_table(out, counts, topk, page_size, rows_per_page), launch.stream());
  launch.check();
  return true;
}

inline bool tables_fit(const TensorView& out, const TensorView& slots) {
  return shaped(out, 2) && shaped(slots, 2) && is_int(out, 32) && is_int(slots, 32) && out.size(0) == slots.size(0) &&
         out.size(1) >= slots.size(1) && out.size(1) > 0 && on_one_device(out, {slots});
}

inline bool sanitize_slots_op(TensorView out, TensorView slots, int64_t num_slots) {
  if (!tables_fit(out, slots)) return false;
  const Launch launch(out);
  sanitize_slots(given_slots(slots, num_slots), slot_table(out, slots.size(1)), launch.stream());
  launch.check();
  return true;
}

inline bool compact_slots_op(TensorView out, TensorView counts, TensorView slots, int64_t num_slots, int64_t page_size,
                             int64_t rows_per_page) {
  const bool fits = tables_fit(out, slots) &&
                    rows_fit(out, counts, slots.size(0), slots.size(1), num_slots, page_size, rows_per_page);
  if (!fits) return false;
  const Launch launch(out);
  compact_slots(given_slots(slots, num_slots), row_table(out, counts, slots.size(1), page_size, rows_per_page),
                launch.stream());
  launch.check();
  return true;
}

// Python has made out and lse; all four are dense.
inline bool merge_partials_op(TensorView out, TensorView lse, TensorView outs, TensorView lses) {
  const bool fits = out.IsContiguous() && lse.IsContiguous() && outs.IsContiguous() && lses.IsContiguous() &&
                    is_element(outs) && same_dtype(out, outs) && is_float32(lse) && is_float32(lses) &&
                    out.ndim() >= 1 && lse.numel() > 0 && outs.numel() == out.numel() * lses.size(0) &&
                    lses.numel() == lse.numel() * lses.size(0) && out.numel() == lse.numel() * out.size(-1) &&
                    on_one_device(out, {lse, outs, lses});
  if (!fits) return false;
  const Launch launch(out);
  merge_partials(
      MergePartialsParams{
          .out = out.data_ptr(),
          .lse = data_of<float>(lse),
          .outs = outs.data_ptr(),
          .lses = data_of<float>(lses),
          .parts = static_cast<int>(lses.size(0)),
          .rows = lse.numel(),
          .width = static_cast<int>(out.size(-1)),
          .element = element_of(outs),
      },
      launch.stream());
  launch.check();
  return true;
}

}  // namespace mla
