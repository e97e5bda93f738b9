// Every weight is read once, in 16-byte loads that are all in flight before the first is used, and stays in registers
// while the tokens pass, 16 at a time, through mma.m16n8k16.
//
// A warp has 64 columns and up to 128 of the inner dimension. Lane (g, q) = (lane / 4, lane % 4) loads, of each 16
// inner rows, rows 4q .. 4q+3 and columns 8g .. 8g+7: per row, eight lanes read 128 bytes in a line. mma wants of a
// lane the inner pairs of column g; which columns are called "g" and which inner rows "2q" is ours to choose, as long
// as both operands agree. So tile j takes column 8g + j, and inner rows 4q, 4q+1 | 4q+2, 4q+3 take the places 2q, 2q+1
// | 2q+8, 2q+9: the weights need no shared memory, only a byte permutation, the query is read 8 bytes a lane, and the
// lane ends up with 16 neighbouring columns of a token, a 32-byte store.
#pragma once

#include "../device.cuh"
#include "kernel.h"

namespace mla {

constexpr int kAbsorbWarps = 4;
constexpr int kAbsorbThreads = kAbsorbWarps * kWarp;
constexpr int kTokenTile = 16;
constexpr int kWarpColumns = 64;
constexpr int kColumnTiles = kWarpColumns / 8;
constexpr int kLaneColumns = 16;

// Read once, so not kept in L1; volatile, so that the compiler leaves all loads ahead of their uses.
__device__ __forceinline__ uint4 load_weights(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// From two inner rows' eight columns, the pair (row, row + 1) of column j.
template <int j>
__device__ __forceinline__ uint32_t pair(const uint4& row, const uint4& next) {
  const uint32_t x = (&row.x)[j / 2], y = (&next.x)[j / 2];
  return __byte_perm(x, y, j % 2 == 0 ? 0x5410 : 0x7632);
}

// The lane's eight columns of 16 inner rows, as the second operand of the eight column tiles.
struct WeightStep {
  uint32_t low[kColumnTiles];   // inner 4q, 4q+1
  uint32_t high[kColumnTiles];  // inner 4q+2, 4q+3
};

template <int j = 0>
__device__ __forceinline__ void pack(const uint4 (&rows)[4], WeightStep& step) {
  step.low[j] = pair<j>(rows[0], rows[1]);
  step.high[j] = pair<j>(rows[2], rows[3]);
  if constexpr (j + 1 < kColumnTiles) pack<j + 1>(rows, step);
}

// One token's 16 neighbouring columns.
template <typename T>
__device__ __forceinline__ void store_columns(const AbsorbParams& p, int head, int64_t token, int column,
                                              const float (&values)[kLaneColumns]) {
  const int64_t at = head * p.out_head_stride + token * p.out_token_stride + column;
  if (p.scale != nullptr) {
    const Divisor divided(*p.scale);
    alignas(16) uint32_t bytes[kLaneColumns / 4];
#pragma unroll
    for (int i = 0; i < kLaneColumns / 4; ++i) {
      bytes[i] = e4m3_pair(divided(values[4 * i]), divided(values[4 * i + 1])) |
                 e4m3_pair(divided(values[4 * i + 2]), divided(values[4 * i + 3])) << 16;
    }
    *reinterpret_cast<uint4*>(static_cast<uint8_t*>(p.out) + at) = *reinterpret_cast<const uint4*>(bytes);
    return;
  }
  alignas(16) T rounded[kLaneColumns];
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) rounded[i] = from_float<T>(values[i]);
  auto* to = reinterpret_cast<uint4*>(static_cast<T*>(p.out) + at);
  to[0] = reinterpret_cast<const uint4*>(rounded)[0];
  to[1] = reinterpret_cast<const uint4*>(rounded)[1];
}

// The block's share of its head's rope: every part-th vector.
template <typename T>
__device__ __forceinline__ void copy_rope(const AbsorbParams& p, int head, int part, int parts) {
  const int vectors = p.rope_width / kVector;
  for (int i = part * kAbsorbThreads + threadIdx.x; i < p.tokens * vectors; i += parts * kAbsorbThreads) {
    const int64_t token = i / vectors;
    const int column = i % vectors * kVector;
    const T* from = static_cast<const T*>(p.rope) + head * p.rope_head_stride + token * p.rope_token_stride + column;
    const int64_t to = head * p.rope_out_head_stride + token * p.rope_out_token_stride + column;
    if (p.scale == nullptr) {
      *reinterpret_cast<uint4*>(static_cast<T*>(p.rope_out) + to) = *reinterpret_cast<const uint4*>(from);
      continue;
    }
    float values[kVector];
    load_vector<true>(from, values);
    Divisor{*p.scale}(values);
    store_bytes<true>(static_cast<uint8_t*>(p.rope_out) + to, e4m3_vector(values));
  }
}

// The query of 16 tokens as the first operand: early tokens g, late tokens g + 8; tokens past the end are zeros.
template <int kSteps>
struct QueryTile {
  uint2 early[kSteps];
  uint2 late[kSteps];
};

template <int kSteps, typename T>
__device__ __forceinline__ void load_query(const AbsorbParams& p, const T* a, int token, QueryTile<kSteps>& tile) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    tile.early[step] = tile.late[step] = make_uint2(0, 0);
    if (token < p.tokens) tile.early[step] = *reinterpret_cast<const uint2*>(a + token * p.a_token_stride + 16 * step);
    if (token + 8 < p.tokens) {
      tile.late[step] = *reinterpret_cast<const uint2*>(a + (token + 8) * p.a_token_stride + 16 * step);
    }
  }
}

// kInnerWarps warps share 64 columns and split the inner dimension, 16 * kSteps rows each.
template <typename T, int kInnerWarps, int kSteps>
__global__ void __launch_bounds__(kAbsorbThreads, 2) absorb_kernel(const __grid_constant__ AbsorbParams p) {
  static_assert(kInnerWarps * kSteps * 16 == kAbsorbInner);
  __shared__ float partial[kInnerWarps > 1 ? kInnerWarps - 1 : 1][kInnerWarps > 1 ? kColumnTiles * 4 : 1][kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int g = lane / 4, q = lane % 4;
  const int head = blockIdx.y;
  const int inner_warp = warp % kInnerWarps;
  const int column = (blockIdx.x * (kAbsorbWarps / kInnerWarps) + warp / kInnerWarps) * kWarpColumns;
  const int inner = inner_warp * kSteps * 16;

  const T* b =
      static_cast<const T*>(p.b) + head * p.b_head_stride + (inner + 4 * q) * p.b_inner_stride + column + 8 * g;
  uint4 raw[kSteps][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int row = 0; row < 4; ++row) raw[step][row] = load_weights(b + (16 * step + row) * p.b_inner_stride);
  }
  const T* a = static_cast<const T*>(p.a) + head * p.a_head_stride + inner + 4 * q;
  QueryTile<kSteps> query;
  load_query(p, a, g, query);

  copy_rope<T>(p, head, blockIdx.x, gridDim.x);

  WeightStep weights[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) pack(raw[step], weights[step]);

  for (int first = 0; first < p.tokens; first += kTokenTile) {
    const int token = first + g;
    float sum[kColumnTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t operand[4] = {query.early[step].x, query.late[step].x, query.early[step].y, query.late[step].y};
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) mma<T>(sum[j], operand, weights[step].low[j], weights[step].high[j]);
    }
    load_query(p, a, token + kTokenTile, query);  // of the next tile, while this one is reduced and stored
    if constexpr (kInnerWarps > 1) {
      __syncthreads();  // the previous tile's partial sums have been read
      if (inner_warp > 0) {
#pragma unroll
        for (int i = 0; i < kColumnTiles * 4; ++i) partial[inner_warp - 1][i][lane] = sum[i / 4][i % 4];
      }
      __syncthreads();
      if (inner_warp > 0) continue;
#pragma unroll
      for (int other = 0; other < kInnerWarps - 1; ++other) {
#pragma unroll
        for (int i = 0; i < kColumnTiles * 4; ++i) sum[i / 4][i % 4] += partial[other][i][lane];
      }
    }
    float values[kLaneColumns];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (token + 8 * half >= p.tokens) break;
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) values[i] = sum[i % 8][2 * half + i / 8];
      store_columns<T>(p, head, token + 8 * half, column + kLaneColumns * q, values);
    }
  }
}

}  // namespace mla
