// K's side of a token chunk: this CTA's channels of the sampled mean, the blocks' largest magnitudes and scales, the
// codes.
#pragma once

#include "../ptx/flag.h"
#include "../ptx/ldmatrix.h"
#include "../ptx/mbarrier.h"
#include "token_chunk.h"

namespace fp8attn {

// One item of the sample of K: one word of the tokens of one lane. The items of a CTA are its pairs of lane and word.
template <typename T>
struct Sample {
  uint32_t raw[STEPS];

  // `k`: the head's first token, at the slice's first channel.
  __device__ void load(const QuantizeParams& p, const ClusterCoord& coord, const T* k, int item) {
    const int words = 1 << coord.log_words(), lane = item / words;
    // quantization.sample_step, the number of token chunks: one of that many groups of LANES tokens is sampled
    const int64_t step = coord.token_chunks * LANES;
    const T* from = k + 2 * (coord.token_chunk * words + item % words) + lane * p.k_strides[2];
#pragma unroll
    for (int i = 0; i < STEPS; ++i, from += step * p.k_strides[2]) raw[i] = i * int(step) + lane < coord.length ? *reinterpret_cast<const uint32_t*>(from) : 0;
  }

  __device__ float2 sum() const {
    float2 found = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const float2 x = Pair<T>::floats(raw[i]);
      found.x += x.x, found.y += x.y;
    }
    return found;
  }
};

// The sampled mean of this CTA's words, if it has any. `sample`: the thread's first item, already loaded.
template <QuantizeConfig C, typename T>
__device__ void measure_keys(const QuantizeParams& p, QuantizeStorage<C>& shared, const ClusterCoord& coord, const T* k, Sample<T>& sample) {
  const int words = 1 << coord.log_words(), first = coord.token_chunk * words;
  if (first >= WORDS) return;
#pragma unroll 1
  for (int item = threadIdx.x; item < LANES * words; item += THREADS) {
    if (item >= THREADS) sample.load(p, coord, k, item);
    float2 sum = sample.sum();
    if (!is_finite(sum.x) || !is_finite(sum.y)) {
#pragma unroll
      for (int i = 0; i < STEPS; ++i) sample.raw[i] &= ~not_finite<T>(sample.raw[i]);
      sum = sample.sum();
    }
    reinterpret_cast<float2*>(shared.sampled)[item] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= 2 * words) return;
  float sum[LANES];
#pragma unroll
  for (int lane = 0; lane < LANES; ++lane) sum[lane] = shared.sampled[lane * 2 * words + threadIdx.x];
  shared.own.key_mean[threadIdx.x] = __fmul_rn(halving_sum(sum), coord.inverse_sample(p));
}

// Rotates and stores K's mean. Every token chunk computes it redundantly, in one warp. A lane has four channels; 16
// lanes have all of them.
template <QuantizeConfig C>
__device__ void finish_keys(const QuantizeParams& p, QuantizeStorage<C>& shared, const ClusterCoord& coord, int lane) {
  constexpr int count = CHANNELS / 4;
  float4* means = reinterpret_cast<float4*>(shared.key_mean);
  const float4 mean = removable(rotated(means[lane % count]));
  __syncwarp();  // all lanes have read `means`
  if (lane >= count) return;
  means[lane] = mean;
  if (coord.token_chunk == 0) reinterpret_cast<float4*>(p.k_mean + coord.channel())[lane] = mean;
}

// How threads divide K's tile. A warp has 16 rows of each block, a quad of lanes two of them, and a thread four
// channels of every quarter of these two.
template <typename T>
struct Keys {
  static constexpr int distance = 8;           // between the two rows of a quad
  static constexpr int at_once = 32 / CHUNKS;  // rows that a warp copies at a time
  const KeyRotation<T, true> rotation = KeyRotation<T, true>(threadIdx.x);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % 4 * 4;

  // The thread's i-th token of block n.
  __device__ int token(int n, int i) const { return n * KEYS + warp * 16 + lane / 4 + distance * i; }

  // Neither the 8 chunks of a token nor the same chunk of 8 adjacent tokens have bank conflicts.
  __device__ static uint4& chunk_of(TokenChunkTile& tile, int token, int chunk) { return reinterpret_cast<uint4*>(tile[token])[chunk_at(token, chunk)]; }

  // Calls f(token, chunk) for every chunk of block n that this thread copies.
  template <typename F>
  __device__ void for_chunks(int n, F&& f) const {
#pragma unroll
    for (int i = 0; i < 16; i += at_once) f(n * KEYS + warp * 16 + lane / CHUNKS + i, lane % CHUNKS);
  }

  // `from`: the token chunk's first token, at the slice's first channel. Tokens from `count` on are zero. Every block
  // is one group of copies.
  __device__ void load(TokenChunkTile& tile, const T* from, int64_t stride, int count) const {
    from += (warp * 16 + lane / CHUNKS) * stride + lane % CHUNKS * 8;
#pragma unroll 1
    for (int n = 0; n < BLOCKS; ++n, from += (KEYS - 16) * stride) {
      for_chunks(n, [&](int token, int chunk) {
        ptx::cp_async_16(&chunk_of(tile, token, chunk), from, token < count);
        from += at_once * stride;
      });
      ptx::cp_async_commit();
    }
  }

  // Waits for the warp's rows of block n. Rows that don't exist become NaN.
  __device__ void wait_for(TokenChunkTile& tile, int n, int count) const {
    wait_for_block(n);
    if ((n + 1) * KEYS > count) {
      for_chunks(n, [&](int token, int chunk) {
        if (token >= count) chunk_of(tile, token, chunk) = {~0u, ~0u, ~0u, ~0u};
      });
    }
    __syncwarp();
  }

  // Non-finite elements of the warp's rows of block n become NaN.
  __device__ void write_nan(TokenChunkTile& tile, int n) const {
    __syncwarp();
    for_chunks(n, [&](int token, int chunk) {
      uint4& words = chunk_of(tile, token, chunk);
      words = nan_where_nonfinite<T>(words);
    });
    __syncwarp();
  }

  // The thread's two rows of block n, rotated, minus the mean.
  __device__ void rotated(float (&y)[QUARTERS][2][4], TokenChunkTile& tile, int n, const float4 (&mean)[QUARTERS]) const {
    rotation(y, [&](uint32_t (&words)[4], int quarter) { ptx::ldmatrix(words, &chunk_of(tile, n * KEYS + warp * 16 + lane % 16, 2 * quarter + lane / 16)); });
#pragma unroll
    for (int i = 0; i < QUARTERS; ++i) centre(y[i][0], mean[i]), centre(y[i][1], mean[i]);
  }
};

// Bytes that a CTA receives on largest_full: the largest magnitudes of all slices, and for int8 also their non-finite
// tokens. int8 has no NaN: one non-finite channel makes the token's row non-finite in all slices.
template <bool INT8, QuantizeConfig C>
__device__ int bytes_of_largest(const QuantizeStorage<C>& shared, const ClusterCoord& coord) {
  return coord.slices * int(sizeof(shared.largest[0]) + (INT8 ? sizeof(shared.nonfinite[0]) : 0));
}

// Finds the largest magnitudes of K's blocks as they arrive, and sends them to all slices of the token chunk.
// Infinities become NaN in the tile.
template <bool INT8, QuantizeConfig C, typename T>
__device__ void find_largest(QuantizeStorage<C>& shared, const ClusterCoord& coord, const Keys<T>& keys, const float4 (&mean)[QUARTERS]) {
#pragma unroll 1
  for (int n = 0; n < BLOCKS; ++n) {
    keys.wait_for(shared.tile, n, coord.count);
    float largest;
    bool nonfinite[2];
    for (bool again = true; again;) {
      largest = 0.0f;
      float y[QUARTERS][2][4];
      keys.rotated(y, shared.tile, n, mean);
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
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (INT8 && nonfinite[i] && keys.token(n, i) < coord.count)
        atomicOr(reinterpret_cast<uint32_t*>(&shared.own.nonfinite[n]) + keys.warp / 2, 1u << keys.token(0, i) % LANES);
    }
  }
  __syncthreads();
  if constexpr (INT8) broadcast_nonfinite<C>(shared, coord, &shared.largest_full);
  if (threadIdx.x >= coord.slices) return;
  uint32_t largest[BLOCKS];
#pragma unroll
  for (int n = 0; n < BLOCKS; ++n) {
    float of_slice = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) of_slice = fmaxf(of_slice, shared.of_warps[i][n]);
    largest[n] = __float_as_uint(of_slice);
  }
  send(coord, coord.rank_of(coord.token_chunk, threadIdx.x), shared.largest[coord.slice], {largest[0], largest[1], largest[2], largest[3]}, &shared.largest_full);
}

// Stores the scales of K's blocks. An int8 scale is negative if a token of the block is non-finite. Returns the inverse
// scale of block threadIdx.x % BLOCKS.
template <bool INT8, QuantizeConfig C>
__device__ float finish_blocks(const QuantizeParams& p, const QuantizeStorage<C>& shared, const ClusterCoord& coord) {
  const int block = threadIdx.x % BLOCKS;
  float largest = 0.0f;
  bool has_nonfinite_key = false;
  for (int i = 0; i < coord.slices; ++i) {
    largest = fmaxf(largest, shared.largest[i][block]);
    if constexpr (INT8) has_nonfinite_key |= any(shared.nonfinite[i][block]);
  }
  const float scale = row_scale_of<INT8>(largest);
  if (coord.slice == 0 && threadIdx.x < BLOCKS && block * KEYS < coord.count)
    p.k_scale[int64_t(coord.row()) * (p.padded / KEYS) + coord.first_page + coord.token_chunk * BLOCKS + block] = has_nonfinite_key ? -scale : scale;
  return __fdiv_rn(1.0f, scale);
}

// Writes K's codes. `inverse`: what finish_blocks returned to this thread. CAREFUL: some tokens are non-finite or don't
// exist.
template <bool CAREFUL, bool INT8, QuantizeConfig C, typename T>
__device__ void write_keys(const QuantizeParams& p, QuantizeStorage<C>& shared, const ClusterCoord& coord, const Keys<T>& keys, const float4 (&mean)[QUARTERS], float inverse) {
  const int odd = keys.lane % 2;
  uint8_t* to = p.k_data + coord.batch * p.k_data_strides[0] + coord.head * p.k_data_strides[1] + coord.slice * CHANNELS;
  to += (coord.begin + coord.first + keys.token(0, 0)) * p.k_data_strides[2] + odd * QUARTER + keys.column / 8 * 8;
#pragma unroll 1
  for (int n = 0; n < BLOCKS; ++n, to += KEYS * p.k_data_strides[2]) {
    const float factor = __shfl_sync(~0u, inverse, n);
    uint32_t nonfinite = 0;
    if constexpr (CAREFUL) {
      for (int slice = 0; slice < coord.slices; ++slice) nonfinite |= reinterpret_cast<const uint32_t*>(&shared.nonfinite[slice][n])[keys.warp / 2];
      nonfinite >>= keys.token(0, 0) % LANES;
    }
    float y[QUARTERS][2][4];
    keys.rotated(y, shared.tile, n, mean);
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
        if (!CAREFUL || keys.token(n, i) < coord.count) *reinterpret_cast<uint2*>(to + Keys<T>::distance * i * p.k_data_strides[2] + quarter * QUARTER) = words;
      }
    }
  }
}

// Quantizes a slice of the keys of a token chunk: scales of blocks, codes. `k`: the token chunk's first token, at the
// slice's first channel. The mean is in shared.key_mean; V is done with shared.tile. Says that the CTA is done.
template <bool INT8, QuantizeConfig C, typename T>
__device__ void write_keys_of_token_chunk(const QuantizeParams& p, QuantizeStorage<C>& shared, const ClusterCoord& coord, const T* k) {
  const Keys<T> keys;
  keys.load(shared.tile, k, p.k_strides[2], coord.count);
  float4 mean[QUARTERS];
#pragma unroll
  for (int i = 0; i < QUARTERS; ++i) mean[i] = *reinterpret_cast<const float4*>(&shared.key_mean[i * QUARTER + keys.column]);
  find_largest<INT8, C, T>(shared, coord, keys, mean);
  ptx::mbarrier_wait(&shared.largest_full, 0);
  const float inverse = finish_blocks<INT8, C>(p, shared, coord);
  if (is_careful(shared, coord, 0, coord.slices))
    write_keys<true, INT8, C, T>(p, shared, coord, keys, mean, inverse);
  else
    write_keys<false, INT8, C, T>(p, shared, coord, keys, mean, inverse);
  if (p.ready == nullptr) return;
  ptx::fence_proxy_async_all();  // the attention kernel reads these tensors by TMA
  __syncthreads();
  if (threadIdx.x == 0) ptx::add_release(&p.ready[coord.pair], 1);
}

}  // namespace fp8attn
