// What a CTA of the quantizer of K and V has: a slice of the channels of a token_chunk of tokens, in shared memory, and what CTAs of a cluster tell each other.
#pragma once

#include "../config.h"
#include "../params.h"
#include "../ptx/cp_async.h"
#include "quantize.h"
#include "dsmem.h"

namespace fp8attn {

constexpr int CHANNELS = 64;             // of a slice: 128 bytes of a token
constexpr int CHUNKS = CHANNELS / 8;     // of 16 bytes
constexpr int WORDS = CHANNELS / 2;      // of two channels
constexpr int WARPS = CHUNKS;            // in writing V each has a chunk of its own
constexpr int THREADS = LANES * CHUNKS;  // in measuring it each has a chunk of the tokens of a lane
constexpr int BLOCKS = TOKEN_CHUNK / KEYS;
constexpr int OF_BLOCK = KEYS / LANES;  // tokens of a lane
constexpr int GROUP = 16;               // keys that V's order permutes among themselves
constexpr int RUN = BLOCKS * GROUP;     // and whose errors cancel
constexpr int MOST_SLICES = 256 / CHANNELS;
static_assert(CHANNELS == PART && THREADS == 32 * WARPS && SCALE_BLOCK == KEYS && OF_BLOCK == 4);

using TokenChunkTile = uint32_t[TOKEN_CHUNK][WORDS];

// Of the lanes of a warp, or of a token_chunk: sums of channels; the least and the most, two channels to a word.
struct Moments {
  float sum[CHANNELS];
  uint32_t low[WORDS], high[WORDS];
};

template <QuantizeConfig C>
struct alignas(128) QuantizeStorage {
  TokenChunkTile tile;
  union {
    struct {
      Moments warps[WARPS];
      Moments token_chunks[C.token_chunks];  // what all tell
    } values;
    float sampled[LANES * CHANNELS];  // sums of keys: lanes of as many channels as the CTA has, all of them if there is one token_chunk
  };
  // what others tell, and it itself
  alignas(16) float key_mean[CHANNELS];
  uint4 nonfinite[MOST_SLICES][BLOCKS];               // of every slice STEPS words: a bit of each lane for tokens whose keys become NaN
  alignas(16) float largest[MOST_SLICES][BLOCKS];  // magnitudes of keys of every slice
  // what it tells
  struct {
    Moments token_chunk;
    alignas(16) float key_mean[CHANNELS];
    uint4 nonfinite[BLOCKS];
  } own;
  float shift[CHANNELS], factor[CHANNELS];  // V's means, and inverses of its scales
  float of_warps[WARPS][BLOCKS];            // largest magnitudes of keys
  uint64_t stats_full, largest_full;
};
static_assert(LANES * CHANNELS / 2 * sizeof(float) == sizeof(Moments[WARPS]));  // of two token_chunks or more sums of keys lie where nobody tells anything

// A CTA's coord in its cluster, and its head.
struct ClusterCoord {
  int token_chunks, slices, token_chunk, slice, first, count, batch, head, pair;

  __device__ explicit ClusterCoord(const QuantizeParams& p) : token_chunks((p.length + TOKEN_CHUNK - 1) / TOKEN_CHUNK), slices(p.head_dim / CHANNELS) {
    const int rank = ptx::cluster_rank();
    token_chunk = rank / slices, slice = rank % slices;
    first = token_chunk * TOKEN_CHUNK, count = min(p.length - first, TOKEN_CHUNK);
    pair = blockIdx.x / (token_chunks * slices);
    batch = pair / p.heads, head = pair % p.heads;
  }

  __device__ int rank_of(int its_token_chunk, int its_slice) const { return its_token_chunk * slices + its_slice; }

  // Binary logarithm of the words of a token whose mean of keys a token_chunk's CTA makes; the last token_chunks may have none to make.
  __device__ int log_words() const {
    int found = 5;
    static_assert(WORDS == 1 << 5);
    for (int n = 2; n <= token_chunks; n *= 2) --found;
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

// To all slices of the token_chunk who is nonfinite.
template <QuantizeConfig C>
__device__ void broadcast_nonfinite(QuantizeStorage<C>& shared, const ClusterCoord& coord, uint64_t* barrier) {
  const int slice = threadIdx.x / BLOCKS, n = threadIdx.x % BLOCKS;
  if (slice < coord.slices) dsmem_store(coord.rank_of(coord.token_chunk, slice), &shared.nonfinite[coord.slice][n], shared.own.nonfinite[n], barrier);
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

// Whether some of the token_chunk's tokens don't exist, or are nonfinite by one of the slices from `first` up to `end`.
template <QuantizeConfig C>
__device__ bool is_careful(const QuantizeStorage<C>& shared, const ClusterCoord& coord, int first, int end) {
  bool nonfinite = false;
#pragma unroll 1
  for (int slice = first; slice < end; ++slice)
    for (int n = 0; n < BLOCKS; ++n) nonfinite |= any(shared.nonfinite[slice][n]);
  return coord.count < TOKEN_CHUNK || nonfinite;
}

}  // namespace fp8attn
