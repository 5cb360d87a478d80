// fp8attn/quantize.py's default recipe, or the same of int8, for K and V of bfloat16 or half, sm_90a: the same bytes in one launch that reads each once.
//
// A cluster of CTAs has a head: each CTA the slice of 64 channels of a strip of 512 tokens, of V and then of K, in shared memory. V comes first
// because keys whose values aren't finite become NaN. What needs all tokens, means and scales, is made of what CTAs tell each other; K's mean is that
// of a sample, which they read from memory.
#pragma once

#include "config.h"
#include "launch.h"
#include "params.h"
#include "ptx/cluster.h"
#include "ptx/cp_async.h"
#include "ptx/flag.h"
#include "ptx/grid.h"
#include "ptx/ldmatrix.h"
#include "ptx/mbarrier.h"
#include "tile/quantize.h"

namespace fp8attn {

constexpr int CHANNELS = 64;             // of a slice: 128 bytes of a token
constexpr int CHUNKS = CHANNELS / 8;     // of 16 bytes
constexpr int WORDS = CHANNELS / 2;      // of two channels
constexpr int WARPS = CHUNKS;            // in writing V each has a chunk of its own
constexpr int THREADS = LANES * CHUNKS;  // in measuring it each has a chunk of the tokens of a lane
constexpr int PARTS = CHANNELS / PART;
constexpr int BLOCKS = STRIP / KEYS;
constexpr int OF_BLOCK = KEYS / LANES;  // tokens of a lane
constexpr int GROUP = 16;               // keys that V's order permutes among themselves
constexpr int RUN = BLOCKS * GROUP;     // and whose errors cancel
constexpr int MOST_SLICES = 256 / CHANNELS;
static_assert(THREADS == 32 * WARPS && SCALE_BLOCK == KEYS && OF_BLOCK == 4);

using StripTile = uint32_t[STRIP][WORDS];

// Of the lanes of a warp, or of a strip: sums of channels; the least and the most, two channels to a word.
struct Moments {
  float sum[CHANNELS];
  uint32_t low[WORDS], high[WORDS];
};

template <QuantizeConfig C>
struct alignas(128) QuantizeStorage {
  StripTile tile;
  union {
    struct {
      Moments warps[WARPS];
      Moments strips[C.strips];  // what all tell
    } values;
    float sampled[LANES * CHANNELS];  // sums of keys: lanes of as many channels as the CTA has, all of them if there is one strip
  };
  // what others tell, and it itself
  alignas(16) float key_mean[CHANNELS];
  uint4 hidden[MOST_SLICES][BLOCKS];               // of every slice STEPS words: a bit of each lane for tokens whose keys become NaN
  alignas(16) float largest[MOST_SLICES][BLOCKS];  // magnitudes of keys of every slice
  // what it tells
  struct {
    Moments strip;
    alignas(16) float key_mean[CHANNELS];
    uint4 hidden[BLOCKS];
  } own;
  float shift[CHANNELS], factor[CHANNELS];  // V's means, and inverses of its scales
  float of_warps[WARPS][BLOCKS];            // largest magnitudes of keys
  uint64_t facts_full, largest_full;
};
static_assert(LANES * CHANNELS / 2 * sizeof(float) == sizeof(Moments[WARPS]));  // of two strips or more sums of keys lie where nobody tells anything

// A CTA's place in its cluster, and its head.
struct Place {
  int strips, slices, strip, slice, first, count, batch, head, pair;

  __device__ explicit Place(const QuantizeParams& p) : strips((p.length + STRIP - 1) / STRIP), slices(p.head_dim / CHANNELS) {
    const int rank = ptx::cluster_rank();
    strip = rank / slices, slice = rank % slices;
    first = strip * STRIP, count = min(p.length - first, STRIP);
    pair = blockIdx.x / (strips * slices);
    batch = pair / p.heads, head = pair % p.heads;
  }

  __device__ int rank_of(int its_strip, int its_slice) const { return its_strip * slices + its_slice; }

  // Binary logarithm of the words of a token whose mean of keys a strip's CTA makes; the last strips may have none to make.
  __device__ int log_words() const {
    int found = 5;
    static_assert(WORDS == 1 << 5);
    for (int n = 2; n <= strips; n *= 2) --found;
    return found;
  }

  // Of the slice's first channel, among those of all heads.
  __device__ int64_t channel() const { return (int64_t(pair) * slices + slice) * CHANNELS; }
};

// Chunk `chunk` of a run of V's tokens lies at another one: then neither the 8 chunks of a token nor one of 8 runs share a bank. Of K's tokens every
// one is such a run.
__device__ inline int chunk_at(int run, int chunk) { return chunk ^ run % CHUNKS; }

// What a thread loads of V's tile and then looks at by itself: a chunk of the tokens of a lane. Lanes of a warp lie WARPS apart, as they are first added.
struct Mine {
  int chunk, lane;

  __device__ Mine() : chunk(threadIdx.x % CHUNKS), lane(threadIdx.x / 32 + threadIdx.x % 32 / CHUNKS * WARPS) {}

  // The i-th of block n.
  __device__ int token(int n, int i) const { return n * KEYS + i * LANES + lane; }

  __device__ uint4& at(StripTile& tile, int n, int i) const {
    static_assert(RUN == 2 * LANES && KEYS == 2 * RUN);
    return *reinterpret_cast<uint4*>(&tile[token(n, i)][4 * chunk_at(2 * n + i / 2, chunk)]);
  }

  // `from` is the slice's first token of the strip. Zeros behind the end. Every block is a group of copies.
  template <typename T>
  __device__ void load(StripTile& tile, const T* from, int64_t stride, int count) const {
    from += lane * stride + chunk * 8;
#pragma unroll 1
    for (int n = 0; n < BLOCKS; ++n) {
#pragma unroll
      for (int i = 0; i < OF_BLOCK; ++i, from += LANES * stride) ptx::cp_async_16(&at(tile, n, i), from, token(n, i) < count);
      ptx::cp_async_commit();
    }
  }
};

__device__ inline bool any(uint4 words) { return (words.x | words.y | words.z | words.w) != 0; }

// Moments of a thread's chunk.
template <typename T>
struct ChunkMoments {
  static constexpr uint32_t above = Pair<T>::infinities, below = above | 0x80008000;
  float sum[8] = {};
  uint32_t low[4] = {above, above, above, above}, high[4] = {below, below, below, below};

  // A token's; of one that doesn't `exist` the words are zeros.
  __device__ void add(uint4 words, bool exists) {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = Pair<T>::floats(word[i]);
      sum[2 * i] += x.x, sum[2 * i + 1] += x.y;
      const uint32_t counts = exists ? word[i] : ~0u;  // NaN is neither less nor more than anything
      low[i] = least<T>(low[i], counts), high[i] = most<T>(high[i], counts);
    }
  }

  // The same but for elements whose bits are set in `bad`.
  __device__ void add_finite(uint4 words, uint4 bad) {
    const uint32_t word[4] = {words.x, words.y, words.z, words.w}, out[4] = {bad.x, bad.y, bad.z, bad.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = Pair<T>::floats(word[i] & ~out[i]);
      sum[2 * i] += x.x, sum[2 * i + 1] += x.y;
      low[i] = least<T>(low[i], word[i] | out[i]), high[i] = most<T>(high[i], word[i] | out[i]);
    }
  }

  // Whether all there was is finite, and no sum overflowed.
  __device__ bool is_finite() const {
    float zero = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) zero = fmaf(sum[i], 0.0f, zero);
    return zero == 0.0f;
  }

  // With the lanes `distance` threads away.
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

// Of the blocks of a tile, which are loaded one after another, this thread's copies up to those of the n-th.
__device__ inline void wait_for_block(int n) {
  static_assert(BLOCKS == 4);
  switch (n) {
    case 0:
      return ptx::cp_async_wait_but<3>();
    case 1:
      return ptx::cp_async_wait_but<2>();
    case 2:
      return ptx::cp_async_wait_but<1>();
    default:
      return ptx::cp_async_wait_but<0>();
  }
}

// Moments of V's tile, as it comes in. Elements that aren't finite become NaN in it, and their tokens hidden.
template <QuantizeConfig C, typename T>
__device__ void measure_values(QuantizeStorage<C>& shared, const Place& place, const Mine& mine) {
  ChunkMoments<T> found;
#pragma unroll 1
  for (int n = 0; n < BLOCKS; ++n) {
    wait_for_block(n);
    if ((n + 1) * KEYS <= place.count) {
#pragma unroll
      for (int i = 0; i < OF_BLOCK; ++i) found.add(mine.at(shared.tile, n, i), true);
    } else {
#pragma unroll
      for (int i = 0; i < OF_BLOCK; ++i) found.add(mine.at(shared.tile, n, i), mine.token(n, i) < place.count);
    }
  }
  if (!found.is_finite()) {
    found = ChunkMoments<T>();
#pragma unroll 1
    for (int i = 0; i < STEPS && mine.token(0, i) < place.count; ++i) {
      uint4& words = mine.at(shared.tile, i / OF_BLOCK, i % OF_BLOCK);
      const uint4 bad = not_finite<T>(words);
      found.add_finite(words, bad);
      if (!any(bad)) continue;
      words = words | bad;
      atomicOr(reinterpret_cast<uint32_t*>(shared.own.hidden) + i, 1u << mine.lane);
    }
  }
  // the order of quantize.lane_sum: lanes 16 apart, then 8, 4, 2 and 1
  found.join(16);
  found.join(8);
  __syncthreads();  // the sample lay there
  Moments* warps = shared.values.warps;
  if (threadIdx.x % 32 < CHUNKS) {
    Moments& of_warp = warps[threadIdx.x / 32];
    float4* sum = reinterpret_cast<float4*>(&of_warp.sum[8 * mine.chunk]);
    sum[0] = {found.sum[0], found.sum[1], found.sum[2], found.sum[3]}, sum[1] = {found.sum[4], found.sum[5], found.sum[6], found.sum[7]};
    reinterpret_cast<uint4*>(of_warp.low)[mine.chunk] = {found.low[0], found.low[1], found.low[2], found.low[3]};
    reinterpret_cast<uint4*>(of_warp.high)[mine.chunk] = {found.high[0], found.high[1], found.high[2], found.high[3]};
  }
  __syncthreads();
  static_assert(WARPS == 8 && CHANNELS + 2 * WORDS <= THREADS);
  Moments& strip = shared.own.strip;
  const int word = threadIdx.x % WORDS;
  if (threadIdx.x < CHANNELS) {
    const auto sum_of = [&](int warp) { return warps[warp].sum[threadIdx.x]; };
    strip.sum[threadIdx.x] = ((sum_of(0) + sum_of(4)) + (sum_of(2) + sum_of(6))) + ((sum_of(1) + sum_of(5)) + (sum_of(3) + sum_of(7)));
  } else if (threadIdx.x < CHANNELS + WORDS) {
    uint32_t low = warps[0].low[word];
    for (int i = 1; i < WARPS; ++i) low = least<T>(low, warps[i].low[word]);
    strip.low[word] = low;
  } else if (threadIdx.x < CHANNELS + 2 * WORDS) {
    uint32_t high = warps[0].high[word];
    for (int i = 1; i < WARPS; ++i) high = most<T>(high, warps[i].high[word]);
    strip.high[word] = high;
  }
  __syncthreads();
}

// Sixteen bytes to a CTA of the cluster, to the same place.
__device__ inline void tell(int rank, void* to, uint4 x, uint64_t* barrier) {
  ptx::store_async(ptx::address_in(rank, ptx::shared_address(to)), x, ptx::address_in(rank, ptx::shared_address(barrier)));
}

// Bytes that a CTA is told before it knows the facts.
template <QuantizeConfig C>
__device__ int bytes_of_facts(const QuantizeStorage<C>& shared, const Place& place) {
  return place.strips * int(sizeof(Moments)) + int(sizeof(shared.key_mean)) + place.slices * int(sizeof(shared.hidden[0]));
}

// To all slices of the strip who is hidden.
template <QuantizeConfig C>
__device__ void tell_hidden(QuantizeStorage<C>& shared, const Place& place, uint64_t* barrier) {
  const int slice = threadIdx.x / BLOCKS, n = threadIdx.x % BLOCKS;
  if (slice < place.slices) tell(place.rank_of(place.strip, slice), &shared.hidden[place.slice][n], shared.own.hidden[n], barrier);
}

// To all strips moments of V and what the CTA has of K's mean, to all slices of the strip who is hidden.
template <QuantizeConfig C>
__device__ void tell_facts(QuantizeStorage<C>& shared, const Place& place) {
  static_assert(sizeof(Moments) == 32 * 16);
  const int lane = threadIdx.x % 32, log_words = place.log_words(), first = place.strip << log_words;
  const bool has_mean = first < WORDS && lane < (1 << log_words) / 2;  // four channels each
#pragma unroll 1
  for (int strip = threadIdx.x / 32; strip < place.strips; strip += WARPS) {
    const int rank = place.rank_of(strip, place.slice);
    tell(rank, reinterpret_cast<uint4*>(&shared.values.strips[place.strip]) + lane, reinterpret_cast<const uint4*>(&shared.own.strip)[lane], &shared.facts_full);
    if (has_mean) tell(rank, &shared.key_mean[2 * first + 4 * lane], reinterpret_cast<const uint4*>(shared.own.key_mean)[lane], &shared.facts_full);
  }
  tell_hidden<C>(shared, place, &shared.facts_full);
}

// The order of quantize.lane_sum.
template <int N>
__device__ float halving_sum(const float (&lanes)[N]) {
  if constexpr (N == 1) {
    return lanes[0];
  } else {
    float sum[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sum[i] = lanes[i] + lanes[i + N / 2];
    return halving_sum(sum);
  }
}

// V's mean and scale of a channel, which every strip makes for itself.
template <QuantizeConfig C, typename T>
__device__ void finish_values(const QuantizeParams& p, QuantizeStorage<C>& shared, const Place& place, int channel) {
  const Moments* strips = shared.values.strips;
  float sum[C.strips], low = INFINITE, high = -INFINITE;
#pragma unroll
  for (int i = 0; i < C.strips; ++i) {
    sum[i] = 0.0f;
    if (i >= place.strips) continue;
    sum[i] += strips[i].sum[channel];
    const float2 lows = Pair<T>::floats(strips[i].low[channel / 2]), highs = Pair<T>::floats(strips[i].high[channel / 2]);
    low = fminf(low, channel % 2 ? lows.y : lows.x), high = fmaxf(high, channel % 2 ? highs.y : highs.x);
  }
  // strips are lanes of quantize.lane_sum; those that aren't there add zeros
  const float mean = removable(coarse(__fmul_rn(halving_sum(sum), p.inverse_length), low, high));
  const float scale = scale_of(fmaxf(fmaxf(high - mean, mean - low), 0.0f));
  shared.shift[channel] = mean, shared.factor[channel] = __fdiv_rn(1.0f, scale);
  if (place.strip != 0) return;
  p.v_mean[place.channel() + channel] = mean;
  p.v_scale[place.channel() + channel] = scale;
}

// K's mean, likewise, by a warp: of four channels a lane, of which there are as many as half its lanes.
template <QuantizeConfig C>
__device__ void finish_keys(const QuantizeParams& p, QuantizeStorage<C>& shared, const Place& place, int lane) {
  constexpr int count = CHANNELS / 4;
  float4* means = reinterpret_cast<float4*>(shared.key_mean);
  const float4 mean = removable(rotated(means[lane % count]));  // its shuffles wait for who reads
  if (lane >= count) return;
  means[lane] = mean;
  if (place.strip == 0) reinterpret_cast<float4*>(p.k_mean + place.channel())[lane] = mean;
}

// Whether some of the strip's tokens don't exist, or are hidden by one of the slices from `first` up to `end`.
template <QuantizeConfig C>
__device__ bool is_careful(const QuantizeStorage<C>& shared, const Place& place, int first, int end) {
  bool hidden = false;
#pragma unroll 1
  for (int slice = first; slice < end; ++slice)
    for (int n = 0; n < BLOCKS; ++n) hidden |= any(shared.hidden[slice][n]);
  return place.count < STRIP || hidden;
}

// V's codes, transposed, in layout.key_of_slot's order. A warp has a chunk; a thread one of its words, and a run's tokens, of which a group's codes are
// 16 bytes of either channel. CAREFUL: some aren't finite, or don't exist.
template <bool CAREFUL, QuantizeConfig C, typename T>
__device__ void write_values(const QuantizeParams& p, const QuantizeStorage<C>& shared, const Place& place) {
  static_assert(STRIP == 8 * RUN);
  const int chunk = threadIdx.x / 32, run = threadIdx.x % 32 / 4, channel = chunk * 8 + threadIdx.x % 4 * 2;
  const int column = 4 * chunk_at(run, chunk) + threadIdx.x % 4;
  const float2 mean = *reinterpret_cast<const float2*>(&shared.shift[channel]), factor = *reinterpret_cast<const float2*>(&shared.factor[channel]);
  const __half2 gain = __half2half2(__float2half(p.length > STRIP ? FEEDBACK : 0.0f));
  uint8_t* to = p.v_data + (place.channel() + channel) * p.padded + place.first;
  Feedback feedback;
#pragma unroll 1
  for (int first = run * RUN; first < (run + 1) * RUN; first += GROUP) {
    if (CAREFUL && place.first + first >= p.padded) break;
    uint32_t pairs[GROUP / 2];  // codes of both channels of two tokens
#pragma unroll
    for (int i = 0; i < GROUP; i += 2) {
      uint16_t codes[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int token = first + i + j;
        const float2 y = Pair<T>::floats(shared.tile[token][column]);
        float2 x = {(y.x - mean.x) * factor.x, (y.y - mean.y) * factor.y};
        if constexpr (CAREFUL) {
          const bool exists = token < place.count;
          x = {exists & (x.x == x.x) ? x.x : 0.0f, exists & (x.y == x.y) ? x.y : 0.0f};
        }
        codes[j] = feedback.codes(x, gain);
      }
      pairs[i / 2] = ptx::pair(codes[0], codes[1]);
    }
    uint32_t words[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[0][i] = __byte_perm(pairs[i], pairs[i + 4], 0x6420), words[1][i] = __byte_perm(pairs[i], pairs[i + 4], 0x7531);
#pragma unroll
    for (int c = 0; c < 2; ++c) *reinterpret_cast<uint4*>(to + c * p.padded + first) = {words[c][0], words[c][1], words[c][2], words[c][3]};
  }
}

// Of the sample of K a thread's share at a time: a word of the tokens of a lane. An item is a lane and one of the CTA's words.
template <typename T>
struct Sample {
  uint32_t raw[STEPS];

  // `k` is the head's first token of the slice.
  __device__ void load(const QuantizeParams& p, const Place& place, const T* k, int item) {
    const int words = 1 << place.log_words(), lane = item / words;
    const int64_t step = place.strips * LANES;  // every sample_step-th group of LANES tokens, which is one in as many as there are strips
    const T* from = k + 2 * (place.strip * words + item % words) + lane * p.k_strides[2];
#pragma unroll
    for (int i = 0; i < STEPS; ++i, from += step * p.k_strides[2]) raw[i] = i * int(step) + lane < p.length ? *reinterpret_cast<const uint32_t*>(from) : 0;
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

// The mean of the sample of the CTA's words, if it has some. `sample` is the thread's first item's.
template <QuantizeConfig C, typename T>
__device__ void measure_keys(const QuantizeParams& p, QuantizeStorage<C>& shared, const Place& place, const T* k, Sample<T>& sample) {
  const int words = 1 << place.log_words(), first = place.strip * words;
  if (first >= WORDS) return;
#pragma unroll 1
  for (int item = threadIdx.x; item < LANES * words; item += THREADS) {
    if (item >= THREADS) sample.load(p, place, k, item);
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
  shared.own.key_mean[threadIdx.x] = __fmul_rn(halving_sum(sum), p.inverse_sample);
}

// What a thread looks at of K's tile: of each block its warp has 16 rows, a quad of lanes two of them, a thread four channels of every part.
template <typename T>
struct Keys {
  static constexpr int distance = 8;           // of a quad's rows
  static constexpr int at_once = 32 / CHUNKS;  // rows of which a warp copies chunks
  const Rotation<T, true> rotation = Rotation<T, true>(threadIdx.x);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane % 4 * 4;

  // The i-th of block n.
  __device__ int token(int n, int i) const { return n * KEYS + warp * 16 + lane / 4 + distance * i; }

  // Neither the 8 chunks of a token nor one of 8 tokens next to each other share a bank.
  __device__ static uint4& chunk_of(StripTile& tile, int token, int chunk) { return reinterpret_cast<uint4*>(tile[token])[chunk_at(token, chunk)]; }

  // Of block n, for f(token, chunk) of every chunk that the thread copies.
  template <typename F>
  __device__ void for_chunks(int n, F&& f) const {
#pragma unroll
    for (int i = 0; i < 16; i += at_once) f(n * KEYS + warp * 16 + lane / CHUNKS + i, lane % CHUNKS);
  }

  // `from` is the slice's first token of the strip. Zeros behind the end. Every block is a group of copies.
  __device__ void load(StripTile& tile, const T* from, int64_t stride, int count) const {
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

  // Waits for block n, of which rows that don't exist become NaN.
  __device__ void wait_for(StripTile& tile, int n, int count) const {
    wait_for_block(n);
    if ((n + 1) * KEYS > count) {
      for_chunks(n, [&](int token, int chunk) {
        if (token >= count) chunk_of(tile, token, chunk) = {~0u, ~0u, ~0u, ~0u};
      });
    }
    __syncwarp();
  }

  // What isn't finite of block n becomes NaN.
  __device__ void spoil(StripTile& tile, int n) const {
    __syncwarp();
    for_chunks(n, [&](int token, int chunk) {
      uint4& words = chunk_of(tile, token, chunk);
      words = spoiled<T>(words);
    });
    __syncwarp();
  }

  // A part of both rows of block n, rotated and without its mean.
  __device__ void rotated(float (&y)[2][4], StripTile& tile, int n, int part, float4 mean) const {
    uint32_t rows[4];
    ptx::ldmatrix(rows, &chunk_of(tile, n * KEYS + warp * 16 + lane % 16, 2 * part + lane / 16));
    rotation(y[0], y[1], rows);
    centre(y[0], mean), centre(y[1], mean);
  }
};

// Bytes that a CTA is told before it knows scales of blocks, and who is hidden: int8 has no NaN, so that one channel's hides a token of all slices.
template <QuantizeConfig C>
__device__ int bytes_of_largest(const QuantizeStorage<C>& shared, const Place& place) {
  return place.slices * int(sizeof(shared.largest[0]) + (C.int8 ? sizeof(shared.hidden[0]) : 0));
}

// Largest magnitudes of K's blocks, as they come in, to all slices of the strip. Infinities become NaN in the tile.
template <QuantizeConfig C, typename T>
__device__ void find_largest(QuantizeStorage<C>& shared, const Place& place, const Keys<T>& keys, const float4 (&mean)[PARTS]) {
#pragma unroll 1
  for (int n = 0; n < BLOCKS; ++n) {
    keys.wait_for(shared.tile, n, place.count);
    float largest;
    bool hidden[2];
    for (bool again = true; again;) {
      largest = 0.0f;
      hidden[0] = hidden[1] = false;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        float y[2][4];
        keys.rotated(y, shared.tile, n, part, mean[part]);
#pragma unroll
        for (int c = 0; c < 8; ++c) largest = fmaxf(largest, fabsf(y[c / 4][c % 4]));  // NaN isn't larger than anything
        hidden[0] |= y[0][0] != y[0][0], hidden[1] |= y[1][0] != y[1][0];  // a part has none or nothing else
      }
      again = __any_sync(~0u, largest == INFINITE);
      if (again) keys.spoil(shared.tile, n);
    }
    const uint32_t of_warp = __reduce_max_sync(~0u, __float_as_uint(largest));
    if (keys.lane == n) shared.of_warps[keys.warp][n] = __uint_as_float(of_warp);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (C.int8 && hidden[i] && keys.token(n, i) < place.count)
        atomicOr(reinterpret_cast<uint32_t*>(&shared.own.hidden[n]) + keys.warp / 2, 1u << keys.token(0, i) % LANES);
    }
  }
  __syncthreads();
  if constexpr (C.int8) tell_hidden<C>(shared, place, &shared.largest_full);
  if (threadIdx.x >= place.slices) return;
  uint32_t largest[BLOCKS];
#pragma unroll
  for (int n = 0; n < BLOCKS; ++n) {
    float of_slice = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) of_slice = fmaxf(of_slice, shared.of_warps[i][n]);
    largest[n] = __float_as_uint(of_slice);
  }
  tell(place.rank_of(place.strip, threadIdx.x), shared.largest[place.slice], {largest[0], largest[1], largest[2], largest[3]}, &shared.largest_full);
}

// Scales of K's blocks, of int8 negative where a token is hidden. Returns the inverse of that of the block of the thread's number, modulo BLOCKS.
template <QuantizeConfig C>
__device__ float finish_blocks(const QuantizeParams& p, const QuantizeStorage<C>& shared, const Place& place) {
  const int block = threadIdx.x % BLOCKS;
  float largest = 0.0f;
  bool marked = false;
  for (int i = 0; i < place.slices; ++i) {
    largest = fmaxf(largest, shared.largest[i][block]);
    if constexpr (C.int8) marked |= any(shared.hidden[i][block]);
  }
  const float scale = row_scale_of<C.int8>(largest);
  if (place.slice == 0 && threadIdx.x < BLOCKS && block * KEYS < place.count)
    p.k_scale[int64_t(place.pair) * ((p.length + KEYS - 1) / KEYS) + place.strip * BLOCKS + block] = marked ? -scale : scale;
  return __fdiv_rn(1.0f, scale);
}

// K's codes; `inverse` is a thread's of finish_blocks. CAREFUL: some tokens are hidden, or don't exist.
template <bool CAREFUL, QuantizeConfig C, typename T>
__device__ void write_keys(const QuantizeParams& p, QuantizeStorage<C>& shared, const Place& place, const Keys<T>& keys, const float4 (&mean)[PARTS], float inverse) {
  const int odd = keys.lane % 2;
  uint8_t* to = p.k_data + place.batch * p.k_data_strides[0] + place.head * p.k_data_strides[1] + place.slice * CHANNELS;
  to += (place.first + keys.token(0, 0)) * p.k_data_strides[2] + odd * PART + keys.column / 8 * 8;
#pragma unroll 1
  for (int n = 0; n < BLOCKS; ++n, to += KEYS * p.k_data_strides[2]) {
    const float factor = __shfl_sync(~0u, inverse, n);
    uint32_t hidden = 0;
    if constexpr (CAREFUL) {
      for (int slice = 0; slice < place.slices; ++slice) hidden |= reinterpret_cast<const uint32_t*>(&shared.hidden[slice][n])[keys.warp / 2];
      hidden >>= keys.token(0, 0) % LANES;
    }
#pragma unroll
    for (int part = 0; part < PARTS; part += 2) {
      uint32_t codes[2][2];  // of either part, of either row
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float y[2][4];
        keys.rotated(y, shared.tile, n, part + j, mean[part + j]);
        codes[j][0] = codes_of<C.int8>(y[0], factor), codes[j][1] = codes_of<C.int8>(y[1], factor);
      }
      // of two lanes the first gets eight channels of the first part, the second of the second
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t kept = odd ? codes[1][i] : codes[0][i], got = __shfl_xor_sync(~0u, odd ? codes[0][i] : codes[1][i], 1);
        uint2 words = odd ? uint2{got, kept} : uint2{kept, got};
        if (CAREFUL && hidden >> Keys<T>::distance * i & 1) words = {NAN_CODES<C.int8>, NAN_CODES<C.int8>};
        if (!CAREFUL || keys.token(n, i) < place.count) *reinterpret_cast<uint2*>(to + Keys<T>::distance * i * p.k_data_strides[2] + part * PART) = words;
      }
    }
  }
}

// Instance::config is the QuantizeConfig. A grid of clusters, one for each head of K and V. No CTA ends before it has heard all that it is told, so
// that none has to wait for the others' ends.
template <class Instance, typename T>
__global__ void __launch_bounds__(THREADS, Instance::config.ctas) quantize_kv(const __grid_constant__ QuantizeParams p) {
  constexpr QuantizeConfig C = Instance::config;
  extern __shared__ __align__(128) uint8_t bytes[];
  QuantizeStorage<C>& shared = *reinterpret_cast<QuantizeStorage<C>*>(bytes);
  const Place place(p);
  const Mine mine;
  if (threadIdx.x < BLOCKS) shared.own.hidden[threadIdx.x] = {};
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&shared.facts_full, 1);
    ptx::mbarrier_init(&shared.largest_full, 1);
    ptx::mbarrier_expect(&shared.facts_full, bytes_of_facts(shared, place));
    ptx::mbarrier_expect(&shared.largest_full, bytes_of_largest(shared, place));
    ptx::fence_barrier_init();
  }
  __syncthreads();
  ptx::cluster_arrive_relaxed();
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  const T* v = static_cast<const T*>(p.v) + place.batch * p.v_strides[0] + place.head * p.v_strides[1] + place.slice * CHANNELS;
  const T* k = static_cast<const T*>(p.k) + place.batch * p.k_strides[0] + place.head * p.k_strides[1] + place.slice * CHANNELS;
  Sample<T> sample;
  if (place.strip << place.log_words() < WORDS && threadIdx.x < LANES << place.log_words()) sample.load(p, place, k, threadIdx.x);
  mine.load(shared.tile, v + place.first * p.v_strides[2], p.v_strides[2], place.count);
  measure_keys<C, T>(p, shared, place, k, sample);
  k += place.first * p.k_strides[2];
  measure_values<C, T>(shared, place, mine);
  __syncwarp();
  ptx::cluster_wait();  // before anyone is told anything, it is there
  tell_facts<C>(shared, place);
  ptx::mbarrier_wait(&shared.facts_full, 0);

  if (threadIdx.x < CHANNELS)
    finish_values<C, T>(p, shared, place, threadIdx.x);
  else if (threadIdx.x < CHANNELS + 32)
    finish_keys<C>(p, shared, place, threadIdx.x - CHANNELS);
  __syncthreads();
  if (is_careful(shared, place, place.slice, place.slice + 1))
    write_values<true, C, T>(p, shared, place);
  else
    write_values<false, C, T>(p, shared, place);
  __syncthreads();

  const Keys<T> keys;
  keys.load(shared.tile, k, p.k_strides[2], place.count);
  float4 mean[PARTS];
#pragma unroll
  for (int part = 0; part < PARTS; ++part) mean[part] = *reinterpret_cast<const float4*>(&shared.key_mean[part * PART + keys.column]);
  find_largest<C, T>(shared, place, keys, mean);
  ptx::mbarrier_wait(&shared.largest_full, 0);
  const float inverse = finish_blocks<C>(p, shared, place);
  if (is_careful(shared, place, 0, place.slices))
    write_keys<true, C, T>(p, shared, place, keys, mean, inverse);
  else
    write_keys<false, C, T>(p, shared, place, keys, mean, inverse);
  if (p.ready == nullptr) return;
  ptx::fence_proxy_async_all();  // who attends has the copy engine read this
  __syncthreads();
  if (threadIdx.x == 0) ptx::add_release(&p.ready[place.pair], 1);
}

template <class Instance>
cudaError_t launch(const QuantizeParams& p, int ctas, cudaStream_t stream) {
  constexpr int bytes = sizeof(QuantizeStorage<Instance::config>);
  const int cluster = (p.length + STRIP - 1) / STRIP * (p.head_dim / CHANNELS);
  const auto kernel = p.half ? quantize_kv<Instance, __half> : quantize_kv<Instance, __nv_bfloat16>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess && cluster > 8) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess) return error;
  return launch_clusters(kernel, p, ctas, cluster, THREADS, bytes, stream);
}

}  // namespace fp8attn
