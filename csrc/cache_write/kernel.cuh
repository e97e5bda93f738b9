// One warp a token. Slot and values are both asked for before either is used, so that the two waits overlap.
#pragma once

#include "../device.cuh"
#include "kernel.h"

namespace mla {

constexpr int kWriteThreads = 128;
constexpr int kWriteWarps = kWriteThreads / kWarp;
constexpr int kWriteSteps = 3;  // a row of 512 + 64 bf16 values is 72 vectors, three for a lane
constexpr int kTile = 128;      // fp8_ds_mla: values that share a scale
constexpr int kDsMlaRank = 512;
constexpr int kDsMlaRope = 64;
constexpr float kLeastScale = 1e-4f;

__device__ __forceinline__ int64_t slot_of(const CacheWriteParams& p, int64_t token) {
  return p.slots[token * p.slot_stride];
}

// The slot's row, or null if it is outside the cache.
__device__ __forceinline__ char* row_of(const CacheWriteParams& p, int64_t slot) {
  if (slot < 0 || slot >= p.num_slots) return nullptr;
  const Place place = place_of(slot, p.num_slots, p.page_size);
  return p.data + place.page * p.page_stride + place.offset * p.row_stride;
}

// kv_c and k_pe side by side, unchanged. Unit: 16 bytes, or the 2 that divide every width.
template <typename Unit>
__device__ __forceinline__ void write_copy(const CacheWriteParams& p, int64_t token, int lane) {
  const int size = p.element == Element::kFp32 ? 4 : 2;
  const int latent = p.rank * size / static_cast<int>(sizeof(Unit));
  const int units = latent + p.rope * size / static_cast<int>(sizeof(Unit));
  const auto* kv_c = reinterpret_cast<const Unit*>(p.kv_c + token * p.kv_c_stride * size);
  const auto* k_pe = reinterpret_cast<const Unit*>(p.k_pe + token * p.k_pe_stride * size);
  Unit held[kWriteSteps];
  const auto load = [&](int first) {
#pragma unroll
    for (int step = 0; step < kWriteSteps; ++step) {
      const int i = first + step * kWarp;
      const Unit* from = i < latent ? kv_c + i : k_pe + (i - latent);
      if (i < units) held[step] = *from;
    }
  };
  const int64_t slot = slot_of(p, token);
  load(lane);
  auto* row = reinterpret_cast<Unit*>(row_of(p, slot));
  if (row == nullptr) return;
  for (int first = lane; first < units; first += kWarp * kWriteSteps) {
#pragma unroll
    for (int step = 0; step < kWriteSteps; ++step) {
      const int i = first + step * kWarp;
      if (i < units) row[i] = held[step];
    }
    load(first + kWarp * kWriteSteps);
  }
}

template <typename T, bool kAligned>
__device__ __forceinline__ void write_fp8(const CacheWriteParams& p, int64_t token, int lane) {
  const T* kv_c = reinterpret_cast<const T*>(p.kv_c) + token * p.kv_c_stride;
  const T* k_pe = reinterpret_cast<const T*>(p.k_pe) + token * p.k_pe_stride;
  const float scale = p.kv_scale != nullptr ? *p.kv_scale : p.kv_scale_value;
  const int64_t slot = slot_of(p, token);
  if constexpr (!kAligned) {
    auto* row = reinterpret_cast<uint8_t*>(row_of(p, slot));
    if (row == nullptr) return;
    const Divisor divided(scale);
    for (int i = lane; i < p.rank + p.rope; i += kWarp) {
      row[i] = e4m3(divided(as_float(i < p.rank ? kv_c[i] : k_pe[i - p.rank])));
    }
    return;
  }
  const int latent = p.rank / kVector, vectors = latent + p.rope / kVector;
  float held[kWriteSteps][kVector];
  const auto load = [&](int first) {
#pragma unroll
    for (int step = 0; step < kWriteSteps; ++step) {
      const int i = first + step * kWarp;
      const T* from = i < latent ? kv_c + i * kVector : k_pe + (i - latent) * kVector;
      if (i < vectors) load_vector<true>(from, held[step]);
    }
  };
  load(lane);
  auto* row = reinterpret_cast<uint8_t*>(row_of(p, slot));
  if (row == nullptr) return;
  const Divisor divided(scale);
  for (int first = lane; first < vectors; first += kWarp * kWriteSteps) {
#pragma unroll
    for (int step = 0; step < kWriteSteps; ++step) {
      const int i = first + step * kWarp;
      if (i >= vectors) continue;
      divided(held[step]);
      store_bytes<true>(row + i * kVector, e4m3_vector(held[step]));
    }
    load(first + kWarp * kWriteSteps);
  }
}

// 512 e4m3, four float32 scales that are powers of two, 64 bf16. Source of the scale: FlashMLA's tests/quant.py.
template <typename T, bool kAligned>
__device__ __forceinline__ void write_fp8_ds_mla(const CacheWriteParams& p, int64_t token, int lane) {
  constexpr int kTileLanes = kTile / kVector;
  constexpr int kSteps = kDsMlaRank / kVector / kWarp;
  constexpr int kRopeAt = kDsMlaRank + kDsMlaRank / kTile * static_cast<int>(sizeof(float));
  const T* kv_c = reinterpret_cast<const T*>(p.kv_c) + token * p.kv_c_stride;
  const T* k_pe = reinterpret_cast<const T*>(p.k_pe) + token * p.k_pe_stride;
  const int64_t slot = slot_of(p, token);
  float latent[kSteps][kVector];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    load_vector<kAligned>(kv_c + (step * kWarp + lane) * kVector, latent[step]);
  }
  float rope[kVector];
  const bool has_rope = lane < kDsMlaRope / kVector;
  if (has_rope) load_vector<kAligned>(k_pe + lane * kVector, rope);
  auto* row = reinterpret_cast<uint8_t*>(row_of(p, slot));
  if (row == nullptr) return;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const float amax = max_over<kTileLanes>(finite_amax(latent[step]));
    const float scale = power_of_two_above(fmaxf(__fdiv_rn(amax, kE4m3Max), kLeastScale));
    divide_by_power_of_two(latent[step], scale);
    store_bytes<kAligned>(row + (step * kWarp + lane) * kVector, e4m3_vector(latent[step]));
    if (lane % kTileLanes != 0) continue;
    uint8_t* to = row + kDsMlaRank + (step * (kWarp / kTileLanes) + lane / kTileLanes) * sizeof(float);
    if constexpr (kAligned) {
      *reinterpret_cast<float*>(to) = scale;
    } else {
      for (int i = 0; i < static_cast<int>(sizeof(float)); ++i)
        to[i] = static_cast<uint8_t>(__float_as_uint(scale) >> (8 * i));
    }
  }
  if (!has_rope) return;
  store_bf16<kAligned>(row + kRopeAt + lane * kVector * static_cast<int>(sizeof(__nv_bfloat16)), rope);
}

// Eight lanes a head; `group` counts blocks' worth of heads over all query tokens.
template <typename Unit>
__device__ __forceinline__ void copy_query_rope(const CacheWriteParams& p, int64_t group) {
  constexpr int kLanes = 8, kHeads = kWriteThreads / kLanes;
  const int groups = (p.query_heads + kHeads - 1) / kHeads;
  const int64_t token = group / groups;
  const int head = static_cast<int>(group % groups) * kHeads + threadIdx.x / kLanes;
  if (head >= p.query_heads) return;
  auto* to =
      reinterpret_cast<Unit*>(p.query_rope + token * p.query_rope_token_stride + head * p.query_rope_head_stride);
  const auto* from =
      reinterpret_cast<const Unit*>(p.query_from + token * p.query_from_token_stride + head * p.query_from_head_stride);
  const int units = p.query_rope_bytes / static_cast<int>(sizeof(Unit));
  for (int i = threadIdx.x % kLanes; i < units; i += kLanes) to[i] = from[i];
}

// The first blocks write the cache, the rest the query's rope. T is of no consequence for RowFormat::kCopy.
template <typename T, RowFormat kFormat, bool kAligned>
__global__ void __launch_bounds__(kWriteThreads) write_cache_kernel(const __grid_constant__ CacheWriteParams p) {
  const int64_t cache_blocks = (p.tokens + kWriteWarps - 1) / kWriteWarps;
  if (blockIdx.x >= cache_blocks) {
    using Unit = std::conditional_t<kAligned, uint4, uint16_t>;
    copy_query_rope<Unit>(p, blockIdx.x - cache_blocks);
    return;
  }
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWriteWarps + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (token >= p.tokens) return;
  if constexpr (kFormat == RowFormat::kCopy) {
    write_copy<std::conditional_t<kAligned, uint4, uint16_t>>(p, token, lane);
  } else if constexpr (kFormat == RowFormat::kFp8) {
    write_fp8<T, kAligned>(p, token, lane);
  } else {
    write_fp8_ds_mla<T, kAligned>(p, token, lane);
  }
}

}  // namespace mla
