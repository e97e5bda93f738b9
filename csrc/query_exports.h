// The exports that make a query: absorption, concatenation, quantisation.
#pragma once

#include "absorb/kernel.h"
#include "check.h"
#include "concat/kernel.h"
#include "quantize/kernel.h"
#include "query_scale/kernel.h"

namespace mla {

inline bool concat_nope_rope(TensorView out, TensorView nope, TensorView rope) {
  const int item = item_bytes(out);
  const bool fits = shaped(out, 3) && shaped(nope, 3) && shaped(rope, 3) && same_dtype(out, nope) &&
                    same_dtype(out, rope) && item <= 4 && out.size(2) == nope.size(2) + rope.size(2) &&
                    out.size(2) > 0 && out.size(0) == nope.size(0) && out.size(1) == nope.size(1) &&
                    out.size(0) == rope.size(0) && (rope.size(1) == out.size(1) || rope.size(1) == 1) &&
                    on_one_device(out, {nope, rope});
  if (!fits) return false;
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
  return true;
}

// out has at least the heads of `from`; those past them are left alone.
inline void quantize_rows(const TensorView& out, const TensorView& from, const TensorView& scale) {
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

inline bool quantize_query(TensorView out, TensorView query, TensorView scale) {
  const bool fits = shaped(out, 3) && shaped(query, 3) && is_e4m3(out) && is_element(query) && is_one_float(scale) &&
                    out.size(0) == query.size(0) && out.size(1) == query.size(1) && out.size(2) == query.size(2) &&
                    out.size(2) > 0 && on_one_device(out, {query, scale});
  if (!fits) return false;
  quantize_rows(out, query, scale);
  return true;
}

inline bool tail_fits(const TensorView& rope, const TensorView& q_pe, const OptionalTensor& scale) {
  return shaped(rope, 3) && shaped(q_pe, 3) && is_element(q_pe) && is_one_float(scale) &&
         (scale.has_value() ? is_e4m3(rope) : same_dtype(rope, q_pe)) && rope.size(0) == q_pe.size(0) &&
         rope.size(1) >= q_pe.size(1) && rope.size(2) == q_pe.size(2) && on_one_device(rope, {q_pe}, {scale});
}

inline void copy_tail(const TensorView& rope, const TensorView& q_pe, const OptionalTensor& scale) {
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

inline bool rope_tail(TensorView rope, TensorView q_pe, OptionalTensor scale) {
  if (!tail_fits(rope, q_pe, scale) || q_pe.size(2) == 0) return false;
  copy_tail(rope, q_pe, scale);
  return true;
}

// What is left to Python, which has cuBLAS.
enum Outcome : int64_t { kRefused = 0, kDone = 1, kProductIsLeft = 2 };

// Whether the kernel for few tokens takes the product's operands: [T, H, L], [T, H, N], [H, N, L].
inline bool few_tokens_fit(const TensorView& latent, const TensorView& q_nope, const TensorView& w_uk) {
  return w_uk.size(1) == kAbsorbInner && w_uk.size(2) % 256 == 0 && item_bytes(q_nope) == 2 && w_uk.size(0) <= 65535 &&
         aligned(q_nope, 8) && all_aligned({latent, w_uk});
}

// Up to `few` tokens everything in one launch, where the kernel takes the operands; else the rope tail alone.
inline int64_t absorb_query(TensorView latent, TensorView rope, TensorView q_nope, TensorView q_pe, TensorView w_uk,
                            OptionalTensor scale, int64_t few) {
  const bool fits = tail_fits(rope, q_pe, scale) && shaped(latent, 3) && shaped(q_nope, 3) && shaped(w_uk, 3) &&
                    same_dtype(q_nope, q_pe) && same_dtype(q_nope, w_uk) && same_dtype(latent, rope) &&
                    q_nope.size(0) == q_pe.size(0) && q_nope.size(1) == q_pe.size(1) &&
                    latent.size(0) == rope.size(0) && latent.size(1) == rope.size(1) &&
                    w_uk.size(0) == q_nope.size(1) && w_uk.size(1) == q_nope.size(2) &&
                    w_uk.size(2) == latent.size(2) && latent.size(2) > 0 && on_one_device(latent, {rope, q_nope, w_uk});
  if (!fits) return kRefused;
  const bool has_rope = q_pe.size(2) > 0;
  const bool rope_aligned = !has_rope || (aligned(q_pe) && aligned(rope, kVectorValues * item_bytes(rope)) &&
                                          q_pe.size(2) % kVectorValues == 0);
  if (q_nope.size(0) > few || !rope_aligned || !few_tokens_fit(latent, q_nope, w_uk)) {
    if (has_rope) copy_tail(rope, q_pe, scale);
    return kProductIsLeft;
  }
  const Launch launch(latent);
  absorb(
      AbsorbParams{
          .out = latent.data_ptr(),
          .a = q_nope.data_ptr(),
          .b = w_uk.data_ptr(),
          .rope_out = has_rope ? rope.data_ptr() : nullptr,
          .rope = has_rope ? q_pe.data_ptr() : nullptr,
          .scale = data_of<float>(scale),
          .heads = static_cast<int>(q_nope.size(1)),
          .tokens = static_cast<int>(q_nope.size(0)),
          .columns = static_cast<int>(w_uk.size(2)),
          .rope_width = static_cast<int>(q_pe.size(2)),
          .out_head_stride = step(latent, 1),
          .out_token_stride = step(latent, 0),
          .a_head_stride = step(q_nope, 1),
          .a_token_stride = step(q_nope, 0),
          .b_head_stride = step(w_uk, 0),
          .b_inner_stride = step(w_uk, 1),
          .rope_out_head_stride = step(rope, 1),
          .rope_out_token_stride = step(rope, 0),
          .rope_head_stride = step(q_pe, 1),
          .rope_token_stride = step(q_pe, 0),
          .element = element_of(q_nope),
      },
      launch.stream());
  launch.check();
  return kDone;
}

inline bool query_scale_op(TensorView out, TensorView latent, TensorView rope, OptionalTensor seq_lens,
                           OptionalTensor cu_q_lens, int64_t q_len) {
  const bool fits = shaped(latent, 3) && shaped(rope, 3) && is_element(latent) && same_dtype(latent, rope) &&
                    is_one_float(out) && latent.size(0) == rope.size(0) && latent.size(1) == rope.size(1) &&
                    requests_fit(latent.size(0), seq_lens, cu_q_lens, q_len) &&
                    on_one_device(out, {latent, rope}, {seq_lens, cu_q_lens});
  if (!fits) return false;
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
  return true;
}

}  // namespace mla
