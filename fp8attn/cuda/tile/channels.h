// Channels of one token in global memory, of any dtype and alignment.
#pragma once

#include "pair.h"

namespace fp8attn {

constexpr int CHUNK = 8;  // channels that a thread loads of a token

// Two channels of a token. ALIGNED: they start at a multiple of their size.
template <bool ALIGNED, typename T>
__device__ float2 load_pair(const T* from) {
  if constexpr (sizeof(T) == 4) {
    if constexpr (ALIGNED) return *reinterpret_cast<const float2*>(from);
    return {from[0], from[1]};
  } else {
    if constexpr (ALIGNED) return Pair<T>::floats(*reinterpret_cast<const uint32_t*>(from));
    const auto* bits = reinterpret_cast<const uint16_t*>(from);
    return Pair<T>::floats(bits[0] | uint32_t(bits[1]) << 16);
  }
}

// CHUNK channels of a token, as they are in memory.
template <typename T>
struct Chunk {
  static constexpr int WORDS = CHUNK * sizeof(T) / 4;

  uint32_t words[WORDS] = {};

  // ALIGNED: they start at a multiple of 16 bytes.
  template <bool ALIGNED>
  __device__ void load(const T* from) {
    if constexpr (ALIGNED) {
#pragma unroll
      for (int i = 0; i < WORDS; i += 4) {
        const uint4 loaded = reinterpret_cast<const uint4*>(from)[i / 4];
        words[i] = loaded.x, words[i + 1] = loaded.y, words[i + 2] = loaded.z, words[i + 3] = loaded.w;
      }
    } else if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) words[i] = reinterpret_cast<const uint32_t*>(from)[i];
    } else {
      const auto* bits = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
      for (int i = 0; i < WORDS; ++i) words[i] = bits[2 * i] | uint32_t(bits[2 * i + 1]) << 16;
    }
  }

  __device__ void floats(float (&x)[CHUNK]) const {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) x[i] = __uint_as_float(words[i]);
    } else {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) {
        const float2 two = Pair<T>::floats(words[i]);
        x[2 * i] = two.x, x[2 * i + 1] = two.y;
      }
    }
  }
};

// Chunks of several tokens, in WORDS registers, whose loads are in flight together.
template <typename T, int WORDS>
struct Chunks {
  static constexpr int COUNT = WORDS / Chunk<T>::WORDS;

  Chunk<T> of[COUNT];

  // Token i is `stride * i` behind `from`. It is zero unless exists(i).
  template <typename Exists>
  __device__ void load(const T* from, int64_t stride, bool aligned, Exists&& exists) {
    if (aligned) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        of[i] = {};
        if (exists(i)) of[i].template load<true>(from + i * stride);
      }
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        of[i] = {};
        if (exists(i)) of[i].template load<false>(from + i * stride);
      }
    }
  }
};

}  // namespace fp8attn
