// What Python calls, by the names that it asks for. Each looks whether its arguments keep the op's contract and
// launches.
#include "cache_exports.h"
#include "query_exports.h"
#include "row_exports.h"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(absorb_query, mla::absorb_query);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(concat_nope_rope, mla::concat_nope_rope);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rope_tail, mla::rope_tail);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_query, mla::quantize_query);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(query_scale, mla::query_scale_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_cache, mla::write_cache_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_cache_and_rope, mla::write_cache_and_rope);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_indexer_cache, mla::write_indexer_cache);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(finish_rows, mla::finish_rows_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select_slots, mla::select_slots_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(select_rows, mla::select_rows_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sanitize_slots, mla::sanitize_slots_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(compact_slots, mla::compact_slots_op);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge_partials, mla::merge_partials_op);
