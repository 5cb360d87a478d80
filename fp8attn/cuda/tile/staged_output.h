// Stores the output from accumulators through shared memory, by TMA, while the warpgroup continues.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "../ptx/fma.h"
#include "../ptx/stmatrix.h"
#include "../ptx/tma.h"
#include "schedule.h"

namespace fp8attn {

// Output boxes of each warp of a warpgroup, for its 16 rows. A box is being written or being stored. Chunks of 16 bytes
// have TMA's swizzle, but for boxes that are stored row by row.
template <int BOXES>
struct alignas(1024) OutputBoxes {
  uint8_t bytes[4][BOXES][OUTPUT_ROWS * OUTPUT_BYTES];
};

struct Nothing {};

// Stands for the scales and means of channels that sums have already.
template <int CHANNELS>
struct Restored {
  static constexpr int channels = CHANNELS;
};

// Normalises and stores the 16 output rows of a warp. TOGETHER: behind one fence, if all boxes of a tile have a buffer.
// PACKED: rows from row_end on are the next sequence's. A box with such rows is stored row by row, by a lane each,
// because TMA only drops what is outside of the tensor.
template <typename Scales, int BOXES, bool TOGETHER = true, bool PACKED = false>
struct StagedOutput {
  const Params& p;
  const Tile& tile;
  const Scales& scales;
  OutputBoxes<BOXES>& boxes;
  int first_row, lane;
  float inverse[2];
  float weight[2];  // the keys' share of a row: 1, less beside a sink, or 0 without visible keys
  [[no_unique_address]] std::conditional_t<PACKED, int, Nothing> row_end;

  template <typename RowEnd>
  __device__ StagedOutput(const Params& params, const Tile& its_tile, int its_first_row, RowEnd&& end, const Scales& its_scales, OutputBoxes<BOXES>& its_boxes, const float (&l)[2])
      : p(params), tile(its_tile), scales(its_scales), boxes(its_boxes), first_row(its_first_row), lane(threadIdx.x % 32) {
    if constexpr (PACKED) row_end = end();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      inverse[r] = l[r] == 0.0f ? 0.0f : ptx::reciprocal(l[r]);
      weight[r] = l[r] == 0.0f ? 0.0f : 1.0f;
    }
  }

  // Keys have `share` of the weight of the thread's row r.
  __device__ void set_weight(int r, float share) { weight[r] = share; }

  // Normalises, descales and stores COUNT channels, from FIRST on.
  template <int FIRST, int COUNT, int N>
  __device__ void store(const float (&o)[N]) const {
    switch (p.out_type) {
      case OutType::bf16:
        return store_as<__nv_bfloat16, FIRST, COUNT>(o);
      case OutType::f16:
        return store_as<__half, FIRST, COUNT>(o);
      case OutType::f32:
        return store_as<float, FIRST, COUNT>(o);
    }
  }

 private:
  __device__ bool by_rows() const {
    if constexpr (PACKED)
      return first_row + OUTPUT_ROWS > row_end;
    else
      return false;
  }

  // Stores the lane's row of a box from channel `first` on, if it is the sequence's.
  template <typename T>
  __device__ void store_row(const uint8_t* box, int first) const {
    const int row = first_row + lane, bytes = min(OUTPUT_BYTES, (p.value_dim - first) * int(sizeof(T)));
    if (lane >= OUTPUT_ROWS || row >= row_end || bytes <= 0) return;
    T* head = static_cast<T*>(p.out) + tile.batch * p.out_strides[0] + tile.head * p.out_strides[1];
    ptx::bulk_store(head + row * p.out_strides[2] + first, box + lane * OUTPUT_BYTES, bytes);
  }

  // The swizzle of a row's chunks.
  __device__ int swizzle(int row) const { return by_rows() ? 0 : row % 8; }

  // The output of channels x and x + 1 of the thread's row r.
  __device__ float2 value(float a, float b, int r, int x) const {
    if constexpr (std::is_same_v<Scales, Restored<Scales::channels>>) {
      return {weight[r] * (a * inverse[r]), weight[r] * (b * inverse[r])};
    } else {
      const float2 scale = reinterpret_cast<const float2&>(scales.channel_scale[x]), mean = reinterpret_cast<const float2&>(scales.channel_mean[x]);
      return {weight[r] * fmaf(a * inverse[r], scale.x, mean.x), weight[r] * fmaf(b * inverse[r], scale.y, mean.y)};
    }
  }

  __device__ static uint32_t pack(float2 x, __nv_bfloat16) {
    const __nv_bfloat162 pair = __float22bfloat162_rn(x);
    return reinterpret_cast<const uint32_t&>(pair);
  }

  __device__ static uint32_t pack(float2 x, __half) {
    const __half2 pair = __float22half2_rn(x);
    return reinterpret_cast<const uint32_t&>(pair);
  }

  // Writes channels x to x + COUNT - 1, at most a box, to shared memory.
  template <typename T, int COUNT>
  __device__ void write(uint8_t* to, const float* s, int x) const {
    x += lane % 4 * 2;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int j = 0; j < COUNT / 8; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = lane / 4 + 8 * r, chunk = (2 * j + lane % 4 / 2) ^ swizzle(row);
          *reinterpret_cast<float2*>(to + row * OUTPUT_BYTES + chunk * 16 + lane % 2 * 8) = value(s[4 * j + 2 * r], s[4 * j + 2 * r + 1], r, x + 8 * j);
        }
    } else {
      // four matrices at a time: rows 0 ... 7 and 8 ... 15 of one group of 8 channels, then of the next group
      uint8_t* row = to + lane % 16 * OUTPUT_BYTES;
#pragma unroll
      for (int j = 0; j < COUNT / 8; j += 2) {
        uint32_t matrices[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (j + i / 2) + 2 * (i % 2);
          matrices[i] = pack(value(s[at], s[at + 1], i % 2, x + 8 * (j + i / 2)), T());
        }
        ptx::stmatrix(row + ((j + lane / 16) ^ swizzle(lane)) * 16, matrices);
      }
    }
  }

  template <typename T, int FIRST, int COUNT, int N>
  __device__ void store_as(const float (&o)[N]) const {
    constexpr int width = OUTPUT_BYTES / sizeof(T);
    constexpr int of_tile = (Scales::channels + width - 1) / width, together = TOGETHER && of_tile <= BOXES ? of_tile : 1;
    // else the first box of a tile uses the same buffer as the last box of the previous tile
    constexpr bool evenly = of_tile % BOXES == 0;
    static_assert(FIRST % width == 0);  // a tile's boxes use the buffers by turns, whichever call stores them
#pragma unroll
    for (int first = 0; first * width < COUNT; first += together) {
      const auto box = [&](int i) { return boxes.bytes[threadIdx.x % 128 / 32][(FIRST / width + first + i) % BOXES]; };
      if (PACKED || lane == 0) {  // with rows of their own, all lanes have as many groups, of which some are empty
        if (together == of_tile || (FIRST == 0 && first == 0 && !evenly))
          ptx::tma_store_wait<0>();
        else
          ptx::tma_store_wait<BOXES - 1>();
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < together; ++i) {
        const int at = (first + i) * width;
        if (at + width <= COUNT)
          write<T, width>(box(i), o + at / 2, FIRST + at);
        else
          write<T, COUNT % width>(box(i), o + at / 2, FIRST + at);  // the last box extends beyond the tensor
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if constexpr (PACKED) {
        if (by_rows()) {
#pragma unroll
          for (int i = 0; i < together; ++i) store_row<T>(box(i), FIRST + (first + i) * width);
        }
      }
      if (lane == 0 && !by_rows()) {
#pragma unroll
        for (int i = 0; i < together; ++i) ptx::tma_store(p.out_map, box(i), (FIRST + (first + i) * width) * sizeof(T), first_row, tile.head, tile.batch);
      }
      if (PACKED || lane == 0) ptx::tma_store_commit();
    }
  }
};

}  // namespace fp8attn
