// K's side of a token chunk: a CTA's channels of the sampled mean of a cluster, the blocks' scales, the codes.
#pragma once

#include "../ptx/ldmatrix.h"
#include "token_chunk.h"
#include "token_chunk_values.h"

namespace fp8attn {

// A thread's part of the sample of K, of heads of several token chunks: four channels of the tokens of one lane. A CTA
// has at most one part for each thread.
template <typename T>
struct Sample {
  static constexpr int LOADS = SAMPLE / LANES;
  uint2 raw[LOADS];

  // How many parts the CTA has: none if it has no channels of the mean.
  __device__ static int parts(const ClusterCoord& coord) {
    const int words = 1 << coord.log_words();
    return coord.token_chunk * words < WORDS ? LANES * words / 2 : 0;
  }

  // `k`: the head's first token, at the slice's first channel.
  __device__ void load(const QuantizeParams& p, const ClusterCoord& coord, const T* k) {
    const int words = 1 << coord.log_words(), lane = threadIdx.x / (words / 2), apart = sample_step(coord.length);
    const T* from = k + 2 * coord.token_chunk * words + threadIdx.x % (words / 2) * 4;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int token = (LANES * i + lane) * apart;
      raw[i] = token < coord.length ? *reinterpret_cast<const uint2*>(from + token * p.k_strides[2]) : uint2{};
    }
  }

  __device__ float4 sum() const {
    float4 found = {};
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const float2 a = Pair<T>::floats(raw[i].x), b = Pair<T>::floats(raw[i].y);
      found.x += a.x, found.y += a.y, found.z += b.x, found.w += b.y;
    }
    return found;
  }
};

// The slice's sampled mean of K, of heads of one token chunk: nobody else has the slice.
template <QuantizeConfig C, typename T>
__device__ void measure_slice_of_keys(const QuantizeParams& p, QuantizeStorage<C>& shared, const ClusterCoord& coord, const T* k, const Mine& mine) {
  const int thread = threadIdx.x;
  const int apart = sample_step(coord.length);
  const Measured<T, SAMPLE / LANES> measured({k, p.k_strides[2], apart, mine}, coord.length, apart, mine, false);
  measured(shared.values.warps, shared.own.token_chunk, shared.own.nonfinite, mine);
  if (thread < CHANNELS) shared.own.key_mean[thread] = key_mean_of(shared.own.token_chunk.sum[thread], coord.inverse_sample(p));
  if (thread < BLOCKS) shared.own.nonfinite[thread] = {};  // it is of V's tokens
  __syncthreads();
}

// This CTA's channels of the sampled mean of K, if it has any, of heads of several token chunks. `sample`: already
// loaded.
template <QuantizeConfig C, typename T>
__device__ void measure_sampled_keys(const QuantizeParams& p, QuantizeStorage<C>& shared, const ClusterCoord& coord, Sample<T>& sample) {
  const int thread = threadIdx.x;
  const int parts = Sample<T>::parts(coord), channels = 4 * parts / LANES;
  if (parts == 0) return;
  if (thread < parts) {
    float4 sum = sample.sum();
    if (!is_finite(sum.x) || !is_finite(sum.y) || !is_finite(sum.z) || !is_finite(sum.w)) {
#pragma unroll
      for (uint2& words : sample.raw) words = without(words, not_finite<T>(words));
      sum = sample.sum();
    }
    reinterpret_cast<float4*>(shared.sampled)[thread] = sum;
  }
  __syncthreads();
  if (thread >= channels) return;
  float sum[LANES];
#pragma unroll
  for (int lane = 0; lane < LANES; ++lane) sum[lane] = shared.sampled[lane * channels + thread];
  shared.own.key_mean[thread] = key_mean_of(halving_sum(sum), coord.inverse_sample(p));
}

// Rotates a slice of K's mean, in one warp. A lane has four channels; 16 lanes have all of them. Every CTA of a cluster
// computes it redundantly, and one stores it.
__device__ inline void finish_keys(const QuantizeParams& p, TileStorage& shared, const ClusterCoord& coord, int slice, int lane) {
  constexpr int count = CHANNELS / 4;
  float4* means = reinterpret_cast<float4*>(shared.key_mean + slice * CHANNELS);
  const float4 mean = removable(rotated(means[lane % count]));
  __syncwarp();  // all lanes have read `means`
  if (lane >= count) return;
  means[lane] = mean;
  if (coord.token_chunk == 0 && slice == coord.slice) reinterpret_cast<float4*>(p.k_mean + coord.channel())[lane] = mean;
}

// Keys of a token chunk that fit into a tile: all slices of some blocks, so that scales need no other CTA. The tile has
// the blocks one after another, and of a block its slices. Parts have blocks by turns, so that each has some where a
// token chunk has few.
struct KeyPart {
  int slices, first_block, count;

  // `number`: of the part. `count`: tokens of the token chunk.
  __device__ KeyPart(int slices, int number, int count) : slices(slices), first_block(number), count(count) {}

  // A token chunk is divided into 1, 2, 4 and 4 parts of 1 to 4 slices.
  __host__ __device__ static int parts_of(int slices) { return slices < 3 ? slices : 4; }

  __device__ int log_slices() const { return (slices > 1) + (slices > 2); }

  // Number of blocks, and of groups of 128 rows of the tile, if all have tokens.
  __device__ int blocks() const { return BLOCKS >> log_slices(); }
  __device__ int groups() const { return blocks() * slices; }

  // The block, of the token chunk's, and slice of the n-th group.
  __device__ int block_of(int n) const { return first_block + (n >> log_slices() << log_slices()); }
  __device__ int slice_of(int n) const { return n & (1 << log_slices()) - 1; }

  // Tokens of the n-th group's block and those behind it. A group without tokens is left out, as are those behind it.
  __device__ int left(int n) const { return count - block_of(n) * KEYS; }
  __device__ bool has(int n) const { return n < groups() && left(n) > 0; }
};

// How threads divide K's tile. A warp has 16 rows of each group, a quad of lanes two of them, and a thread four
// channels of every quarter of these two.
template <typename T>
struct Keys {
  static constexpr int distance = 8;               // between the two rows of a quad
  static constexpr int copied_rows = 32 / CHUNKS;  // that a warp copies together
  const KeyRotation<T, true> rotation = KeyRotation<T, true>(threadIdx.x);
  KeyPart part;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % 4 * 4;

  __device__ explicit Keys(KeyPart part) : part(part) {}

  // The first of the thread's two rows of a group.
  __device__ int row() const { return warp * 16 + lane / 4; }

  // Neither the 8 chunks of a row nor the same chunk of 8 adjacent rows have bank conflicts.
  __device__ static uint4& chunk_of(TokenChunkTile& tile, uint32_t row, uint32_t chunk) { return reinterpret_cast<uint4*>(tile[row])[chunk_at(row, chunk)]; }

  // Calls f(row, chunk) for every chunk of a group that this thread copies.
  template <typename F>
  __device__ void for_chunks(F&& f) const {
#pragma unroll
    for (int i = 0; i < 16; i += copied_rows) f(int(warp * 16 + lane / CHUNKS) + i, int(lane % CHUNKS));
  }

  // `keys`: the token chunk's first token, at the head's first channel. In a block that has tokens, those that don't
  // exist are zero. Every group is one group of copies.
  __device__ void load(TokenChunkTile& tile, const T* keys, int64_t stride) const {
    asm volatile("" : "+l"(stride));  // else registers hold what a second part needs of it, and some are spilled
    const int row = warp * 16 + lane / CHUNKS, first = part.first_block * KEYS + row;
    const T* of_block = keys + first * stride + lane % CHUNKS * 8;
    uint4* const to = reinterpret_cast<uint4*>(tile[row]);
    const uint32_t chunk = lane % CHUNKS ^ lane / CHUNKS;  // of the first row that the thread copies
    int left = part.count - first;
#pragma unroll 1
    for (int n = 0; n < BLOCKS; ++n) {
      if (part.has(n)) {
        const T* from = of_block + part.slice_of(n) * CHANNELS;
#pragma unroll
        for (int i = 0; i < 16; i += copied_rows, from += copied_rows * stride) ptx::cp_async_16(to + (n * KEYS + i) * CHUNKS + (chunk ^ i % CHUNKS), from, i < left);
        if (part.slice_of(n + 1) == 0) of_block += (KEYS << part.log_slices()) * stride, left -= KEYS << part.log_slices();
      }
      ptx::cp_async_commit();
    }
  }

  // The same of the token chunk's tokens in pages.
  __device__ void load(TokenChunkTile& tile, const PagedTokens<T>& tokens) const {
    const int row = warp * 16 + lane / CHUNKS;
    uint4* const to = reinterpret_cast<uint4*>(tile[row]);
    const uint32_t chunk = lane % CHUNKS ^ lane / CHUNKS;  // of the first row that the thread copies
#pragma unroll 1
    for (int n = 0; n < BLOCKS; ++n) {
      if (part.has(n)) {
        const int first = part.block_of(n) * KEYS + row, channel = part.slice_of(n) * CHANNELS + lane % CHUNKS * 8;
#pragma unroll
        for (int i = 0; i < 16; i += copied_rows) ptx::cp_async_16(to + (n * KEYS + i) * CHUNKS + (chunk ^ i % CHUNKS), tokens.chunk(first + i, channel), first + i < part.count);
      }
      ptx::cp_async_commit();
    }
  }

  // Waits for the warp's rows of group n. Rows that don't exist become NaN.
  __device__ void wait_for(TokenChunkTile& tile, int n) const {
    wait_for_copies(n);
    const int left = part.left(n);
    if (left < KEYS) {
      for_chunks([&](int row, int chunk) {
        if (row >= left) chunk_of(tile, n * KEYS + row, chunk) = {~0u, ~0u, ~0u, ~0u};
      });
    }
    __syncwarp();
  }

  // Non-finite elements of the warp's rows of group n become NaN.
  __device__ void write_nan(TokenChunkTile& tile, int n) const {
    asm volatile("" : "+r"(n));  // addresses aren't computed before it is known that there are any
    __syncwarp();
    for_chunks([&](int row, int chunk) {
      uint4& words = chunk_of(tile, n * KEYS + row, chunk);
      words = nan_where_nonfinite<T>(words);
    });
    __syncwarp();
  }

  // The thread's two rows of group n, rotated, minus the mean.
  __device__ void rotated(float (&y)[QUARTERS][2][4], TileStorage& shared, int n) const {
    rotation(y, [&](uint32_t (&words)[4], int quarter) { ptx::ldmatrix(words, &chunk_of(shared.tile, n * KEYS + warp * 16 + lane % 16, 2 * quarter + lane / 16)); });
    const float* mean = shared.key_mean + part.slice_of(n) * CHANNELS + column;
#pragma unroll
    for (int i = 0; i < QUARTERS; ++i) {
      const float4 of_quarter = *reinterpret_cast<const float4*>(mean + i * QUARTER);
      centre(y[i][0], of_quarter), centre(y[i][1], of_quarter);
    }
  }
};

// Finds the largest magnitudes of K's groups of rows as they arrive. Infinities become NaN in the tile. int8 has no
// NaN: one non-finite channel makes the token's row non-finite in all slices.
template <bool INT8, typename T>
__device__ void find_largest(TileStorage& shared, const Keys<T>& keys) {
#pragma unroll 1
  for (int n = 0; keys.part.has(n); ++n) {
    keys.wait_for(shared.tile, n);
    float largest;
    bool nonfinite[2];
    for (bool again = true; again;) {
      largest = 0.0f;
      float y[QUARTERS][2][4];
      keys.rotated(y, shared, n);
#pragma unroll
      for (int i = 0; i < QUARTERS; ++i) {
#pragma unroll
        for (int c = 0; c < 8; ++c) largest = fmaxf(largest, fabsf(y[i][c / 4][c % 4]));  // fmaxf ignores NaN
      }
      // the rotation spreads a NaN over all channels of its part
      nonfinite[0] = y[0][0][0] != y[0][0][0], nonfinite[1] = y[0][1][0] != y[0][1][0];
      again = __any_sync(~0u, largest == INFINITE);
      if (again) keys.write_nan(shared.tile, n);
    }
    const uint32_t of_warp = __reduce_max_sync(~0u, __float_as_uint(largest));
    if (keys.lane == n) shared.of_warps[keys.warp][n] = __uint_as_float(of_warp);
    const int block = keys.part.block_of(n);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = keys.row() + Keys<T>::distance * i;
      if (INT8 && nonfinite[i] && row < keys.part.left(n))
        atomicOr(reinterpret_cast<uint32_t*>(&shared.nonfinite[keys.part.slice_of(n)][block]) + row / LANES, 1u << row % LANES);
    }
  }
  __syncthreads();
}

// Stores the scales of K's blocks. An int8 scale is negative if a token of the block is non-finite. Returns the inverse
// scale of the part's block threadIdx.x % BLOCKS, if it has tokens.
template <bool INT8, typename T>
__device__ float finish_blocks(const QuantizeParams& p, const TileStorage& shared, const ClusterCoord& coord, const Keys<T>& keys) {
  const int n = threadIdx.x % BLOCKS << keys.part.log_slices(), block = keys.part.block_of(n);
  if (!keys.part.has(n)) return 0.0f;
  float largest = 0.0f;
  bool has_nonfinite_key = false;
#pragma unroll 1
  for (int slice = 0; slice < keys.part.slices; ++slice) {
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) largest = fmaxf(largest, shared.of_warps[warp][n + slice]);
    if constexpr (INT8) has_nonfinite_key |= any(shared.nonfinite[slice][block]);
  }
  const float scale = row_scale_of<INT8>(largest);
  if (threadIdx.x < BLOCKS)
    p.k_scale[int64_t(coord.row()) * (p.padded / KEYS) + coord.first_page + coord.token_chunk * BLOCKS + block] = has_nonfinite_key ? -scale : scale;
  return __frcp_rn(scale);
}

// Writes K's codes. `inverse`: what finish_blocks returned to this thread. CAREFUL: some tokens are non-finite or don't
// exist.
template <bool CAREFUL, bool INT8, typename T>
__device__ void write_keys(const QuantizeParams& p, TileStorage& shared, const ClusterCoord& coord, const Keys<T>& keys, float inverse) {
  const int odd = keys.lane % 2;
  uint8_t* codes_of_chunk = p.k_data + coord.batch * p.k_data_strides[0] + coord.head * p.k_data_strides[1];
  codes_of_chunk += (coord.begin + coord.first + keys.row()) * p.k_data_strides[2] + odd * QUARTER + keys.column / 8 * 8;
#pragma unroll 1
  for (int n = 0; keys.part.has(n); ++n) {
    const int block = keys.part.block_of(n), left = keys.part.left(n);
    uint8_t* to = codes_of_chunk + block * KEYS * p.k_data_strides[2] + keys.part.slice_of(n) * CHANNELS;
    const float factor = __shfl_sync(~0u, inverse, n >> keys.part.log_slices());
    uint32_t nonfinite = 0;
    if constexpr (CAREFUL) {
      for (int slice = 0; slice < keys.part.slices; ++slice) nonfinite |= reinterpret_cast<const uint32_t*>(&shared.nonfinite[slice][block])[keys.row() / LANES];
      nonfinite >>= keys.row() % LANES;
    }
    float y[QUARTERS][2][4];
    keys.rotated(y, shared, n);
#pragma unroll
    for (int quarter = 0; quarter < QUARTERS; quarter += 2) {
      uint32_t codes[2][2];  // [quarter][row]
#pragma unroll
      for (int j = 0; j < 4; ++j) codes[j / 2][j % 2] = codes_of<INT8>(y[quarter + j / 2][j % 2], factor);
      // of two lanes, the even one gets eight channels of the first quarter, the odd one eight of the second
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t kept = odd ? codes[1][i] : codes[0][i], got = __shfl_xor_sync(~0u, odd ? codes[0][i] : codes[1][i], 1);
        uint2 words = odd ? uint2{got, kept} : uint2{kept, got};
        if (CAREFUL && nonfinite >> Keys<T>::distance * i & 1) words = {NAN_CODES<INT8>, NAN_CODES<INT8>};
        if (!CAREFUL || keys.row() + Keys<T>::distance * i < left) *reinterpret_cast<uint2*>(to + Keys<T>::distance * i * p.k_data_strides[2] + quarter * QUARTER) = words;
      }
    }
  }
}

// Quantizes a part of a token chunk's keys. Copies have begun; the mean and the non-finite tokens of V are there.
template <bool INT8, typename T>
__device__ void write_key_part(const QuantizeParams& p, TileStorage& shared, const ClusterCoord& coord, const Keys<T>& keys) {
  find_largest<INT8, T>(shared, keys);
  const float inverse = finish_blocks<INT8, T>(p, shared, coord, keys);
  bool careful = keys.part.count < TOKEN_CHUNK;
#pragma unroll 1
  for (int n = 0; keys.part.has(n); ++n) careful |= any(shared.nonfinite[keys.part.slice_of(n)][keys.part.block_of(n)]);
  if (careful)
    write_keys<true, INT8, T>(p, shared, coord, keys, inverse);
  else
    write_keys<false, INT8, T>(p, shared, coord, keys, inverse);
}

// Quantizes the parts of a token chunk's keys that a CTA has, from `keys.part` on: every `slices`-th one. from(): the
// token chunk's first token.
template <bool INT8, typename T, typename From>
__device__ void write_key_parts(const QuantizeParams& p, TileStorage& shared, const ClusterCoord& coord, Keys<T>& keys, From&& from) {
#pragma unroll 1
  while (keys.part.has(0)) {
    write_key_part<INT8, T>(p, shared, coord, keys);
    keys.part.first_block += keys.part.groups();
    if (!keys.part.has(0)) break;
    __syncthreads();  // the tile has been read
    keys.load(shared.tile, from(), p.k_strides[2]);
  }
}

}  // namespace fp8attn
