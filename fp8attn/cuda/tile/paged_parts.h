// What decode kernels do before and after blocks of keys: prefetching, and the output of tiles that several CTAs share,
// or that have no keys.
#pragma once

#include <type_traits>

#include "../ptx/convert.h"
#include "../ptx/cp_async.h"
#include "../ptx/flag.h"
#include "../ptx/warpgroup.h"
#include "paged_queries.h"

namespace fp8attn {

constexpr int LINE = 128;  // bytes that a prefetch brings

// Brings into L2 what CTAs read first, and one after another. It may run before the grids before have completed, as it
// reads nothing. Warps of the grid share the rows of the batch.
template <typename T, int DIM, int THREADS>
__device__ void prefetch_inputs(const DecodeParams& p) {
  constexpr int NUMBERS = LINE / sizeof(int), ELEMENTS = LINE / sizeof(T);
  const int thread = threadIdx.x, lane = thread % 32;
  if (thread * NUMBERS < p.batches) {
    ptx::prefetch_l2(p.lengths + thread * NUMBERS);
    if (p.cu_seqlens != nullptr) ptx::prefetch_l2(p.cu_seqlens + thread * NUMBERS);
    if (p.counts != nullptr) ptx::prefetch_l2(p.counts + thread * NUMBERS);
    if (p.sequences != nullptr) ptx::prefetch_l2(p.sequences + thread * NUMBERS);
  }
#pragma unroll 1
  for (int batch = blockIdx.x + thread / 32 * p.ctas; batch < p.batches; batch += THREADS / 32 * p.ctas) {
#pragma unroll 1
    for (int page = lane * NUMBERS; page < p.table_width; page += 32 * NUMBERS) ptx::prefetch_l2(p.page_table + batch * p.table_stride + page);
    if (lane < p.kv_heads) ptx::prefetch_l2(p.tickets + batch * p.kv_heads + lane);
  }
  // each packed query counts as a row of the batch that has one
  const bool packed = p.cu_seqlens != nullptr;
  const int rows = packed ? p.tokens : p.batches, of_row = packed ? 1 : p.q_length;
#pragma unroll 1
  for (int row = blockIdx.x + thread / 32 * p.ctas; row < rows; row += THREADS / 32 * p.ctas) {
#pragma unroll 1
    for (int head = lane; head < p.q_heads; head += 32) {
      const T* q = static_cast<const T*>(p.q) + row * p.q_strides[packed ? 2 : 0] + head * p.q_strides[1];
#pragma unroll 1
      for (int query = 0; query < of_row; ++query, q += p.q_strides[2])
        for (int channel = 0; channel < DIM; channel += ELEMENTS) ptx::prefetch_l2(q + channel);
    }
  }
}

// Stores the LSE of a row of a complete tile; else, at row `part` of partial results, its largest score in base 2 and
// its sum.
__device__ inline void store_sums(const DecodeParams& p, const QueryRow& query, int batch, bool complete, int64_t part, float m, float l) {
  if (complete)
    p.lse[query.index(p, batch)] = (m + log2f(l)) / LOG2E;
  else
    *reinterpret_cast<float2*>(p.part_rows + 2 * part) = {m, l};
}

// Two channels of a row of the output.
__device__ inline void store_pair(const DecodeParams& p, int64_t index, float a, float b) {
  switch (p.out_type) {
    case OutType::bf16:
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.out) + index) = __floats2bfloat162_rn(a, b);
      return;
    case OutType::f16:
      *reinterpret_cast<__half2*>(static_cast<__half*>(p.out) + index) = __floats2half2_rn(a, b);
      return;
    case OutType::f32:
      *reinterpret_cast<float2*>(static_cast<float*>(p.out) + index) = {a, b};
      return;
  }
}

// The parts of a tile: how many, and where they are.
struct TileParts {
  int count, first;
  bool fixed;

  template <int HEIGHT, typename Blocks>
  __device__ TileParts(const DecodeParams& p, const UnitShares& shares, const DecodeTiles<HEIGHT, Blocks>& tile) : fixed(has_fixed_parts(p)) {
    const int first_block = tile.before + units_beside<HEIGHT>;  // of all units
    first = fixed ? tile.before : shares.cta_of(first_block, blockIdx.x);
    count = fixed ? units_of<HEIGHT>(p, tile.blocks.size()) : shares.cta_of(first_block + tile.blocks.size() - 1, blockIdx.x) - first + 1;
  }

  // All parts but the tile's first one have the first of their CTA's places.
  __device__ int apart() const { return fixed ? 1 : 2; }
  __device__ int place(int part) const { return fixed ? first + part : 2 * (first + part) + (part == 0); }
};

// Where a ticket counts, and how many of its bits are before.
struct Ticket {
  static constexpr int BITS = 10;  // more than there are CTAs, or fixed parts
  int* address;
  int shift;

  // Of all parts of a tile.
  template <typename Tile>
  __device__ Ticket(const DecodeParams& p, const Tile& tile)
      : address(p.tickets + (tile.batch * p.kv_heads + tile.kv_head) * p.tickets_of_head + tile.row_tile / TILES_OF_TICKET), shift(BITS * (tile.row_tile % TILES_OF_TICKET)) {}

  __device__ explicit Ticket(int* of_group) : address(of_group), shift(0) {}

  // Whether the CTA is the last one of `count` to take it. Releases what its threads have stored before, and acquires
  // what those of the others have. Called by all THREADS that attend.
  template <int THREADS = DECODERS, typename Storage>
  __device__ bool is_last(Storage& shared, int count) const {
    ptx::threads_sync<THREADS>(1);
    if (threadIdx.x == 0) {
      shared.is_last = (ptx::add_acq_rel(address, 1 << shift) >> shift & ((1 << BITS) - 1)) == count - 1;
      if (shared.is_last) atomicAdd(address, int(0u - (uint32_t(count) << shift)));
    }
    ptx::threads_sync<THREADS>(1);
    return shared.is_last;
  }
};

// Adds the parts of a tile that several CTAs share, in the order of the keys, in the last CTA that has stored its part.
// `shared` has the `shares` of all CTAs, and room for `is_last`. Called by all decoders. Not inlined: its loads would
// take registers from the loop over pages.
template <int DIM, typename Storage, int HEIGHT, typename Blocks>
__device__ __noinline__ void combine_parts(const DecodeParams& p, Storage& shared, const DecodeTiles<HEIGHT, Blocks>& tile) {
  constexpr int WIDTH = DIM < 128 ? 2 : 4, LOADS = DIM / 32 / WIDTH;  // floats of a load, and a lane's loads of a part
  constexpr int PARTS = DIM > 128 ? 8 : 32, SOME = 8;                 // whose loads are in flight together; skipped together
  using Load = std::conditional_t<WIDTH == 2, float2, float4>;
  const int lane = threadIdx.x % 32;
  const TileParts of_tile(p, shared.shares, tile);
  if (!Ticket(p, tile).is_last(shared, of_tile.count)) return;
#pragma unroll 1
  for (int mine = threadIdx.x / 32; mine < tile.height(p); mine += DECODER_WARPS) {
    float largest = -INFINITE, sum = 0.0f, o[LOADS][WIDTH] = {};
#pragma unroll 1
    for (int from = 0; from < of_tile.count; from += 32) {  // each lane has the sums of one part
      const int parts = min(of_tile.count - from, 32);
      const float2 of_part =
          lane < parts ? __ldcg(reinterpret_cast<const float2*>(p.part_rows + 2 * (of_tile.place(from + lane) * p.part_height + mine))) : float2{-INFINITE, 0.0f};
      float weight = 0.0f;
#pragma unroll 1
      for (int chunk = 0; chunk < parts; chunk += PARTS) {
        Load loads[PARTS][LOADS] = {};
        const int here = of_tile.place(from + chunk) * p.part_height + mine, next = of_tile.place(from + chunk + 1) * p.part_height + mine;
        const float* part = p.parts + WIDTH * lane;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
          if (i % SOME == 0 && chunk + i >= parts) break;
          const int at = i == 0 ? here : next + of_tile.apart() * (i - 1) * p.part_height;
#pragma unroll
          for (int j = 0; j < LOADS; ++j)
            if (chunk + i < parts) loads[i][j] = __ldcg(reinterpret_cast<const Load*>(part + at * DIM + 32 * WIDTH * j));
        }
        if (chunk == 0) {  // while these are in flight
          float m = fmaxf(largest, of_part.x);
#pragma unroll
          for (int distance = 16; distance > 0; distance /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, distance));
          const float kept = ptx::exp2_approx(largest - finite_or_zero(m));
          weight = ptx::exp2_approx(of_part.x - finite_or_zero(m));
          largest = m, sum *= kept;
#pragma unroll
          for (auto& of : o)
#pragma unroll
            for (float& x : of) x *= kept;
        }
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
          if (i % SOME == 0 && chunk + i >= parts) break;
          const float factor = __shfl_sync(~0u, weight, chunk + i);
          sum = fmaf(factor, __shfl_sync(~0u, of_part.y, chunk + i), sum);
#pragma unroll
          for (int j = 0; j < LOADS; ++j)
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) o[j][k] = fmaf(factor, reinterpret_cast<const float*>(&loads[i][j])[k], o[j][k]);
        }
      }
    }
    const QueryRow query(p, tile.row, tile.kv_head, tile.first_row() + mine);
    if (!query.real) continue;
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int64_t index = query.out_row(p, tile.batch);
#pragma unroll
    for (int j = 0; j < LOADS; ++j)
#pragma unroll
      for (int k = 0; k < WIDTH; k += 2) store_pair(p, index * DIM + WIDTH * (32 * j + lane) + k, o[j][k] * inverse, o[j][k + 1] * inverse);
    if (lane == 0) p.lse[query.index(p, tile.batch)] = (largest + log2f(sum)) / LOG2E;
  }
}

// What threads share while they add large parts, SOME at a time.
template <int HEIGHT>
struct LargeParts {
  static constexpr int SOME = 16;
  float weights[SOME][HEIGHT];  // before, their m
  float sums[2][HEIGHT];        // of two threads of a row
};

// The same of tiles of many rows, whose parts are large, by two threads a row. All threads load a part together, and
// several parts at a time, where a warp would have one row after another. More than MEMBERS parts are added in two
// steps: those of a group by the last CTA that has one of them, and the groups' sums by the last CTA of these. Parts
// aren't fixed.
template <int DIM, typename Storage, int HEIGHT, typename Blocks>
__device__ __noinline__ void combine_large_parts(const DecodeParams& p, Storage& shared, const DecodeTiles<HEIGHT, Blocks>& tile, LargeParts<HEIGHT>& large) {
  constexpr int MEMBERS = 8;                       // parts of a group
  constexpr int SOME = LargeParts<HEIGHT>::SOME, OF_THREAD = SOME / 2;  // parts whose m and sums a thread has
  constexpr int WIDTH = 4, OWN = 8, TOGETHER = 3;  // floats of a load; loads of a part in a pass; parts that are loaded together
  constexpr int THREADS = 2 * HEIGHT, EVERY = THREADS * WIDTH;  // floats of all threads' loads
  static_assert(HEIGHT * DIM % (OWN * EVERY) == 0);
  const TileParts of_tile(p, shared.shares, tile);
  // here, unlike in a kernel, each access to p is a load from memory
  const int height = tile.height(p), mine = threadIdx.x % HEIGHT, half = threadIdx.x / HEIGHT, row_pitch = p.part_height;
  float* const parts_of_all = p.parts;
  float2* const rows_of_all = reinterpret_cast<float2*>(p.part_rows);
  const bool grouped = of_tile.count > MEMBERS;
  const int group = (int(blockIdx.x) - of_tile.first) / MEMBERS * MEMBERS;  // its first part
#pragma unroll 1
  for (int level = grouped ? 0 : 1; level < 2; ++level) {
    const bool final = level == 1;
    const int first_part = final ? 0 : group, step = final && grouped ? MEMBERS : 1;
    const int count = !final ? min(of_tile.count - group, MEMBERS) : grouped ? (of_tile.count + MEMBERS - 1) / MEMBERS : of_tile.count;
    const Ticket ticket = final ? Ticket(p, tile) : Ticket(p.group_tickets + of_tile.place(group));
    if (!ticket.is_last<THREADS>(shared, count)) return;
    const auto row_of_part = [&](int i) { return of_tile.place(first_part + i * step) * row_pitch; };
#pragma unroll 1
    for (int pass = 0; pass < height * DIM; pass += OWN * EVERY) {
      const int first = pass + WIDTH * threadIdx.x;
      float largest = -INFINITE, sum = 0.0f, o[OWN][WIDTH] = {};  // of row `mine`, and of the thread's loads
#pragma unroll 1
      for (int from = 0; from < count; from += SOME) {
        const int parts = min(count - from, SOME);
        float2 found[OF_THREAD];
#pragma unroll
        for (int i = 0; i < OF_THREAD; ++i) {
          const int part = 2 * i + half;
          found[i] = part < parts && mine < height ? __ldcg(rows_of_all + row_of_part(from + part) + mine) : float2{-INFINITE, 0.0f};
        }
        ptx::threads_sync<THREADS>(1);  // nobody reads weights any more
#pragma unroll
        for (int i = 0; i < OF_THREAD; ++i) large.weights[2 * i + half][mine] = found[i].x;
        ptx::threads_sync<THREADS>(1);
        float m = largest;
#pragma unroll
        for (int i = 0; i < SOME; ++i) m = fmaxf(m, large.weights[i][mine]);
        ptx::threads_sync<THREADS>(1);
        const float base = finite_or_zero(m), kept = ptx::exp2_approx(largest - base);
        sum *= kept, largest = m;
#pragma unroll
        for (int i = 0; i < OF_THREAD; ++i) {
          const float weight = ptx::exp2_approx(found[i].x - base);
          large.weights[2 * i + half][mine] = weight, sum = fmaf(weight, found[i].y, sum);
        }
        if (half == 0) large.sums[0][mine] = kept;
        ptx::threads_sync<THREADS>(1);
#pragma unroll
        for (int j = 0; j < OWN; ++j)
#pragma unroll
          for (int k = 0; k < WIDTH; ++k) o[j][k] *= large.sums[0][(first + j * EVERY) / DIM];
#pragma unroll 1
        for (int i = 0; i < parts; i += TOGETHER) {
          float4 loads[TOGETHER][OWN];
#pragma unroll
          for (int t = 0; t < TOGETHER; ++t)
#pragma unroll
            for (int j = 0; j < OWN; ++j) {
              const float* const part = parts_of_all + int64_t(row_of_part(from + i + t)) * DIM + first;
              loads[t][j] = i + t < parts && first + j * EVERY < height * DIM ? __ldcg(reinterpret_cast<const float4*>(part + j * EVERY)) : float4{};
            }
#pragma unroll
          for (int t = 0; t < TOGETHER; ++t)
#pragma unroll
            for (int j = 0; j < OWN; ++j) {
              const float weight = i + t < parts ? large.weights[i + t][(first + j * EVERY) / DIM] : 0.0f;
#pragma unroll
              for (int k = 0; k < WIDTH; ++k) o[j][k] = fmaf(weight, reinterpret_cast<const float*>(&loads[t][j])[k], o[j][k]);
            }
        }
      }
      ptx::threads_sync<THREADS>(1);
      large.sums[half][mine] = sum;
      ptx::threads_sync<THREADS>(1);
      const bool last_pass = pass + OWN * EVERY >= height * DIM;
      const float of_mine = large.sums[0][mine] + large.sums[1][mine];
      if (!final) {  // in place of the group's first part
        const int place = row_of_part(0);
#pragma unroll
        for (int j = 0; j < OWN; ++j)
          if (first + j * EVERY < height * DIM)
            *reinterpret_cast<float4*>(parts_of_all + int64_t(place) * DIM + first + j * EVERY) = {o[j][0], o[j][1], o[j][2], o[j][3]};
        if (last_pass && half == 0 && mine < height) rows_of_all[place + mine] = {largest, of_mine};
        continue;
      }
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        const int at = first + j * EVERY, row = at / DIM;
        const QueryRow query(p, tile.row, tile.kv_head, tile.first_row() + row);
        if (row >= height || !query.real) continue;
        const float of_row = large.sums[0][row] + large.sums[1][row], inverse = of_row == 0.0f ? 0.0f : 1.0f / of_row;
        const int64_t index = int64_t(query.out_row(p, tile.batch)) * DIM + at % DIM;
#pragma unroll
        for (int k = 0; k < WIDTH; k += 2) store_pair(p, index + k, o[j][k] * inverse, o[j][k + 1] * inverse);
      }
      const QueryRow query(p, tile.row, tile.kv_head, tile.first_row() + mine);
      if (last_pass && half == 0 && mine < height && query.real) p.lse[query.index(p, tile.batch)] = (largest + log2f(of_mine)) / LOG2E;
    }
  }
}

// Stores zeros as a query's output, or NaN. Called by a warp.
__device__ inline void store_nothing(const DecodeParams& p, const QueryRow& query, int batch, int dim, bool nan) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int channel = 2 * lane; channel < dim; channel += 64) store_pair(p, int64_t(query.out_row(p, batch)) * dim + channel, nan ? NAN : 0.0f, nan ? NAN : 0.0f);
  if (lane == 0) p.lse[query.index(p, batch)] = nan ? NAN : -INFINITE;
}

// Stores zeros for queries that are no tokens, NaN for those of a row of the batch that isn't there, and zeros for
// packed queries of no row. Tiles have the others. CTAs share rows and heads. Called by a warp.
__device__ inline void store_empty_rows(const DecodeParams& p, int dim) {
#pragma unroll 1
  for (int pair = blockIdx.x; pair < p.batches * p.kv_heads; pair += p.ctas) {
    const int batch = pair / p.kv_heads, first_head = pair % p.kv_heads * p.group;
    const BatchRow row(p, batch);
    const int given = queries_of(p, batch, row.begin);
    if (p.leaves_longer && given > p.q_length) continue;
#pragma unroll 1
    for (int number = row.exists ? row.count : 0; number < given; ++number)
#pragma unroll 1
      for (int head = first_head; head < first_head + p.group; ++head) store_nothing(p, QueryRow(head, row.begin + number), batch, dim, number < row.count);
  }
  if (p.cu_seqlens == nullptr) return;
  const int begin = packed_start(p, 0), end = packed_start(p, p.batches);
#pragma unroll 1
  for (int query = blockIdx.x; query < p.tokens; query += p.ctas) {
    if (query >= begin && query < end) continue;
#pragma unroll 1
    for (int head = 0; head < p.q_heads; ++head) store_nothing(p, QueryRow(head, query), 0, dim, false);
  }
}

}  // namespace fp8attn
