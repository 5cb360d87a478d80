// V's side of a token chunk: its moments, the means and scales from the moments of all token chunks, the codes.
#pragma once

#include "../ptx/warpgroup.h"
#include "token_chunk.h"

namespace fp8attn {

// What a thread loads and measures of V's tile: one chunk of the tokens of one lane. The lanes of a warp are WARPS
// apart, because quantization.lane_sum adds such lanes first.
struct Mine {
  int part;
  uint32_t thread;
  int chunk, lane;

  // `its_part`: of a CTA's parts of THREADS threads each, which measure different tiles.
  __device__ explicit Mine(int its_part = 0)
      : part(its_part), thread(threadIdx.x - its_part * THREADS), chunk(thread % CHUNKS), lane(thread / 32 + thread % 32 / CHUNKS * WARPS) {}

  // Barrier of the part.
  __device__ void sync() const { ptx::threads_sync<THREADS>(1 + part); }

  // The thread's i-th token of block n.
  __device__ int token(int n, int i) const { return n * KEYS + i * LANES + lane; }

  __device__ uint4& at(TokenChunkTile& tile, int n, int i) const {
    static_assert(RUN == 2 * LANES && KEYS == 2 * RUN);
    return *reinterpret_cast<uint4*>(&tile[token(n, i)][4 * chunk_at(2 * n + i / 2, chunk)]);
  }

  // `from`: the token chunk's first token, at the slice's first channel. In a block that has tokens, those from `count`
  // on are zero. Every block is one group of copies.
  template <typename T>
  __device__ void load(TokenChunkTile& tile, const T* from, int64_t stride, int count) const {
    from += lane * stride + chunk * 8;
#pragma unroll 1
    for (int n = 0; n < BLOCKS; ++n) {
      if (n < blocks_of(count)) {
#pragma unroll
        for (int i = 0; i < OF_BLOCK; ++i, from += LANES * stride) ptx::cp_async_16(&at(tile, n, i), from, token(n, i) < count);
      }
      ptx::cp_async_commit();
    }
  }

  // The same of tokens in pages, at the slice's first channel `channel`.
  template <typename T>
  __device__ void load(TokenChunkTile& tile, const PagedTokens<T>& tokens, int channel, int count) const {
#pragma unroll 1
    for (int n = 0; n < BLOCKS; ++n) {
      if (n < blocks_of(count)) {
#pragma unroll
        for (int i = 0; i < OF_BLOCK; ++i) ptx::cp_async_16(&at(tile, n, i), tokens.chunk(token(n, i), channel + chunk * 8), token(n, i) < count);
      }
      ptx::cp_async_commit();
    }
  }

  // Non-finite elements of what the thread has loaded become NaN.
  template <typename T>
  __device__ void write_nan(TokenChunkTile& tile) const {
#pragma unroll 1
    for (int i = 0; i < STEPS; ++i) {
      uint4& words = at(tile, i / OF_BLOCK, i % OF_BLOCK);
      words = nan_where_nonfinite<T>(words);
    }
  }
};

// Moments of a thread's chunk: 8 channels.
template <typename T>
struct ChunkMoments {
  static constexpr uint32_t above = Pair<T>::infinities, below = above | 0x80008000;
  float sum[8] = {};
  uint32_t low[4] = {above, above, above, above}, high[4] = {below, below, below, below};

  // Adds one token. The words of a token that doesn't exist are zero.
  __device__ void add(uint4 words, bool exists) {
    add_to_sums(words);
    add_to_extremes(words, exists);
  }

  __device__ void add_to_sums(uint4 words) {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = Pair<T>::floats(word[i]);
      sum[2 * i] += x.x, sum[2 * i + 1] += x.y;
    }
  }

  __device__ void add_to_extremes(uint4 words, bool exists) {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t counts = exists ? word[i] : ~0u;  // NaN changes neither minimum nor maximum
      low[i] = least<T>(low[i], counts), high[i] = most<T>(high[i], counts);
    }
  }

  // Adds one token without the elements whose bits are set in `bad`.
  __device__ void add_finite(uint4 words, uint4 bad) {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w}, out[4] = {bad.x, bad.y, bad.z, bad.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = Pair<T>::floats(word[i] & ~out[i]);
      sum[2 * i] += x.x, sum[2 * i + 1] += x.y;
      low[i] = least<T>(low[i], word[i] | out[i]), high[i] = most<T>(high[i], word[i] | out[i]);
    }
  }

  // Whether all elements were finite and no sum overflowed.
  __device__ bool is_finite() const {
    float zero = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) zero = fmaf(sum[i], 0.0f, zero);
    return zero == 0.0f;
  }

  // Adds the moments of the lane `distance` threads away.
  __device__ void join(int distance) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], distance);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      low[i] = least<T>(low[i], __shfl_xor_sync(~0u, low[i], distance));
      high[i] = most<T>(high[i], __shfl_xor_sync(~0u, high[i], distance));
    }
  }
};

// Moments of a slice of a token chunk, from those of all threads.
template <typename T>
__device__ void join_moments(Moments (&warps)[WARPS], Moments& token_chunk, ChunkMoments<T>& found, const Mine& mine) {
  // the order of quantization.lane_sum: lanes 16 apart, then 8, 4, 2 and 1
  found.join(16);
  found.join(8);
  if (mine.thread % 32 < CHUNKS) {
    Moments& of_warp = warps[mine.thread / 32];
    float4* sum = reinterpret_cast<float4*>(&of_warp.sum[8 * mine.chunk]);
    sum[0] = {found.sum[0], found.sum[1], found.sum[2], found.sum[3]}, sum[1] = {found.sum[4], found.sum[5], found.sum[6], found.sum[7]};
    reinterpret_cast<uint4*>(of_warp.low)[mine.chunk] = {found.low[0], found.low[1], found.low[2], found.low[3]};
    reinterpret_cast<uint4*>(of_warp.high)[mine.chunk] = {found.high[0], found.high[1], found.high[2], found.high[3]};
  }
  mine.sync();
  static_assert(WARPS == 8 && CHANNELS + 2 * WORDS <= THREADS);
  const int word = mine.thread % WORDS;
  if (mine.thread < CHANNELS) {
    const auto sum_of = [&](int warp) { return warps[warp].sum[mine.thread]; };
    token_chunk.sum[mine.thread] = ((sum_of(0) + sum_of(4)) + (sum_of(2) + sum_of(6))) + ((sum_of(1) + sum_of(5)) + (sum_of(3) + sum_of(7)));
  } else if (mine.thread < CHANNELS + WORDS) {
    uint32_t low = warps[0].low[word];
    for (int i = 1; i < WARPS; ++i) low = least<T>(low, warps[i].low[word]);
    token_chunk.low[word] = low;
  } else if (mine.thread < CHANNELS + 2 * WORDS) {
    uint32_t high = warps[0].high[word];
    for (int i = 1; i < WARPS; ++i) high = most<T>(high, warps[i].high[word]);
    token_chunk.high[word] = high;
  }
  mine.sync();
}

// Measures V's tile as it arrives. Non-finite elements become NaN in the tile, and their tokens go to own.nonfinite.
template <QuantizeConfig C, typename T>
__device__ void measure_values(QuantizeStorage<C>& shared, const ClusterCoord& coord, const Mine& mine) {
  TokenChunkTile& tile = shared.tile.tile;
  ChunkMoments<T> found;
  const int blocks = blocks_of(coord.count);
#pragma unroll 1
  for (int n = 0; n < blocks; ++n) {
    wait_for_copies(n);
    if ((n + 1) * KEYS <= coord.count) {
#pragma unroll
      for (int i = 0; i < OF_BLOCK; ++i) found.add(mine.at(tile, n, i), true);
    } else {
#pragma unroll
      for (int i = 0; i < OF_BLOCK; ++i) found.add(mine.at(tile, n, i), mine.token(n, i) < coord.count);
    }
  }
  if (!found.is_finite()) {
    found = ChunkMoments<T>();
#pragma unroll 1
    for (int i = 0; i < STEPS && mine.token(0, i) < coord.count; ++i) {
      uint4& words = mine.at(tile, i / OF_BLOCK, i % OF_BLOCK);
      const uint4 bad = not_finite<T>(words);
      found.add_finite(words, bad);
      if (!any(bad)) continue;
      words = words | bad;
      atomicOr(reinterpret_cast<uint32_t*>(shared.own.nonfinite) + i, 1u << mine.lane);
    }
  }
  __syncthreads();  // `warps` overlaps `sampled`, which has been read
  join_moments<T>(shared.values.warps, shared.own.token_chunk, found, mine);
}

// What a thread measures of a slice: one chunk of the tokens of its lane, `apart` from one another.
template <typename T>
struct StridedChunks {
  const T* from;
  int64_t step;

  // `first_token`: the first one, at the slice's first channel.
  __device__ StridedChunks(const T* first_token, int64_t stride, int apart, const Mine& mine)
      : from(first_token + mine.lane * apart * stride + mine.chunk * 8), step(LANES * apart * stride) {}

  __device__ uint4 operator()(int i) const { return *reinterpret_cast<const uint4*>(from + i * step); }
};

// The same of tokens in pages, which are `apart` already. `channel`: the slice's first one.
template <typename T>
struct PagedChunks {
  const PagedTokens<T>& tokens;
  int lane, channel;

  __device__ PagedChunks(const PagedTokens<T>& tokens, int channel, const Mine& mine) : tokens(tokens), lane(mine.lane), channel(channel + mine.chunk * 8) {}

  __device__ uint4 operator()(int i) const { return *static_cast<const uint4*>(tokens.chunk(i * LANES + lane, channel)); }
};

// What a thread measures of global memory. LOADS tokens are in flight.
template <typename T, int LOADS, class Chunks = StridedChunks<T>>
struct Measured {
  Chunks at;
  int count;       // of STEPS tokens, the others don't exist
  bool of_values;  // whether anybody asks for extremes

  // One of `apart` tokens before the `end`-th counts.
  __device__ Measured(const Chunks& at, int end, int apart, const Mine& mine, bool of_values)
      : at(at), count((end - mine.lane * apart + LANES * apart - 1) / (LANES * apart)), of_values(of_values) {}

  // Measures a slice. Non-finite tokens go to `nonfinite`.
  __device__ void operator()(Moments (&warps)[WARPS], Moments& token_chunk, uint4 (&nonfinite)[BLOCKS], const Mine& mine) const {
    ChunkMoments<T> found;
#pragma unroll 1
    for (int first = 0; first < STEPS && __any_sync(~0u, first < count); first += LOADS) {
      uint4 words[LOADS];
#pragma unroll
      for (int i = 0; i < LOADS; ++i) words[i] = first + i < count ? at(first + i) : uint4{};
#pragma unroll
      for (int i = 0; i < LOADS; ++i) found.add_to_sums(words[i]);
      if (!of_values) continue;
#pragma unroll
      for (int i = 0; i < LOADS; ++i) found.add_to_extremes(words[i], first + i < count);
    }
    if (!found.is_finite()) {
      found = ChunkMoments<T>();
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const uint4 bad = not_finite<T>(at(i));
        found.add_finite(at(i), bad);
        if (any(bad)) atomicOr(reinterpret_cast<uint32_t*>(nonfinite) + i, 1u << mine.lane);
      }
    }
    join_moments<T>(warps, token_chunk, found, mine);
  }
};

// Mean (.x) and scale (.y) of a channel of V, from its sums over LANES or fewer lanes of token chunks and its extremes.
template <int N>
__device__ float2 mean_and_scale(float inverse_length, const float (&sum)[N], float low, float high) {
  const float mean = removable(coarse(__fmul_rn(halving_sum(sum), inverse_length), low, high));
  return {mean, scale_of(fmaxf(fmaxf(high - mean, mean - low), 0.0f))};
}

// Extremes of a channel, from words that have those of two.
template <typename T>
__device__ void join_extremes(float& low, float& high, uint32_t lows, uint32_t highs, int channel) {
  const float2 low_pair = Pair<T>::floats(lows), high_pair = Pair<T>::floats(highs);
  low = fminf(low, channel % 2 ? low_pair.y : low_pair.x), high = fmaxf(high, channel % 2 ? high_pair.y : high_pair.x);
}

template <typename T>
__device__ void join_extremes(float& low, float& high, const Moments& more, int channel) {
  join_extremes<T>(low, high, more.low[channel / 2], more.high[channel / 2], channel);
}

// Mean and scale of a channel of V, from the moments of `count` token chunks, of MOST at most.
template <int MOST, typename T>
__device__ float2 mean_and_scale(float inverse_length, const Moments* token_chunks, int count, int channel) {
  float sum[MOST], low = INFINITE, high = -INFINITE;
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    sum[i] = 0.0f;
    if (i >= count) continue;
    sum[i] += token_chunks[i].sum[channel];
    join_extremes<T>(low, high, token_chunks[i], channel);
  }
  // token chunks are the lanes of quantization.lane_sum; chunks that don't exist add zeros
  return mean_and_scale(inverse_length, sum, low, high);
}

// Mean and scale of one channel of V. Every token chunk computes them redundantly.
template <QuantizeConfig C, typename T>
__device__ void finish_values(const QuantizeParams& p, QuantizeStorage<C>& shared, const ClusterCoord& coord, int channel) {
  const float2 found = mean_and_scale<C.token_chunks, T>(coord.inverse_length(p), shared.values.token_chunks, coord.token_chunks, channel);
  shared.tile.shift[channel] = found.x, shared.tile.factor[channel] = __frcp_rn(found.y);
  if (coord.token_chunk != 0) return;
  p.v_mean[coord.channel() + channel] = found.x;
  p.v_scale[coord.channel() + channel] = found.y;
}

// Writes V's codes, transposed, with keys in the order of layout.key_of_slot. A warp has chunks of channels: one, or
// several where the token chunk has few runs of tokens, and then other warps have none. A thread has one word of a
// chunk and the tokens of one run. The codes of a group of tokens are 16 bytes of each channel. They wait in the tile,
// where the warp had these tokens, so that all codes of a channel are stored at once.
// CAREFUL: some tokens are non-finite or don't exist.
template <bool CAREFUL, typename T>
__device__ void write_values(const QuantizeParams& p, TileStorage& shared, const ClusterCoord& coord) {
  constexpr int CODED = 8;  // channels of a chunk
  static_assert(TOKEN_CHUNK == 8 * RUN && RUN == 4 * GROUP && KEYS == 2 * RUN && BLOCKS == 4 && GROUP >= CODED);
  const int log_runs = CAREFUL ? 1 + (coord.count > KEYS) + (coord.count > 2 * KEYS) : 3;  // of a warp
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int run = lane / 4 & (1 << log_runs) - 1, chunk = (warp << 3 - log_runs) + (lane >> 2 + log_runs), channel = chunk * 8 + lane % 4 * 2;
  if (CAREFUL && chunk >= CHUNKS) return;
  const int column = 4 * chunk_at(run, chunk) + lane % 4;
  const float2 mean = *reinterpret_cast<const float2*>(&shared.shift[channel]), factor = *reinterpret_cast<const float2*>(&shared.factor[channel]);
  const __half2 gain = __half2half2(__float2half(coord.length > TOKEN_CHUNK ? FEEDBACK : 0.0f));
  const int padded = (coord.length + KEYS - 1) / KEYS * KEYS;
  // the codes of a channel of the chunk and of the group that has this token
  const auto codes_at = [&](int its_channel, int token) -> uint4& {
    return reinterpret_cast<uint4*>(shared.tile[token / GROUP * GROUP + its_channel])[chunk_at(token / RUN, chunk)];
  };
  Feedback feedback;
#pragma unroll 1
  for (int first = run * RUN; first < (run + 1) * RUN; first += GROUP) {
    const auto number = [&](int i) -> float2 {
      const int token = first + i;
      const float2 y = Pair<T>::floats(shared.tile[token][column]);
      float2 x = {(y.x - mean.x) * factor.x, (y.y - mean.y) * factor.y};
      if constexpr (CAREFUL) {
        const bool exists = token < coord.count;
        x = {exists & (x.x == x.x) ? x.x : 0.0f, exists & (x.y == x.y) ? x.y : 0.0f};
      }
      return x;
    };
    uint4 of_channel[2];
    encode_group(feedback, gain, number, of_channel);
    __syncwarp();  // the warp has read the group
#pragma unroll
    for (int c = 0; c < 2; ++c) codes_at(channel % CODED + c, first) = of_channel[c];
  }
  __syncwarp();
  // the lanes of a chunk store one group of all its channels each
  const int first = lane % (4 << log_runs) * GROUP;
  if (CAREFUL && coord.first + first >= padded) return;
  uint8_t* to = p.v_data + (coord.data_channel() + chunk * CODED) * p.padded + coord.first_page * KEYS + coord.first + first;
#pragma unroll
  for (int i = 0; i < CODED; ++i, to += p.padded) *reinterpret_cast<uint4*>(to) = codes_at(i, first);
}

// Whether some tokens of the token chunk don't exist, or are non-finite in its slice of V.
__device__ inline bool is_careful(const TileStorage& shared, const ClusterCoord& coord) {
  bool nonfinite = false;
  for (int n = 0; n < BLOCKS; ++n) nonfinite |= any(shared.nonfinite[coord.slice][n]);
  return coord.count < TOKEN_CHUNK || nonfinite;
}

}  // namespace fp8attn
