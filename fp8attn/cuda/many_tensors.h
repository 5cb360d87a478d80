// Attention of many queries to the KV cache of another engine.
//
// A tile has up to 128 rows. Two warpgroups attend to 64 of them each, or to the same rows, of which there are no more,
// and to every second block each. A warpgroup checks blocks and converts their values (tile/checked_tokens.h). One warp
// loads blocks, one the scales of tokens if each has its own, and the others bring the queries of the next tile.
#pragma once

#include "ptx/uniform.h"
#include "tensors_blocks.h"
#include "tile/many_rows.h"

namespace fp8attn {

template <DecodeTensorsConfig C>
struct ManyShape {
  static constexpr int attenders = MANY_ROWS / WGMMA_ROWS;
  static constexpr int registers = C.head_dim > 128 ? 216 : 200, checker_registers = C.head_dim > 128 ? 40 : 64, loader_registers = C.head_dim > 128 ? 40 : 48;
  static constexpr int slots = C.fp8 ? (C.head_dim > 128 ? 2 : 4) : C.stages;      // of checked blocks
  static constexpr int rooms = C.head_dim > 128 && !C.fp8 ? 1 : 2;                 // for queries of tiles
  // Of the last warpgroup: the first thread that loads tokens, and how many prepare. A warp between loads scales.
  static constexpr int loader = 96, preparers = C.by_token ? loader - 32 : loader, preparer_barrier = 2;
  static_assert(attenders == 2 && 2 * WGMMA_ROWS == MANY_ROWS);
  // Each is always used by the same warpgroup if they share blocks.
  static_assert(C.stages % 2 == 0 && slots % 2 == 0 && slots <= C.stages);
  static_assert(attenders * registers + checker_registers + loader_registers <= 65536 / 128);
};

// A warpgroup's sums, as it hands them to the other one: a part of a thread's output, and what its rows have in common.
struct HandedSums {
  float4 output[8][DECODERS], rows[DECODERS];
};

template <DecodeTensorsConfig C>
struct alignas(1024) ManyStorage {
  using Shape = ManyShape<C>;
  using Tokens = CheckedTokens<__half, C.head_dim, C.fp8>;
  static constexpr int threads = 128 * (Shape::attenders + 2);  // of a CTA

  uint8_t k[C.stages][TOKENS * row_bytes<C>], v[C.stages][TOKENS * row_bytes<C>];
  uint8_t q[Shape::rooms][C.rows * row_bytes<C>];
  uint8_t converted[C.fp8 ? Shape::slots : 1][C.fp8 ? Tokens::CONVERTED : 16];  // values in half precision
  uint8_t zeros[128];
  union {
    HandedSums sums;
    LargeParts<C.rows> parts;
  };
  float row_scale[Shape::rooms][C.rows];
  int2 seen[Shape::rooms][C.rows];  // the first and the last token that a row sees; none of a row that isn't real
  float k_scale[C.by_token ? C.stages : 1][TOKENS], v_scale[C.by_token ? C.stages : 1][TOKENS];  // of the blocks' tokens, if each has its own
  alignas(4) NonfiniteTokens nonfinite[Shape::slots];
  int missing[C.stages];  // bit i: copy i of the block has no page
  TokenTilesOf<C> tiles[Shape::rooms];
  UnitShares shares;
  bool is_last;  // whether the CTA is the last one to store its part of the tile
  uint64_t full[C.stages], empty[C.stages];
  uint64_t checked[Shape::slots], taken[Shape::slots];          // blocks; values in half precision
  uint64_t prepared[Shape::rooms], attended[Shape::rooms];      // tiles

  // Whether warpgroups attend to the same rows.
  __device__ static bool shares_blocks(const DecodeParams& p) { return p.part_height <= WGMMA_ROWS; }

  __device__ void init(const DecodeParams& p) {
    const int users = DECODER_WARPS * (shares_blocks(p) ? 1 : Shape::attenders);  // warps that attend to a block
    for (int stage = 0; stage < C.stages; ++stage) {
      ptx::mbarrier_init(&full[stage], C.by_token ? 33 : 1);  // blocks, and each lane's scales
      ptx::mbarrier_init(&empty[stage], users + (C.fp8 ? DECODER_WARPS : 0));
    }
    for (int slot = 0; slot < Shape::slots; ++slot) ptx::mbarrier_init(&checked[slot], DECODER_WARPS), ptx::mbarrier_init(&taken[slot], users);
    for (int room = 0; room < Shape::rooms; ++room) {
      ptx::mbarrier_init(&prepared[room], Shape::preparers / 32);
      ptx::mbarrier_init(&attended[room], DECODER_WARPS * (Shape::attenders + 1));  // also by those who check
    }
  }
};

// The magnitudes of two halves or bfloat16. Their bits are in the order of the numbers; NaN is the largest one.
__device__ inline uint32_t magnitudes(uint32_t word) { return word & 0x7FFF7FFF; }

// Quantizes a lane's 16 channels of a row, as quantize_row does. ROW_LANES adjacent lanes have a row. Returns the row's
// scale. If an element is not finite, the scale isn't, nor is the element's code. Called by whole warps.
template <typename T, int ROW_LANES>
__device__ float quantize_channels(const uint4 (&channels)[2], uint4& codes) {
  const uint32_t words[8] = {channels[0].x, channels[0].y, channels[0].z, channels[0].w, channels[1].x, channels[1].y, channels[1].z, channels[1].w};
  uint32_t of_two = 0;
#pragma unroll
  for (uint32_t word : words) of_two = __vmaxu2(of_two, magnitudes(word));
#pragma unroll
  for (int distance = ROW_LANES / 2; distance > 0; distance /= 2) of_two = __vmaxu2(of_two, __shfl_xor_sync(~0u, of_two, distance));
  const uint32_t largest = max(of_two & 0xFFFF, of_two >> 16);
  const float scale = row_scale_of<false>(Pair<T>::floats(largest).x), inverse = __frcp_rn(scale);
  const auto codes_of_words = [&](int i) {
    const float2 low = Pair<T>::floats(words[i]), high = Pair<T>::floats(words[i + 1]);
    return ptx::e4m3x4(low.x * inverse, low.y * inverse, high.x * inverse, high.y * inverse);
  };
  codes = {codes_of_words(0), codes_of_words(2), codes_of_words(4), codes_of_words(6)};
  return largest > 0 ? scale : 1.0f;
}

// Brings the queries of a tile to shared memory: `q`. thread: of those that prepare.
template <DecodeTensorsConfig C, typename T>
__device__ void bring_queries(const DecodeParams& p, const TokenTilesOf<C>& tile, uint8_t* q, float* row_scale, int thread) {
  constexpr int CHANNELS = C.fp8 ? 16 : 8;  // of a lane: 16 bytes as they are multiplied
  constexpr int ROW_LANES = C.head_dim / CHANNELS, STEP = ManyShape<C>::preparers / ROW_LANES;  // rows at a time
  constexpr int TOGETHER = C.fp8 ? 2 : 4;  // rows of a lane whose loads are in flight
  constexpr int PANEL = TokenPanels<row_bytes<C>>::PANEL;
  const int height = tile.height(p), above = thread % 32 / ROW_LANES, byte = thread % ROW_LANES * 16;
  uint8_t* const panel = q + byte / PANEL * C.rows * PANEL;
  // of the heads that share the key/value head, and of the row of the batch
  const T* const queries = query_at<T>(p, tile.batch, QueryRow(tile.kv_head * p.group, tile.row.begin)) + thread % ROW_LANES * CHANNELS;
  // Whether a row is a token's, and where the lane's channels of it are.
  const auto find = [&](int row, const uint4*& from) {
    const int index = tile.first_row() + row, number = query_of(p, index);
    from = reinterpret_cast<const uint4*>(queries + (index - number * p.group) * p.q_strides[1] + number * p.q_strides[2]);
    return row < height && number < tile.row.count;
  };
#pragma unroll 1
  for (int first = thread / ROW_LANES; first - above < height; first += TOGETHER * STEP) {
    const uint4* from;
    if constexpr (C.fp8) {
      uint4 channels[TOGETHER][2] = {};
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i)
        if (find(first + i * STEP, from)) channels[i][0] = from[0], channels[i][1] = from[1];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int row = first + i * STEP;
        uint4 codes;
        const float scale = quantize_channels<T, ROW_LANES>(channels[i], codes);
        if (row >= height) continue;
        *reinterpret_cast<uint4*>(panel + ptx::swizzled<PANEL>(row, byte % PANEL)) = codes;
        if (byte == 0) row_scale[row] = scale * p.score_scale;
      }
    } else {
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int row = first + i * STEP;
        const bool real = find(row, from);
        if (row < height) ptx::cp_async_16(panel + ptx::swizzled<PANEL>(row, byte % PANEL), real ? from : reinterpret_cast<const uint4*>(p.q), real);
      }
    }
  }
  if constexpr (!C.fp8) ptx::cp_async_wait();
}

// Some warps bring one tile's queries after another, as many tiles ahead as there are rooms.
template <DecodeTensorsConfig C, typename T>
__device__ void prepare_tiles(const DecodeParams& p, ManyStorage<C>& shared, const UnitShares& shares, TokenTilesOf<C>& first, int thread) {
  using Shape = ManyShape<C>;
  if (thread == 0) {
    first.next(p);
    shared.tiles[0] = first, shared.shares = shares;
  }
  Ring<Shape::rooms> room;
  for (;;) {
    ptx::threads_sync<Shape::preparers>(Shape::preparer_barrier);
    const TokenTilesOf<C>& tile = shared.tiles[room.stage];
    const bool exists = tile.exists();
    if (exists) {
      for (int row = thread; row < C.rows; row += Shape::preparers) shared.seen[room.stage][row] = tokens_seen(p, tile, row);
      bring_queries<C, T>(p, tile, shared.q[room.stage], shared.row_scale[room.stage], thread);
    }
    ptx::fence_proxy_async();  // wgmma reads queries
    __syncwarp();
    if (thread % 32 == 0) ptx::mbarrier_arrive(&shared.prepared[room.stage]);
    if (!exists) return;
    const int before = room.stage;
    room.advance();
    ptx::mbarrier_wait(&shared.attended[room.stage], room.phase ^ 1);
    if (thread == 0) {
      TokenTilesOf<C> next = shared.tiles[before];
      next.next(p);
      shared.tiles[room.stage] = next;
    }
  }
}

// Checks a block of tokens, and converts its values.
template <DecodeTensorsConfig C, typename T>
__device__ void check_block(ManyStorage<C>& shared, const TokenCopies& copies, const Ring<C.stages>& ring, const Ring<ManyShape<C>::slots>& slot, int thread) {
  using Tokens = CheckedTokens<T, C.head_dim, C.fp8>;
  ptx::mbarrier_wait(&shared.full[ring.stage], ring.phase);
  uint8_t* const v = shared.v[ring.stage];
  const int token = Tokens::token(thread);
  bool found = shared.missing[ring.stage] >> (token >> copies.shift) & 1;
  if constexpr (C.fp8) {  // keys show in scores
    typename Tokens::Sums sums;
    Tokens::start_products(sums, v, shared.zeros);
    ptx::mbarrier_wait(&shared.taken[slot.stage], slot.phase ^ 1);
    Tokens::template convert<true>(v, shared.converted[slot.stage], thread);
    found |= Tokens::is_nonfinite(sums, thread);
  } else {
    found |= Tokens::is_nonfinite(shared.k[ring.stage], v, thread);
  }
  if constexpr (C.by_token) {
    found |= (shared.k_scale[ring.stage][token] + shared.v_scale[ring.stage][token]) * 0.0f != 0.0f;
  }
  const bool any = __any_sync(~0u, found);
  if (any) {
    if constexpr (C.fp8)
      Tokens::template convert<false>(v, shared.converted[slot.stage], thread);
    else
      Tokens::remove(v, thread);
    if (thread % 32 < 16) shared.nonfinite[slot.stage].tokens[token] = found;
  }
  if (C.fp8 || any) ptx::fence_proxy_async();
  if (thread % 32 == 0) shared.nonfinite[slot.stage].warps[thread / 32] = any;
  __syncwarp();
  if (thread % 32 != 0) return;
  ptx::mbarrier_arrive(&shared.checked[slot.stage]);
  if constexpr (C.fp8) ptx::mbarrier_arrive(&shared.empty[ring.stage]);
}

// A warpgroup checks the blocks of all tiles.
template <DecodeTensorsConfig C, typename T>
__device__ void check_blocks(const DecodeParams& p, ManyStorage<C>& shared) {
  using Shape = ManyShape<C>;
  const TokenCopies copies(p);
  const int thread = threadIdx.x % 128;
  Ring<C.stages> ring;
  Ring<Shape::slots> slot;
  Ring<Shape::rooms> room;
  for (;; room.advance()) {
    ptx::mbarrier_wait(&shared.prepared[room.stage], room.phase);
    const int blocks = shared.tiles[room.stage].end - shared.tiles[room.stage].begin;
    if (blocks == 0) return;
    __syncwarp();
    if (thread % 32 == 0) ptx::mbarrier_arrive(&shared.attended[room.stage]);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block, ring.advance(), slot.advance()) check_block<C, T>(shared, copies, ring, slot, thread);
  }
}

// The tokens that some rows of a tile all see: first ... last.
struct SeenByAll {
  int first, last;

  __device__ SeenByAll(const DecodeParams& p, const BatchRow& row, int first_row, int rows) {
    const int start = row.end - row.count;
    first = first_seen(p, start + min(query_of(p, first_row + rows - 1), row.count - 1)), last = last_seen(p, start + query_of(p, first_row), row.end);
  }
};

// Whether a row of queries in half precision is finite, by the four lanes that have it: -inf would hide keys. `q`: as
// bring_queries has written it.
template <DecodeTensorsConfig C, typename T>
__device__ bool is_finite_row(const uint8_t* q, int row) {
  constexpr int PANEL = 128, BYTES = C.head_dim * sizeof(T);
  bool finite = true;
#pragma unroll
  for (int from = 0; from < BYTES; from += 4 * 16) {
    const int byte = from + threadIdx.x % 4 * 16;
    const uint4 chunk = *reinterpret_cast<const uint4*>(q + byte / PANEL * C.rows * PANEL + ptx::swizzled<PANEL>(row, byte % PANEL));
    for (uint32_t word : {chunk.x, chunk.y, chunk.z, chunk.w}) finite &= carried<T>(word) == 0;
  }
  const uint32_t lanes = __ballot_sync(~0u, finite) >> (threadIdx.x % 32 / 4 * 4);
  return (lanes & 15) == 15;
}

// Adds the sums of the second warpgroup to those of the first one. Called by both.
template <typename Rows>
__device__ void add_handed(HandedSums& handed, Rows& rows, bool hands) {
  const int thread = threadIdx.x % DECODERS;
  if (hands) handed.rows[thread] = {rows.m[0], rows.l[0], rows.m[1], rows.l[1]};
  float4 factors = {};
#pragma unroll
  for (int pass = 0; pass < Rows::PASSES; ++pass) {
    constexpr int LOADS = Rows::PASS / 4;
    if (hands) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const float(&mine)[4] = rows.o[pass * LOADS + i];
        handed.output[i][thread] = {mine[0], mine[1], mine[2], mine[3]};
      }
    }
    ptx::threads_sync<2 * DECODERS>(1);
    if (!hands) {
      if (pass == 0) factors = rows.merge(handed.rows[thread]);
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const float4 theirs = handed.output[i][thread];
        float(&mine)[4] = rows.o[pass * LOADS + i];
        mine[0] = fmaf(theirs.x, factors.y, mine[0] * factors.x), mine[1] = fmaf(theirs.y, factors.y, mine[1] * factors.x);
        mine[2] = fmaf(theirs.z, factors.w, mine[2] * factors.z), mine[3] = fmaf(theirs.w, factors.w, mine[3] * factors.z);
      }
    }
    ptx::threads_sync<2 * DECODERS>(1);
  }
}

// A lane has two of every eight channels of a row, the first ones two times its number in its quad. Afterwards it has
// every fourth eight of them.
template <int N>
__device__ void gather_in_quads(uint32_t (&words)[N]) {
  static_assert(N % 4 == 0);
#pragma unroll
  for (int i = 0; i < N; i += 4)
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      const bool upper = threadIdx.x & distance;
#pragma unroll
      for (int low = 0; low < 4; ++low) {
        if (low & distance) continue;
        uint32_t &a = words[i + low], &b = words[i + low + distance];
        const uint32_t other = __shfl_xor_sync(~0u, upper ? a : b, distance);
        (upper ? a : b) = other;
      }
    }
}

// Stores row h of a thread's two, times `weight`. `to`: its first channel, if it is real. Out: the output's type.
template <typename Out, typename Rows>
__device__ void store_row(void* out, int64_t to, const Rows& rows, int h, float weight, bool real, Fragment f) {
  constexpr int N = Rows::OF_CHANNELS;
  if constexpr (sizeof(Out) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (real) *reinterpret_cast<float2*>(static_cast<float*>(out) + to + 8 * i + f.column) = {rows.o[i][2 * h] * weight, rows.o[i][2 * h + 1] * weight};
  } else {
    uint32_t words[N];
#pragma unroll
    for (int i = 0; i < N; ++i) words[i] = word_of<Out>(rows.o[i][2 * h] * weight, rows.o[i][2 * h + 1] * weight);
    gather_in_quads(words);
#pragma unroll
    for (int i = 0; i < N; i += 4)
      if (real) *reinterpret_cast<uint4*>(static_cast<Out*>(out) + to + 8 * i + 4 * f.column) = {words[i], words[i + 1], words[i + 2], words[i + 3]};
  }
}

// Stores the output and LSE of a warpgroup's rows, or partial results. `first`: its first row in the tile. `row_scale`,
// `seen`: of the tile's rows.
template <DecodeTensorsConfig C, typename Rows>
__device__ void store_many_rows(const DecodeParams& p, const TokenTilesOf<C>& tile, const Rows& rows, int first, const float* row_scale, const int2* seen, float restore, Fragment f) {
  const int place = tile.place(p);
  const bool complete = tile.complete();
  const OutType type = complete ? p.out_type : OutType::f32;
  void* const out = complete ? p.out : p.parts;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int mine = first + f.row + 8 * h;
    const QueryRow query(p, tile.row, tile.kv_head, tile.first_row() + mine);
    const bool real = query.real && mine < tile.height(p), nonfinite = C.fp8 && real && seen[mine].y >= 0 && row_scale[mine] != row_scale[mine];
    const float l = nonfinite ? NAN : rows.l[h], m = rows.m[h];
    const float weight = weight_of(restore, complete, l);
    const int64_t part = int64_t(place) * p.part_height + mine, to = (complete ? int64_t(query.out_row(p, tile.batch)) : part) * C.head_dim;
    if (real && f.column == 0) store_sums(p, query, tile.batch, complete, part, m, l);
    switch (type) {
      case OutType::bf16:
        store_row<__nv_bfloat16>(out, to, rows, h, weight, real, f);
        break;
      case OutType::f16:
        store_row<__half>(out, to, rows, h, weight, real, f);
        break;
      case OutType::f32:
        store_row<float>(out, to, rows, h, weight, real, f);
        break;
    }
  }
}

// A warpgroup attends to the blocks of all tiles of the CTA, the `number`-th of those that do.
template <DecodeTensorsConfig C, typename T>
__device__ void attend_to_blocks_of_many(const DecodeParams& p, ManyStorage<C>& shared, int number) {
  using Shape = ManyShape<C>;
  using Rows = ManyRows<T, C.head_dim, C.fp8, C.by_token>;
  const bool shares_blocks = shared.shares_blocks(p), elected = threadIdx.x % 32 == 0;
  const int first = shares_blocks ? 0 : WGMMA_ROWS * number;
  // While a warpgroup has the values of a block, it waits for its next one.
  const bool looks_ahead = !shares_blocks || Shape::slots >= 4;
  Ring<C.stages> ring;
  Ring<Shape::slots> slot;
  Ring<Shape::rooms> room;
  for (;; room.advance()) {
    ptx::mbarrier_wait(&shared.prepared[room.stage], room.phase);
    const TokenTilesOf<C>& tile = shared.tiles[room.stage];
    if (!tile.exists()) return;
    Fragment f = Fragment::mine();
    compute_late(f.row), compute_late(f.column);
    const TensorScales of_all(p, tile, C.fp8 && !C.by_token);
    const float* const row_scale = shared.row_scale[room.stage];
    const int2* const seen = shared.seen[room.stage];
    const uint8_t* const queries = shared.q[room.stage] + first * TokenPanels<row_bytes<C>>::PANEL;
    Rows rows;
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int mine = first + f.row + 8 * h;
      if (seen[mine].y >= p.capacity) rows.l[h] = NAN;  // tokens that the page table has no place for
      if constexpr (!C.fp8) {
        if (!is_finite_row<C, T>(shared.q[room.stage], mine) && seen[mine].y >= 0) rows.l[h] = NAN;
      }
      const float sink = shares_blocks && number > 0 ? -INFINITE : sink_of(p, tile, mine, seen[mine]);
      if (sink != -INFINITE) rows.add_sink(h, sink, f.column == 0);
      factor[h] = scale_of_row<C>(p, row_scale, of_all, mine);
    }
    const SeenByAll by_all(p, tile.row, tile.first_row() + first, WGMMA_ROWS);
    const bool never_plain = p.softcap > 0.0f || of_all.nan() != 0.0f;
    const auto free_tokens = [&](int stage) {
      if (elected) ptx::mbarrier_arrive(&shared.empty[stage]);
    };
    const auto free_values = [&](int place) {
      if (elected) ptx::mbarrier_arrive(C.fp8 ? &shared.taken[place] : &shared.empty[place]);
    };
    int block = tile.blocks.first + tile.begin;
    const int end = tile.blocks.first + tile.end;
    const auto go_on = [&] { ++block, ring.advance(), slot.advance(); };
    const auto skip_to = [&](int other) {
      for (; block < other; go_on()) {
        ptx::mbarrier_wait(&shared.full[ring.stage], ring.phase);
        ptx::mbarrier_wait(&shared.checked[slot.stage], slot.phase);
        __syncwarp();
        free_tokens(ring.stage);
        if constexpr (C.fp8) free_values(slot.stage);
      }
    };
    int upto = end;
    if (shares_blocks) {
      if (block < end && ring.stage % 2 != number) go_on();
    } else {
      const TokenBlocks seen_blocks(p, tile.row, tile.first_row() + first, WGMMA_ROWS);
      skip_to(min(seen_blocks.first, end));
      upto = min(end, seen_blocks.first + seen_blocks.count);
    }
    while (block < upto) {  // once if it looks ahead
      typename Rows::Scores s;
      ptx::mbarrier_wait(&shared.full[ring.stage], ring.phase);
      Rows::start(s, shared.k[ring.stage], queries);
      ptx::mbarrier_wait(&shared.checked[slot.stage], slot.phase);
      uint32_t unusual = shared.nonfinite[slot.stage].any();
      Rows::template wait_scores<0>(s);
      int values = -1;  // of the block before: a slot, or the stage that they came in
      for (;;) {
        const int stage = ring.stage, start = block * TOKENS, place = C.fp8 ? slot.stage : stage;
        const NonfiniteTokens& nonfinite = shared.nonfinite[slot.stage];
        __syncwarp();
        if constexpr (C.fp8 && !C.by_token) free_tokens(stage);
        const bool plain = unusual == 0 && !never_plain;
        if (!plain) {
          const auto is_nan = [&](int token) { return (nonfinite.any() && nonfinite.has(token)) || of_all.nan() != 0.0f; };
          Rows::finish_scores(s, factor, shared.k_scale[C.by_token ? stage : 0], is_nan, seen + first, start, p.softcap, f);
        } else {
          if constexpr (C.by_token) Rows::scale_by_token(s, factor, shared.k_scale[stage], f);
          if (start < by_all.first || start + TOKENS - 1 > by_all.last) Rows::hide(s, seen + first, start, f);
        }
        go_on();
        if (shares_blocks && block < upto) go_on();
        const bool more = looks_ahead && block < upto;
        const bool is_checked = !more || ptx::mbarrier_is_complete(&shared.checked[slot.stage], slot.phase);
        const bool scaled = C.by_token || !plain;
        const float to_base_2[2] = {scaled ? 1.0f : factor[0], scaled ? 1.0f : factor[1]};
        float kept[2];
        rows.weigh(s, to_base_2, C.by_token ? shared.v_scale[stage] : nullptr, f, kept);
        rows.finish_products();
        __syncwarp();
        if constexpr (C.by_token) free_tokens(stage);
        if (values >= 0) free_values(values);
        if (!is_checked) ptx::mbarrier_wait(&shared.full[ring.stage], ring.phase);
        rows.take(s);
        values = place;
        // Behind the last block anything is multiplied: nvcc makes products wait for each other if only some rounds
        // start them.
        Rows::start(s, more ? shared.k[ring.stage] : queries, queries);
        if (!is_checked) ptx::mbarrier_wait(&shared.checked[slot.stage], slot.phase);
        if (more) unusual = shared.nonfinite[slot.stage].any();
        rows.keep(kept);
        rows.multiply(C.fp8 ? shared.converted[place] : shared.v[place]);
        Rows::template wait_scores<1>(s);
        if (!C.fp8 && shares_blocks) {  // few blocks are in flight, and memory is what the call waits for
          rows.finish_products();
          __syncwarp();
          free_values(values);
          values = -1;
        }
        if (!more) break;
      }
      rows.finish_products();
      __syncwarp();
      if (values >= 0) free_values(values);
    }
    if (!shares_blocks) skip_to(end);
    rows.finish();
    if (shares_blocks) add_handed(shared.sums, rows, number > 0);
    if (!shares_blocks || number == 0) store_many_rows<C, Rows>(p, tile, rows, first, row_scale, seen, of_all.restore(), f);
    if (!tile.complete()) {
      combine_large_parts<C.head_dim>(p, shared, tile, shared.parts);
      ptx::threads_sync<2 * DECODERS>(1);  // nobody reads weights any more
    }
    __syncwarp();
    if (elected) ptx::mbarrier_arrive(&shared.attended[room.stage]);
  }
}

}  // namespace fp8attn
