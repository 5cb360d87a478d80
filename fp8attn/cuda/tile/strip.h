// What a CTA of the quantizer of K and V has: a slice of the channels of a strip of tokens, in shared memory, and what CTAs of a cluster tell each other.
#pragma once

#include "../config.h"
#include "../params.h"
#include "../ptx/cp_async.h"
#include "quantize.h"
#include "tell.h"

namespace fp8attn {

constexpr int CHANNELS = 64;             // of a slice: 128 bytes of a token
constexpr int CHUNKS = CHANNELS / 8;     // of 16 bytes
constexpr int WORDS = CHANNELS / 2;      // of two channels
constexpr int WARPS = CHUNKS;            // in writing V each has a chunk of its own
constexpr int THREADS = LANES * CHUNKS;  // in measuring it each has a chunk of the tokens of a lane
constexpr int BLOCKS = STRIP / KEYS;
constexpr int OF_BLOCK = KEYS / LANES;  // tokens of a lane
constexpr int GROUP = 16;               // keys that V's order permutes among themselves
constexpr int RUN = BLOCKS * GROUP;     // and whose errors cancel
constexpr int MOST_SLICES = 256 / CHANNELS;
static_assert(CHANNELS == PART && THREADS == 32 * WARPS && SCALE_BLOCK == KEYS && OF_BLOCK == 4);

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

__device__ inline bool any(uint4 words) { return (words.x | words.y | words.z | words.w) != 0; }

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

// To all slices of the strip who is hidden.
template <QuantizeConfig C>
__device__ void tell_hidden(QuantizeStorage<C>& shared, const Place& place, uint64_t* barrier) {
  const int slice = threadIdx.x / BLOCKS, n = threadIdx.x % BLOCKS;
  if (slice < place.slices) tell(place.rank_of(place.strip, slice), &shared.hidden[place.slice][n], shared.own.hidden[n], barrier);
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

// Whether some of the strip's tokens don't exist, or are hidden by one of the slices from `first` up to `end`.
template <QuantizeConfig C>
__device__ bool is_careful(const QuantizeStorage<C>& shared, const Place& place, int first, int end) {
  bool hidden = false;
#pragma unroll 1
  for (int slice = first; slice < end; ++slice)
    for (int n = 0; n < BLOCKS; ++n) hidden |= any(shared.hidden[slice][n]);
  return place.count < STRIP || hidden;
}

}  // namespace fp8attn
