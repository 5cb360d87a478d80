// Preprocesses a mask for the Hopper kernel: into one bit per query and key, and into flags of every block.
// FlexAttention's BlockMask (arXiv:2412.05496), for any mask.
#pragma once

#include "block_mask.h"
#include "tile/mask.h"
#include "tile/kv_blocks.h"

namespace fp8attn {

constexpr int READERS = 4;   // warps of a CTA, each with one block of keys and one group of rows
constexpr int ROWS_IN_FLIGHT = 16;  // rows of the mask that a warp has in flight

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T of[4];
};

// Loads a lane's four keys of one row. CAREFUL: keys may not exist, and may have any stride and alignment.
template <bool CAREFUL, typename T>
__device__ Four<T> load_four(const T* at, int64_t step, int exist) {
  if constexpr (!CAREFUL) return *reinterpret_cast<const Four<T>*>(at);
  Four<T> four = {};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < exist) four.of[i] = at[i * step];
  return four;
}

// Called by a warp: reads the mask of one group of rows and one block of keys, from `mask` on. Writes its bits, and
// returns its BlockMask flags.
template <bool CAREFUL, typename T>
__device__ uint32_t read_block(const Params& p, const T* mask, int rows, int keys, uint32_t* bits) {
  const int lane = threadIdx.x % 32, exist = keys - 4 * lane;
  bool shows = false, hides = false, adds = false;
  mask += 4 * lane * p.mask_strides[3];
#pragma unroll 1
  for (int first = 0; first < p.mask_rows; first += ROWS_IN_FLIGHT) {
    Four<T> values[ROWS_IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < ROWS_IN_FLIGHT; ++i) values[i] = load_four<CAREFUL>(mask + min(first + i, rows - 1) * p.mask_strides[2], p.mask_strides[3], exist);
#pragma unroll
    for (int i = 0; i < ROWS_IN_FLIGHT; ++i) {
      if (first + i >= p.mask_rows) break;
      uint32_t visible_lanes[4];  // [n]: bit i is set if the n-th key of lane i is visible
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float value = mask_value(values[i].of[n]);
        const bool exists = first + i < rows && (!CAREFUL || n < exist), visible = value != -INFINITE;
        shows |= exists && visible, hides |= exists && !visible, adds |= exists && visible && value != 0.0f;
        visible_lanes[n] = __ballot_sync(~0u, exists && visible);
      }
      // Lanes 2j and 2j + 1 have keys 8j ... 8j + 7, four each. Each of the four words takes two of these eight.
      const uint32_t low = (lane % 2 == 0 ? visible_lanes[0] : visible_lanes[2]) >> lane / 2, high = (lane % 2 == 0 ? visible_lanes[1] : visible_lanes[3]) >> lane / 2;
      if (lane < MASK_WORDS) bits[(first + i) * MASK_WORDS + lane] = (low & 0x55555555) | (high & 0x55555555) << 1;
    }
  }
  if (!__any_sync(~0u, shows)) return 0;
  return ANY_VISIBLE | (__any_sync(~0u, hides) ? ANY_HIDDEN : 0) | (__any_sync(~0u, adds) ? ANY_ADDED : 0);
}

template <typename T>
__global__ void __launch_bounds__(32 * READERS) read_blocks(const __grid_constant__ Params p) {
  const int blocks = (p.kv_length + KEYS - 1) / KEYS;
  const int64_t at = int64_t(blockIdx.x) * READERS + threadIdx.x / 32;
  if (at >= int64_t(p.mask_batches) * p.mask_heads * p.mask_groups * blocks) return;
  const int64_t plane = at / blocks / p.mask_groups;
  const int group = at / blocks % p.mask_groups, key = int(at % blocks) * KEYS;
  const T* mask = static_cast<const T*>(p.mask) + plane / p.mask_heads * p.mask_strides[0] + plane % p.mask_heads * p.mask_strides[1] +
                  int64_t(group) * ROWS * p.mask_strides[2] + key * p.mask_strides[3];
  const int rows = min(p.mask_rows, p.q_length - group * ROWS), keys = p.kv_length - key;
  const bool plain = p.mask_strides[3] == 1 && keys >= KEYS && p.mask_strides[2] % 4 == 0 && reinterpret_cast<uintptr_t>(mask) % sizeof(Four<T>) == 0;
  uint32_t* bits = mask_bits(p, at);
  const uint32_t flags = plain ? read_block<false>(p, mask, rows, keys, bits) : read_block<true>(p, mask, rows, keys, bits);
  if (threadIdx.x % 32 == 0) p.block_mask[at] = uint8_t(flags);
}

cudaError_t build_block_mask(const Params& p, cudaStream_t stream) {
  const int64_t blocks = int64_t(p.mask_batches) * p.mask_heads * p.mask_groups * ((p.kv_length + KEYS - 1) / KEYS);
  const auto kernel = p.mask_type == 0                       ? read_blocks<uint8_t>
                      : p.mask_type == 1 + int(OutType::bf16) ? read_blocks<__nv_bfloat16>
                      : p.mask_type == 1 + int(OutType::f16)  ? read_blocks<__half>
                                                              : read_blocks<float>;
  kernel<<<(blocks + READERS - 1) / READERS, 32 * READERS, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace fp8attn
