// Rows whose channels the adjacent lanes of a team hold, CHUNK each: rotation of any power of two, with the
// definition's order of additions; codes and scales.
#pragma once

#include "channels.h"
#include "quantize.h"

namespace fp8attn {

// The definition's sign of a channel: rotation.sign_bit.
__device__ constexpr int sign_bit(int channel) {
  int pairs = channel & channel >> 1;
  pairs ^= pairs >> 4, pairs ^= pairs >> 2;
  return (pairs ^ pairs >> 1) & 1;
}

// Whether x is true for one of `lanes` lanes of the warp, from lane `first` on.
__device__ inline bool any_of_lanes(bool x, int first, int lanes) {
  const uint32_t members = lanes == 32 ? ~0u : (1u << lanes) - 1;
  return __ballot_sync(~0u, x) >> first & members;
}

// The lanes of a warp that have a row: a power of two. The last ones may have no channels; theirs are zeros.
struct RowTeam {
  int lanes, member, channel;  // `channel`: the lane's first
  bool has_channels;

  __device__ explicit RowTeam(int head_dim) : lanes(head_dim > 128 ? 32 : head_dim > 64 ? 16 : head_dim > 32 ? 8 : head_dim > 16 ? 4 : 2) {
    member = threadIdx.x % lanes, channel = member * CHUNK;
    has_channels = channel < head_dim;
  }

  // Called by a whole warp, as all functions with shuffles.
  __device__ float largest(float x) const {
#pragma unroll 1
    for (int distance = lanes / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
    return x;
  }

  __device__ float sum(float x) const {
#pragma unroll 1
    for (int distance = lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
    return x;
  }

  // Whether x is true for a lane of the team.
  __device__ bool any(bool x) const { return any_of_lanes(x, threadIdx.x % 32 / lanes * lanes, lanes); }
};

// The same of as many lanes as have channels. Teams lie side by side; the last lanes of a warp may have no row.
struct DenseTeam {
  int lanes, of_warp, number, member, channel;  // `of_warp`: teams of a warp, of which this is the `number`-th
  bool has_channels;

  __device__ explicit DenseTeam(int head_dim) : lanes((head_dim + CHUNK - 1) / CHUNK), of_warp(32 / lanes) {
    const int lane = threadIdx.x % 32;
    number = lane / lanes, member = lane - number * lanes, channel = member * CHUNK;
    has_channels = number < of_warp;
  }

  // Called by a whole warp, as all functions with shuffles.
  __device__ float largest(float x) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      if (distance >= lanes) continue;
      const float other = __shfl_sync(~0u, x, (lane + distance) % 32);
      if (member + distance < lanes) x = fmaxf(x, other);
    }
    return __shfl_sync(~0u, x, lane - member);
  }

  // Whether x is true for a lane of the team.
  __device__ bool any(bool x) const { return any_of_lanes(x, threadIdx.x % 32 - member, lanes); }
};

// Sums and differences of channels `FIRST` apart, then of those twice as far apart, and so on: what of the transform is
// among a lane's channels.
template <int FIRST, int N>
__device__ void transform_in_lane(float (&y)[N]) {
#pragma unroll
  for (int distance = FIRST; distance < N; distance *= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i & distance) continue;
      const float low = y[i], high = y[i + distance];
      y[i] = low + high, y[i + distance] = low - high;
    }
  }
}

// The largest finite magnitude of a lane's channels. Those that are not finite become NaN.
template <int N>
__device__ float largest_finite(float (&y)[N]) {
  const auto largest = [&] {
    float found = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) found = fmaxf(found, fabsf(y[i]));  // fmaxf ignores NaN
    return found;
  };
  const float found = largest();
  if (found < INFINITE) return found;
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = is_finite(y[i]) ? y[i] : NAN;
  return largest();
}

template <int N>
__device__ bool has_nan(const float (&y)[N]) {
  bool found = false;
#pragma unroll
  for (int i = 0; i < N; ++i) found |= y[i] != y[i];
  return found;
}

// Rotation of parts of `part` channels: 0 for none, else a power of two from CHUNK on that divides the head dim.
struct TeamRotation {
  int part;
  float factor[CHUNK];  // of the lane's channels: their signs times `unit`

  template <typename Team>
  __device__ TeamRotation(int its_part, const Team& team, float unit) : part(its_part) {
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) factor[i] = (part > 0) & sign_bit((team.channel + i) & (part - 1)) ? -unit : unit;
  }

  // Times the matrix without signs.
  __device__ void transform(float (&y)[CHUNK]) const { transform(reinterpret_cast<float(&)[1][CHUNK]>(y)); }

  // The same of several rows at a time.
  template <int COUNT>
  __device__ void transform(float (&rows)[COUNT][CHUNK]) const {
#pragma unroll
    for (int row = 0; row < COUNT; ++row) transform_in_lane<1>(rows[row]);
#pragma unroll 1
    for (int distance = 1; distance * CHUNK < part; distance *= 2) {
      const float sign = threadIdx.x & distance ? -1.0f : 1.0f;  // teams start at multiples of a part's lanes
#pragma unroll
      for (int i = 0; i < COUNT * CHUNK; ++i) {
        float& y = rows[i / CHUNK][i % CHUNK];
        y = fmaf(y, sign, __shfl_xor_sync(~0u, y, distance));
      }
    }
  }

  // rotation.rotate, for a unit of 1 / part.
  __device__ void rotate(float (&y)[CHUNK]) const {
    if (part == 0) return;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) y[i] = __fmul_rn(y[i], factor[i]);  // else the product is fused into a sum
    transform(y);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) y[i] += 0.0f;  // no zero is negative
  }

  // The mean m of which q * m is the product of rotation.rotate_queries(q) and the rotated mean y, for a unit of 1.
  __device__ void unrotate(float (&y)[CHUNK]) const {
    if (part == 0) return;
    transform(y);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) y[i] *= factor[i];
  }
};

// A lane's channels of a row: rotated, centred, non-finite ones NaN.
struct RowChunk {
  float y[CHUNK], largest;  // `largest` finite magnitude

  template <typename T>
  __device__ RowChunk(const Chunk<T>& chunk, const TeamRotation& rotation, const float (&mean)[CHUNK]) {
    chunk.floats(y);
    rotation.rotate(y);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) y[i] -= mean[i];  // finite if y was
    largest = largest_finite(y);
  }

  __device__ bool has_nan() const { return fp8attn::has_nan(y); }
};

}  // namespace fp8attn
