// Rows of Q or K of half precision in shared memory, of which threads rotate whole parts: no lane needs another's
// channels. Gives the bytes of row_team.h.
#pragma once

#include "../ptx/cp_async.h"
#include "channels.h"
#include "quantize.h"
#include "row_team.h"

namespace fp8attn {

constexpr int64_t MOST_STRIDE = 1 << 24;  // elements from one row to the next, so that 32 bits count those of a block
constexpr int LARGEST_PART = 64;          // channels that a thread can rotate together

// How the threads of a CTA divide SCALE_BLOCK rows. A thread has a row, and of it every `groups`-th unit: the channels
// that are rotated together, or a chunk if PART is 0: none are. Threads of a group have the same units, those of a warp
// adjacent rows.
template <int PART>
struct RowUnits {
  static constexpr int size = PART > 0 ? PART : CHUNK;                   // channels of a unit
  static constexpr int count = size < 32 ? 32 / size : 1;                // units of a thread
  static constexpr int chunks = count * size / CHUNK;                    // that a thread copies, at most
  static constexpr int most_groups = 256 / (count * size);               // of the largest head dim
  static constexpr int most_threads = size < LARGEST_PART ? 1024 : 768;  // of an SM, by the registers of a thread

  int units, groups;

  __host__ __device__ explicit RowUnits(int head_dim) : units(head_dim / size), groups((units + count - 1) / count) {}

  __host__ __device__ int threads() const { return groups * SCALE_BLOCK; }
  __device__ int row() const { return threadIdx.x % SCALE_BLOCK; }
  __device__ int group() const { return threadIdx.x / SCALE_BLOCK; }

  // The thread's i-th unit, and whether there is one.
  __device__ int unit(int i) const { return group() + i * groups; }
  __device__ bool has(int i) const { return count == 1 || unit(i) < units; }
};

// SCALE_BLOCK rows in shared memory: of half precision, and later their codes. Chunks of 16 bytes of eight adjacent
// rows have different banks. A thread copies COUNT chunks of 16 bytes at most, and half as many of codes.
template <int COUNT>
struct StagedRows {
  const int threads, chunks, inverse, pitch;  // of the CTA; of a row, and 2^20 over that, rounded up; bytes from one row to the next

  __host__ __device__ static int pitch_of(int head_dim) { return 16 * (head_dim / CHUNK | 1); }
  __host__ __device__ static int bytes_of(int head_dim) { return SCALE_BLOCK * pitch_of(head_dim); }

  __device__ StagedRows(int head_dim, int its_threads)
      : threads(its_threads), chunks(head_dim / CHUNK), inverse(((1 << 20) + chunks - 1) / chunks), pitch(pitch_of(head_dim)) {}

  // Copies `count` rows from global memory, where they start at multiples of 16 bytes. The others are zeros.
  __device__ void load(uint8_t* tile, const void* from, int stride, int count) const {
    for_chunks<COUNT, 1>(SCALE_BLOCK, [&](int row, int chunk) {
      ptx::cp_async_16(tile + row * pitch + 16 * chunk, static_cast<const uint16_t*>(from) + row * stride + chunk * CHUNK, row < count);
    });
  }

  // Copies the codes of `count` rows to global memory, where they start at multiples of 8 bytes.
  __device__ void store_codes(const uint8_t* tile, uint8_t* to, int stride, int count) const {
    if (chunks % 2 == 0 && (reinterpret_cast<uintptr_t>(to) | stride) % 16 == 0)
      store<uint4>(tile, to, stride, count);
    else
      store<uint2>(tile, to, stride, count);
  }

 private:
  // Calls f(row, chunk) for those that the thread copies, of `count` rows. A chunk has WIDTH times eight channels.
  template <int MOST, int WIDTH, typename F>
  __device__ void for_chunks(int count, F&& f) const {
    int first = threadIdx.x;
    asm volatile("" : "+r"(first));  // else all places are computed before the loop over blocks, and spilled
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
      const int place = first + i * threads, row = place * WIDTH * inverse >> 20;
      if (row < count) f(row, place - row * (chunks / WIDTH));
    }
  }

  template <typename Codes>
  __device__ void store(const uint8_t* tile, uint8_t* to, int stride, int count) const {
    constexpr int width = sizeof(Codes) / CHUNK;
    for_chunks<COUNT / width, width>(count, [&](int row, int chunk) {
      const int at = chunk * int(sizeof(Codes));
      *reinterpret_cast<Codes*>(to + row * stride + at) = *reinterpret_cast<const Codes*>(tile + row * pitch + at);
    });
  }
};

// Loads a unit, and rotates it: rotation.rotate, with its order of additions. Only signs of zeros may differ. The
// division by PART is exact, so that it may be fused into the first sum.
template <int PART, typename T, int SIZE>
__device__ void load_unit(float (&y)[SIZE], const uint4* from) {
#pragma unroll
  for (int i = 0; i < SIZE; i += CHUNK) {
    const uint4 words = from[i / CHUNK];
    const float2 pairs[] = {Pair<T>::floats(words.x), Pair<T>::floats(words.y), Pair<T>::floats(words.z), Pair<T>::floats(words.w)};
#pragma unroll
    for (int j = 0; j < CHUNK / 2; ++j) y[i + 2 * j] = pairs[j].x, y[i + 2 * j + 1] = pairs[j].y;
  }
  if constexpr (PART > 0) {
    constexpr auto factor = [](int channel) { return (sign_bit(channel) ? -1.0f : 1.0f) / PART; };
#pragma unroll
    for (int i = 0; i < PART; i += 2) {
      const float low = __fmul_rn(y[i], factor(i)), high = y[i + 1];
      y[i] = fmaf(high, factor(i + 1), low), y[i + 1] = fmaf(high, -factor(i + 1), low);
    }
    transform_in_lane<2>(y);
  }
}

// Four codes of a unit. No zero is negative if it is rotated.
template <int PART, bool INT8>
__device__ uint32_t codes_of_unit(const float* y, float factor) {
  if constexpr (INT8 || PART == 0)
    return codes_of<INT8>(y, factor);
  else
    return ptx::e4m3x4(fmaf(y[0], factor, 0.0f), fmaf(y[1], factor, 0.0f), fmaf(y[2], factor, 0.0f), fmaf(y[3], factor, 0.0f));
}

}  // namespace fp8attn
