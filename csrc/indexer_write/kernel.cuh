#pragma once

#include "../device.cuh"
#include "kernel.h"

namespace mla {

constexpr int kIndexerThreads = 128;
constexpr int kIndexerWidth = 128;
constexpr int kIndexerLanes = kIndexerWidth / kVector;  // of one token: half a warp
constexpr int kIndexerTokens = kIndexerThreads / kIndexerLanes;
constexpr float kLeastAmax = 1e-4f;

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kIndexerThreads) write_indexer_kernel(const __grid_constant__ IndexerWriteParams p) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kIndexerTokens + threadIdx.x / kIndexerLanes;
  const int lane = threadIdx.x % kIndexerLanes;
  const bool live = token < p.tokens;
  float values[kVector] = {};
  int64_t slot = -1;
  if (live) {
    load_vector<kAligned>(reinterpret_cast<const T*>(p.k) + token * p.k_stride + lane * kVector, values);
    slot = p.slots[token * p.slot_stride];
  }
  const float amax = max_over<kIndexerLanes>(finite_amax(values));  // every lane of the warp takes part
  if (slot < 0 || slot >= p.num_slots) return;
  const float scale = power_of_two_above(__fdiv_rn(fmaxf(amax, kLeastAmax), kE4m3Max));
  divide_by_power_of_two(values, scale);
  const auto [page, offset] = place_of(slot, p.num_slots, p.page_size);
  uint8_t* from = p.data + page * p.page_stride;
  store_bytes<kAligned>(from + offset * kIndexerWidth + lane * kVector, e4m3_vector(values));
  if (lane != 0) return;
  uint8_t* to = from + p.page_size * kIndexerWidth + offset * sizeof(float);
  if constexpr (kAligned) {
    *reinterpret_cast<float*>(to) = scale;
  } else {
    for (int i = 0; i < static_cast<int>(sizeof(float)); ++i)
      to[i] = static_cast<uint8_t>(__float_as_uint(scale) >> (8 * i));
  }
}

}  // namespace mla
