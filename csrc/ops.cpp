// What Python calls. Shapes are promised by the Python modules that call this; here they only become Params.
#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>

#include "absorb/kernel.h"
#include "cache_write/kernel.h"
#include "check.h"
#include "concat/kernel.h"
#include "finish_rows/kernel.h"
#include "indexer_write/kernel.h"
#include "merge_partials/kernel.h"
#include "quantize/kernel.h"
#include "query_scale/kernel.h"
#include "slots/kernel.h"

namespace mla {
namespace {

constexpr int kVectorValues = 8;

// A stride that nothing steps over may be anything in torch; 0 keeps it from deciding an address or an alignment.
int64_t step(const TensorView& x, int dim) { return x.size(dim) > 1 ? x.stride(dim) : 0; }

// Largest access, of 16, 4, 2 and 1 bytes, that divides every base, outer stride and width.
int access_bytes(std::initializer_list<TensorView> tensors) {
  for (int unit : {16, 4, 2}) {
    bool fits = true;
    for (const TensorView& x : tensors) fits = fits && aligned(x, unit) && x.size(-1) * item_bytes(x) % unit == 0;
    if (fits) return unit;
  }
  return 1;
}

void concat_nope_rope(TensorView out, TensorView nope, TensorView rope) {
  const int item = item_bytes(out);
  const Launch launch(out);
  concat(
      ConcatParams{
          .out = data_of<char>(out),
          .nope = data_of<char>(nope),
          .rope = data_of<char>(rope),
          .tokens = out.size(0),
          .heads = static_cast<int>(out.size(1)),
          .nope_bytes = static_cast<int>(nope.size(2)) * item,
          .rope_bytes = static_cast<int>(rope.size(2)) * item,
          .out_token_stride = step(out, 0) * item,
          .out_head_stride = step(out, 1) * item,
          .nope_token_stride = step(nope, 0) * item,
          .nope_head_stride = step(nope, 1) * item,
          .rope_token_stride = step(rope, 0) * item,
          .rope_head_stride = step(rope, 1) * item,
          .unit = access_bytes({out, nope, rope}),
      },
      launch.stream());
  launch.check();
}

void quantize_rows(const TensorView& out, const TensorView& from, const TensorView& scale) {
  const Launch launch(out);
  quantize(
      QuantizeParams{
          .out = data_of<uint8_t>(out),
          .from = data_of<char>(from),
          .scale = data_of<float>(scale),
          .tokens = from.size(0),
          .heads = static_cast<int>(from.size(1)),
          .width = static_cast<int>(from.size(2)),
          .out_token_stride = step(out, 0),
          .out_head_stride = step(out, 1),
          .from_token_stride = step(from, 0),
          .from_head_stride = step(from, 1),
          .element = element_of(from),
          .aligned = aligned(from) && aligned(out, kVectorValues) && from.size(2) % kVectorValues == 0,
      },
      launch.stream());
  launch.check();
}

void quantize_query(TensorView out, TensorView query, TensorView scale) { quantize_rows(out, query, scale); }

// rope has at least q_pe's heads; those past them are left alone.
void rope_tail(TensorView rope, TensorView q_pe, OptionalTensor scale) {
  if (scale.has_value()) return quantize_rows(rope, q_pe, scale.value());
  const int item = item_bytes(rope);
  const Launch launch(rope);
  concat(
      ConcatParams{
          .out = data_of<char>(rope),
          .nope = nullptr,
          .rope = data_of<char>(q_pe),
          .tokens = q_pe.size(0),
          .heads = static_cast<int>(q_pe.size(1)),
          .nope_bytes = 0,
          .rope_bytes = static_cast<int>(q_pe.size(2)) * item,
          .out_token_stride = step(rope, 0) * item,
          .out_head_stride = step(rope, 1) * item,
          .nope_token_stride = 0,
          .nope_head_stride = 0,
          .rope_token_stride = step(q_pe, 0) * item,
          .rope_head_stride = step(q_pe, 1) * item,
          .unit = access_bytes({rope, q_pe}),
      },
      launch.stream());
  launch.check();
}

// Whether the kernel for few rows takes operands: [tokens, heads, inner], [heads, inner, columns], [tokens, heads, columns].
bool few_rows_fits(const TensorView& out, const TensorView& a, const TensorView& b) {
  const int64_t inner = b.size(1), columns = b.size(2);
  const bool shaped = (inner == 128 && columns % 256 == 0) || (inner == 512 && columns % 64 == 0);
  return shaped && item_bytes(a) == 2 && b.size(0) <= 65535 && aligned(a, 8) && all_aligned({out, b});
}

AbsorbParams few_rows(const TensorView& out, const TensorView& a, const TensorView& b, int token_dim, int head_dim) {
  return AbsorbParams{
      .out = out.data_ptr(),
      .a = a.data_ptr(),
      .b = b.data_ptr(),
      .rope_out = nullptr,
      .rope = nullptr,
      .scale = nullptr,
      .heads = static_cast<int>(b.size(0)),
      .tokens = static_cast<int>(a.size(token_dim)),
      .inner = static_cast<int>(b.size(1)),
      .columns = static_cast<int>(b.size(2)),
      .rope_width = 0,
      .out_head_stride = step(out, head_dim),
      .out_token_stride = step(out, token_dim),
      .a_head_stride = step(a, head_dim),
      .a_token_stride = step(a, token_dim),
      .b_head_stride = step(b, 0),
      .b_inner_stride = step(b, 1),
      .rope_out_head_stride = 0,
      .rope_out_token_stride = 0,
      .rope_head_stride = 0,
      .rope_token_stride = 0,
      .element = element_of(a),
  };
}

// False, and nothing done, where the kernel does not take these operands.
bool absorb_few(TensorView latent, TensorView rope, TensorView q_nope, TensorView q_pe, TensorView w_uk,
                OptionalTensor scale) {
  if (!few_rows_fits(latent, q_nope, w_uk)) return false;
  const bool has_rope = q_pe.size(2) > 0;
  if (has_rope && (!aligned(q_pe) || !aligned(rope, kVectorValues * item_bytes(rope)) || q_pe.size(2) % kVectorValues != 0)) {
    return false;
  }
  AbsorbParams params = few_rows(latent, q_nope, w_uk, 0, 1);
  params.scale = data_of<float>(scale);
  if (has_rope) {
    params.rope_out = rope.data_ptr();
    params.rope = q_pe.data_ptr();
    params.rope_width = static_cast<int>(q_pe.size(2));
    params.rope_out_head_stride = step(rope, 1);
    params.rope_out_token_stride = step(rope, 0);
    params.rope_head_stride = step(q_pe, 1);
    params.rope_token_stride = step(q_pe, 0);
  }
  const Launch launch(latent);
  absorb(params, launch.stream());
  launch.check();
  return true;
}

// False, and nothing done, where the kernel does not take these operands. out, a, b as torch.bmm has them.
bool matmul_few(TensorView out, TensorView a, TensorView b) {
  if (!few_rows_fits(out, a, b)) return false;
  const Launch launch(out);
  absorb(few_rows(out, a, b, 1, 0), launch.stream());
  launch.check();
  return true;
}

void query_scale_op(TensorView out, TensorView latent, TensorView rope, OptionalTensor seq_lens,
                    OptionalTensor cu_q_lens, int64_t q_len) {
  const int64_t rank = latent.size(2), rope_width = rope.size(2);
  const int64_t requests = cu_q_lens.has_value() ? cu_q_lens.value().size(0) - 1 : 0;
  const Launch launch(out);
  TVM_FFI_CHECK_CUDA_ERROR(query_scale(
      QueryScaleParams{
          .out = data_of<float>(out),
          .latent = data_of<char>(latent),
          .rope = data_of<char>(rope),
          .seq_lens = data_of<int>(seq_lens),
          .cu_q_lens = data_of<int>(cu_q_lens),
          .tokens = latent.size(0),
          .requests = static_cast<int>(requests),
          .q_len = static_cast<int>(q_len),
          .heads = static_cast<int>(latent.size(1)),
          .rank = static_cast<int>(rank),
          .rope_width = static_cast<int>(rope_width),
          .latent_token_stride = step(latent, 0),
          .latent_head_stride = step(latent, 1),
          .rope_token_stride = step(rope, 0),
          .rope_head_stride = step(rope, 1),
          .element = element_of(latent),
          .aligned = all_aligned({latent, rope}) && rank % kVectorValues == 0 && rope_width % kVectorValues == 0,
      },
      launch.stream()));
  launch.check();
}

RowFormat row_format(const tvm::ffi::String& name) {
  if (name == "fp8") return RowFormat::kFp8;
  if (name == "fp8_ds_mla") return RowFormat::kFp8DsMla;
  return RowFormat::kCopy;
}

CacheWriteParams cache_write(const TensorView& data, const TensorView& kv_c, const TensorView& k_pe,
                             const TensorView& slots, const tvm::ffi::String& format, const OptionalTensor& kv_scale,
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
      .format = row_format(format),
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

void write_cache_op(TensorView data, TensorView kv_c, TensorView k_pe, TensorView slots, tvm::ffi::String format,
                    OptionalTensor kv_scale, double kv_scale_value) {
  const Launch launch(data);
  write_cache(cache_write(data, kv_c, k_pe, slots, format, kv_scale, kv_scale_value), launch.stream());
  launch.check();
}

void write_cache_and_rope(TensorView rope, TensorView q_pe, TensorView data, TensorView kv_c, TensorView k_pe,
                          TensorView slots, tvm::ffi::String format, OptionalTensor kv_scale, double kv_scale_value) {
  CacheWriteParams params = cache_write(data, kv_c, k_pe, slots, format, kv_scale, kv_scale_value);
  if (params.num_slots == 0) params.tokens = 0;
  const int item = item_bytes(q_pe);
  if (q_pe.numel() > 0) {
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
  }
  if (params.tokens == 0 && params.query_tokens == 0) return;
  const Launch launch(data);
  write_cache(params, launch.stream());
  launch.check();
}

void write_indexer_cache(TensorView data, TensorView k, TensorView slots) {
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
}

// The rows' strides of [requests, q_len, heads, ..] or of [tokens, heads, ..], where token = request * q_len + position.
struct RowStrides {
  int64_t request, position, head;
};

RowStrides row_strides(const OptionalTensor& tensor, int trailing, int64_t q_len) {
  if (!tensor.has_value()) return {0, 0, 0};
  const TensorView x = tensor.value();
  if (x.ndim() == 3 + trailing) return {x.stride(0), x.stride(1), x.stride(2)};
  return {x.stride(0) * q_len, x.stride(0), x.stride(1)};
}

void finish_rows_op(OptionalTensor out, OptionalTensor lse, OptionalTensor raw_lse, OptionalTensor seq_lens,
                    OptionalTensor cu_q_lens, int64_t q_len, bool causal, bool base2) {
  const TensorView shaped = lse.has_value() ? lse.value() : out.value();
  const int trailing = lse.has_value() ? 0 : 1;
  const bool grouped = shaped.ndim() == 3 + trailing;
  const bool ragged = cu_q_lens.has_value();
  if (ragged) q_len = 1;
  const RowStrides out_strides = row_strides(out, 1, q_len);
  const RowStrides lse_strides = row_strides(lse, 0, q_len);
  const RowStrides raw_strides = row_strides(raw_lse, 0, q_len);
  const int64_t item = out.has_value() ? item_bytes(out.value()) : 1;
  const int64_t row_bytes = out.has_value() ? out.value().size(-1) * item : 0;
  const Launch launch(shaped);
  finish_rows(
      FinishRowsParams{
          .out = data_of<char>(out),
          .lse = data_of<float>(lse),
          .raw_lse = data_of<float>(raw_lse),
          .seq_lens = data_of<int>(seq_lens),
          .cu_q_lens = data_of<int>(cu_q_lens),
          .tokens = shaped.size(0) * (grouped ? shaped.size(1) : 1),
          .requests = ragged ? static_cast<int>(cu_q_lens.value().size(0) - 1) : 0,
          .q_len = static_cast<int>(q_len),
          .heads = static_cast<int>(shaped.size(grouped ? 2 : 1)),
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
}

void select_slots_op(TensorView out, TensorView positions, TensorView block_table, int64_t page_size,
                     OptionalTensor seq_lens) {
  const bool grouped = positions.ndim() == 3;
  const int64_t q_len = grouped ? positions.size(1) : 1;
  const Launch launch(out);
  select_slots(
      SelectSlotsParams{
          .out = data_of<int>(out),
          .positions = positions.data_ptr(),
          .table = block_table.data_ptr(),
          .seq_lens = data_of<int>(seq_lens),
          .rows = positions.size(0) * q_len,
          .q_len = static_cast<int>(q_len),
          .width = static_cast<int>(out.size(-1)),
          .topk = static_cast<int>(positions.size(-1)),
          .table_width = block_table.size(1),
          .page_size = page_size,
          .out_request_stride = step(out, 0),
          .out_position_stride = grouped ? step(out, 1) : 0,
          .positions_request_stride = step(positions, 0),
          .positions_position_stride = grouped ? step(positions, 1) : 0,
          .table_stride = step(block_table, 0),
          .position_bytes = item_bytes(positions),
          .page_bytes = item_bytes(block_table),
      },
      launch.stream());
  launch.check();
}

void sanitize_slots_op(TensorView out, TensorView slots, int64_t num_slots) {
  const Launch launch(out);
  sanitize_slots(
      SanitizeSlotsParams{
          .out = data_of<int>(out),
          .slots = data_of<int>(slots),
          .rows = out.size(0),
          .width = static_cast<int>(out.size(1)),
          .topk = static_cast<int>(slots.size(1)),
          .num_slots = num_slots,
          .out_stride = step(out, 0),
          .slots_stride = step(slots, 0),
      },
      launch.stream());
  launch.check();
}

void compact_slots_op(TensorView out, TensorView counts, TensorView slots, int64_t num_slots, int64_t page_size,
                      int64_t rows_per_page) {
  const Launch launch(out);
  compact_slots(
      CompactSlotsParams{
          .out = data_of<int>(out),
          .counts = data_of<int>(counts),
          .slots = data_of<int>(slots),
          .rows = out.size(0),
          .width = static_cast<int>(out.size(1)),
          .topk = static_cast<int>(slots.size(1)),
          .num_slots = num_slots,
          .page_size = static_cast<int>(page_size),
          .rows_per_page = static_cast<int>(rows_per_page),
          .out_stride = step(out, 0),
          .slots_stride = step(slots, 0),
      },
      launch.stream());
  launch.check();
}

void merge_partials_op(TensorView out, TensorView lse, TensorView outs, TensorView lses) {
  MLA_ASSERT(out.IsContiguous() && lse.IsContiguous() && outs.IsContiguous() && lses.IsContiguous());
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
}

}  // namespace
}  // namespace mla

TVM_FFI_DLL_EXPORT_TYPED_FUNC(absorb_few, mla::absorb_few);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(matmul_few, mla::matmul_few);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(concat_nope_rope, mla::concat_nope_rope);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rope_tail, mla::rope_tail);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_query, mla::quantize_query);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(query_scale, mla::query_scale_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_cache, mla::write_cache_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_cache_and_rope, mla::write_cache_and_rope);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_indexer_cache, mla::write_indexer_cache);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(finish_rows, mla::finish_rows_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select_slots, mla::select_slots_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sanitize_slots, mla::sanitize_slots_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(compact_slots, mla::compact_slots_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge_partials, mla::merge_partials_op);
