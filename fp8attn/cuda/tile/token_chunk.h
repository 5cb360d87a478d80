// The data of one CTA of the K/V quantizer: a tile of one token chunk, in shared memory, and what the CTAs of a cluster
// exchange. A tile of V has one slice of the channels, a tile of K all slices of some blocks.
#pragma once

#include "config.h"
#include "../params.h"
#include "../ptx/flag.h"
#include "copies.h"
#include "quantize.h"
#include "dsmem.h"
#include "packed.h"

namespace fp8attn {

constexpr int CHANNELS = 64;             // channels of a slice: 128 bytes of a token
constexpr int CHUNKS = CHANNELS / 8;     // 16-byte chunks of a token
constexpr int WORDS = CHANNELS / 2;      // words of a token, two channels each
constexpr int WARPS = CHUNKS;            // each warp writes one chunk of V's channels
constexpr int THREADS = LANES * CHUNKS;  // each thread measures one chunk of V's channels, for the tokens of one lane
constexpr int BLOCKS = TOKEN_CHUNK / KEYS;
constexpr int OF_BLOCK = KEYS / LANES;  // tokens of a lane in one block
constexpr int MOST_SLICES = 256 / CHANNELS;
static_assert(RUN == BLOCKS * GROUP && BLOCKS == COPIED_GROUPS);  // each block of a tile is a group of copies
static_assert(CHANNELS == PART && THREADS == 32 * WARPS && SCALE_BLOCK == KEYS && OF_BLOCK == 4);

using TokenChunkTile = uint32_t[TOKEN_CHUNK][WORDS];

// Moments of V's channels over the lanes of a warp, or over a token chunk: sums, minima and maxima. Minima and maxima
// are packed, two channels to a word.
struct Moments {
  float sum[CHANNELS];
  uint32_t low[WORDS], high[WORDS];
};

// What `measure_kv` finds of V in a slice of a token chunk: its moments, and per block STEPS words, with one bit per
// lane: non-finite tokens.
struct ChunkStats {
  Moments moments;
  uint4 nonfinite[BLOCKS];
  PackedUnit place;  // of packed sequences
};
static_assert(sizeof(ChunkStats) == CHUNK_STATS_BYTES);

// A tile, and what its elements are quantized by.
struct alignas(128) TileStorage {
  TokenChunkTile tile;
  alignas(16) float key_mean[MOST_SLICES * CHANNELS];
  uint4 nonfinite[MOST_SLICES][BLOCKS];     // per slice STEPS words, with one bit per lane: tokens whose keys become NaN
  float shift[CHANNELS], factor[CHANNELS];  // V's means and inverse scales
  float of_warps[WARPS][BLOCKS];            // largest magnitudes of K's rows of a warp, per 64 channels
};

// Moments of a token chunk of V, of which a CTA has one slice.
struct MomentsStorage {
  Moments warps[WARPS];
  Moments token_chunk;
  uint4 nonfinite[BLOCKS];
};

// A tile's or moments' storage, and of a token chunk in pages where its tokens lie.
template <class Storage, bool PAGED>
struct Located : Storage {};

template <class Storage>
struct Located<Storage, true> : Storage {
  int64_t offsets[TOKEN_CHUNK];  // in elements; -1: the token isn't there
};

// Of an instance without clusters, a tile. Of a CTA of a cluster: `tile` has key_mean and nonfinite from all CTAs, this
// one included.
template <QuantizeConfig C>
struct alignas(128) QuantizeStorage {
  TileStorage tile;
  union {
    struct {
      Moments warps[WARPS];
      Moments token_chunks[C.token_chunks];  // received from all token chunks
    } values;
    // Sums of sampled keys of several token chunks: (LANES, the channels whose mean of K this CTA computes).
    float sampled[LANES * CHANNELS / 2];
  };
  // sent to CTAs of the cluster
  struct {
    Moments token_chunk;
    alignas(16) float key_mean[CHANNELS];
    uint4 nonfinite[BLOCKS];
  } own;
  uint64_t stats_full;
};

template <QuantizeConfig C>
  requires(C.token_chunks == 1)
struct QuantizeStorage<C> : Located<TileStorage, C.paged> {};

// `sampled` must not overlap `token_chunks`, into which other CTAs may already store.
static_assert(LANES * CHANNELS / 2 * sizeof(float) == sizeof(Moments[WARPS]));

// Number of blocks that have some of a token chunk's tokens, which are the first `count`.
__device__ inline int blocks_of(int count) { return (count + KEYS - 1) / KEYS; }

// Coordinates of a CTA in its head, and the head.
struct ClusterCoord {
  int token_chunks, slices, token_chunk, slice, first, count, batch, head, pair;
  int length;             // tokens of the head
  // of packed sequences: the first token, the places of its first token chunk and page. Otherwise 0.
  bool packed = false;
  int begin = 0, first_place = 0, first_page = 0;

  // `cta`: number of the CTA: heads, their token chunks, their slices.
  __device__ ClusterCoord(const QuantizeParams& p, int cta)
      : token_chunks((p.length + TOKEN_CHUNK - 1) / TOKEN_CHUNK), slices(p.head_dim / CHANNELS) {
    const int rank = cta % (token_chunks * slices);
    token_chunk = rank / slices, slice = rank % slices;
    first = token_chunk * TOKEN_CHUNK, count = min(p.length - first, TOKEN_CHUNK);
    pair = cta / (token_chunks * slices);
    batch = pair / p.heads, head = pair % p.heads;
    length = p.length;
  }

  // Of packed sequences: a slice of the token chunk at a place, which may be empty. A kernel before has written
  // `its_place`.
  __device__ static ClusterCoord of_place(const QuantizeParams& p, const PackedUnit& its_place, int head, int slice) {
    return ClusterCoord(p, its_place.sequence, {its_place.begin, its_place.length}, head, slice, its_place.number);
  }

  // Of packed sequences: a CTA of the clusters.
  __device__ static ClusterCoord of_cluster(const QuantizeParams& p, int cta) {
    const int slices = p.head_dim / CHANNELS, rank = cta % (p.cluster_chunks * slices), pair = cta / (p.cluster_chunks * slices);
    return ClusterCoord(p, pair / p.heads, PackedSequence(p, pair / p.heads), pair % p.heads, rank % slices, rank / slices);
  }

  // Of packed sequences: a slice of the first token chunk of a sequence.
  __device__ ClusterCoord(const QuantizeParams& p, int sequence, int its_head, int its_slice) : ClusterCoord(p, sequence, PackedSequence(p, sequence), its_head, its_slice, 0) {}

  // Of packed sequences: a slice of a token chunk, which may have no tokens.
  __device__ ClusterCoord(const QuantizeParams& p, int sequence, PackedSequence found, int its_head, int its_slice, int its_chunk)
      : slices(p.head_dim / CHANNELS), token_chunk(max(its_chunk, 0)), slice(its_slice), batch(0), head(its_head), packed(true) {
    begin = found.begin, length = found.length;
    token_chunks = (length + TOKEN_CHUNK - 1) / TOKEN_CHUNK;
    first = token_chunk * TOKEN_CHUNK, count = its_chunk < 0 ? 0 : min(length - first, TOKEN_CHUNK);
    pair = sequence * p.heads + head;
    first_place = fp8attn::first_place<TOKEN_CHUNK>(begin, sequence), first_page = fp8attn::first_place<KEYS>(begin, sequence);
  }

  // Whether the token chunk has tokens. All do but those of packed sequences' places and clusters.
  __device__ bool exists() const { return count > 0; }

  // Of packed sequences: whether clusters hold the sequence.
  __device__ bool is_clustered(const QuantizeParams& p) const { return token_chunks <= p.cluster_chunks; }

  // The head's number among those of the tensors.
  __device__ int row() const { return packed ? head : pair; }

  __device__ float inverse_length(const QuantizeParams& p) const { return packed ? __fdiv_rn(1.0f, max(length, 1)) : p.inverse_length; }

  // 1 / quantization.sample_size
  __device__ float inverse_sample(const QuantizeParams& p) const {
    if (!packed) return p.inverse_sample;
    return inverse_sample_of(length);
  }

  // Of the head's cluster: the rank of a CTA, and whether there is only one.
  __device__ int rank_of(int its_token_chunk, int its_slice) const { return its_token_chunk * slices + its_slice; }
  __device__ bool alone() const { return token_chunks * slices == 1; }

  // Binary logarithm of the number of words (channel pairs) whose mean of K the CTA of one token chunk computes. The
  // last token chunks may have none.
  __device__ int log_words() const {
    int found = 5;
    static_assert(WORDS == 1 << 5);
    for (int n = 2; n <= min(token_chunks, WORDS); n *= 2) --found;
    return found;
  }

  __device__ ChunkStats& stats_of(const QuantizeParams& p, int its_token_chunk, int its_slice) const {
    const int64_t chunk = packed ? int64_t(first_place + its_token_chunk) * p.heads + head : int64_t(pair) * token_chunks + its_token_chunk;
    return static_cast<ChunkStats*>(p.chunk_stats)[chunk * slices + its_slice];
  }

  // Index of the slice's first channel, among the channels of all heads.
  __device__ int64_t channel() const { return (int64_t(pair) * slices + slice) * CHANNELS; }

  // The same among the channels of the tensors.
  __device__ int64_t data_channel() const { return (int64_t(row()) * slices + slice) * CHANNELS; }
};

// Prepares a barrier for `bytes` that `send` brings.
__device__ inline void expect(const ClusterCoord& coord, uint64_t* barrier, int bytes) {
  ptx::mbarrier_init(barrier, coord.alone() ? 1 + bytes / 16 : 1);
  ptx::mbarrier_expect(barrier, coord.alone() ? 0 : bytes);
}

// Sends 16 bytes to the CTA with this rank in the cluster, as dsmem_store. A cluster of one CTA has no DSMEM.
__device__ inline void send(const ClusterCoord& coord, int rank, void* to, uint4 x, uint64_t* barrier) {
  if (!coord.alone()) return dsmem_store(rank, to, x, barrier);
  *static_cast<uint4*>(to) = x;
  ptx::mbarrier_arrive(barrier);
}

// Where a CTA's slice of its head begins.
template <typename T>
__device__ const T* slice_of(const void* x, const int64_t (&strides)[3], const ClusterCoord& coord) {
  return static_cast<const T*>(x) + coord.batch * strides[0] + coord.head * strides[1] + coord.begin * strides[2] + coord.slice * CHANNELS;
}

// In place of 16 bytes of a token that isn't there: NaN.
__device__ const uint4 MISSING_CHUNK = {~0u, ~0u, ~0u, ~0u};

// Tokens of K or V in pages, of one head: a token chunk, or a sample.
template <typename T>
struct PagedTokens {
  const T* head;
  const int64_t* offsets;

  // Finds `count` tokens, `apart` from one another, from `begin` on, one of those of the sequence that are quantized.
  // Page numbers are read from L2: the grids before may have written them. The offsets can be read behind the next
  // barrier of the CTA.
  __device__ PagedTokens(const QuantizeParams& p, const void* x, const int64_t (&strides)[3], const ClusterCoord& coord, int begin, int apart, int count, int64_t* offsets)
      : head(static_cast<const T*>(x) + coord.head * strides[1]), offsets(offsets) {
    const int sequence = (coord.pair - coord.head) / p.heads, first = __ldcg(p.firsts + sequence) + begin, end = __ldcg(p.ends + sequence);
    const int* table = p.page_table + sequence * p.table_stride;
#pragma unroll
    for (int i = threadIdx.x; i < TOKEN_CHUNK; i += THREADS) {
      const int token = first + i * apart, n = p.page_log >= 0 ? token >> p.page_log : unsigned(token) / p.page;
      const int number = i < count && token < end ? __ldcg(table + n) : -1;
      offsets[i] = unsigned(number) < unsigned(p.pages) ? number * strides[0] + (token - n * p.page) * strides[2] : -1;
    }
  }

  // 8 channels of a token.
  __device__ const void* chunk(int token, int channel) const {
    const int64_t offset = offsets[token];
    return offset < 0 ? static_cast<const void*>(&MISSING_CHUNK) : head + offset + channel;
  }
};

// Swizzle: the position of a chunk in a token of V's run `run`. Then neither the 8 chunks of a token nor the same chunk
// of 8 runs have bank conflicts. For K, every token counts as a run.
__device__ inline uint32_t chunk_at(uint32_t run, uint32_t chunk) { return chunk ^ run % CHUNKS; }

__device__ inline bool any(uint4 words) { return (words.x | words.y | words.z | words.w) != 0; }

// Sets the attention kernel's flags and tile counter to 0: a head's first CTA the head's word of `ready`, the grid's
// first CTA the words before. All threads of a CTA call it, before it allows the attention kernel to start, and before
// CTAs of the head say that they are done.
__device__ inline void clear_flags(const QuantizeParams& p, const ClusterCoord& coord) {
  if (p.ready == nullptr || coord.token_chunk > 0 || coord.slice > 0) return;
  for (int i = threadIdx.x; coord.pair == 0 && i < p.cleared; i += THREADS) p.ready[i - p.cleared] = 0;
  if (threadIdx.x == 0) p.ready[coord.pair] = 0;
  __threadfence();
  __syncthreads();
}

// Says that a CTA has written what it had to of its head.
__device__ inline void say_done(const QuantizeParams& p, const ClusterCoord& coord) {
  if (p.ready == nullptr) return;
  ptx::fence_proxy_async_all();  // the attention kernel reads the tensors by TMA
  __syncthreads();
  if (threadIdx.x == 0) ptx::add_release(&p.ready[coord.pair], 1);
}

}  // namespace fp8attn
