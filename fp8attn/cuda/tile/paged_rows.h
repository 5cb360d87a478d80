// Running sums of the rows of a tile of the decode kernel, and what a block of keys adds to them. A warpgroup has them.
//
// Products are transposed: keys or channels are the 64 rows of wgmma, queries its columns. Lane 4g + c of warp w has,
// of each group of eight queries, 2c and 2c + 1 (r = 0, 1), and of each 64 keys or channels 16w + g and 16w + g + 8. So
// warps have different channels of O, and their sums are never added. Warps exchange the largest scores of a block,
// and P.
#pragma once

#include "../ptx/ldmatrix.h"
#include "../ptx/movmatrix.h"
#include "../ptx/warpgroup.h"
#include "../ptx/wgmma.h"
#include "mask.h"
#include "paged_queries.h"
#include "products.h"
#include "rotate.h"
#include "shared_tile.h"
#include "page_softmax.h"
#include "score_mod.h"

namespace fp8attn {

constexpr int WGMMA_ROWS = 64;   // keys or channels of a product
constexpr int HALF_PANEL = 128;  // bytes of a row in a panel of tokens in half precision, as TMA writes it
static_assert(HALF_BLOCK * sizeof(uint16_t) == KEYS);

// The page of a query, which attends to it in half precision up to its own position.
__device__ inline int own_page(int position) { return max(position, 0) / KEYS; }

// What follows from x is computed behind this place. The compiler would compute addresses before the loops over tiles
// and blocks, and spill them.
template <typename T>
__device__ void compute_late(T& x) {
  asm volatile("" : "+r"(x));
}

// What is done to scores but causality. ANY: a window, a soft cap and a sink may be given; else there are none.
template <bool ANY>
struct PagedScores {
  const DecodeParams& p;

  __device__ bool capped() const { return ANY && p.softcap > 0.0f; }

  // The first key that a query sees.
  __device__ int first_key(int position) const { return !ANY || p.left < 0 ? 0 : max(position - p.left, 0); }

  // Whether a query sees no key of a page. Of the pages behind the table there is one block, the first one's.
  __device__ bool hides(int position, int page) const {
    if (own_page(position) <= page) return true;
    if constexpr (!ANY) return false;
    return first_key(position) >= (page < p.table_width ? page + 1 : own_page(position)) * KEYS;
  }

  // A score in base 2 under the soft cap.
  __device__ float cap(float score) const { return cap_score(score, p.softcap, 1.0f / p.softcap); }
};

// What a thread has for each of its queries.
template <int GROUPS>
using OfQueries = float[GROUPS][2];

// Calls f(group, r) for the thread's queries: QUERY_GROUP * group + f.column + r.
template <int GROUPS, typename F>
__device__ void for_queries_of(F&& f) {
#pragma unroll
  for (int group = 0; group < GROUPS; ++group)
#pragma unroll
    for (int r = 0; r < 2; ++r) f(group, r);
}

// A thread's part of products, with 64 rows each, for all queries. Element 4 group + 2 h + r.
template <int PRODUCTS, int GROUPS, typename Sum = float>
using Products = Sum[PRODUCTS][4 * GROUPS];

// Reduces what threads have over all lanes and warps that have the same queries, through `of_warps`, which nobody may
// still read from a call before. Called by all decoders.
template <int GROUPS, typename F>
__device__ void reduce_over_warps(float (*of_warps)[DECODER_WARPS], OfQueries<GROUPS>& x, Fragment f, F&& op) {
  static_assert(DECODER_WARPS == 4);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for_queries_of<GROUPS>([&](int group, int r) {
    float& mine = x[group][r];
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) mine = op(mine, __shfl_xor_sync(~0u, mine, distance));
    if (lane < 4) of_warps[QUERY_GROUP * group + f.column + r][warp] = mine;
  });
  ptx::warpgroup_sync(1);
  for_queries_of<GROUPS>([&](int group, int r) {
    const float4 all = *reinterpret_cast<const float4*>(of_warps[QUERY_GROUP * group + f.column + r]);
    x[group][r] = op(op(all.x, all.y), op(all.z, all.w));
  });
}

// The running sums of a thread's queries. PRODUCTS: a thread has 4 * PRODUCTS * GROUPS elements of the output.
template <int PRODUCTS, int GROUPS>
struct RunningSums {
  using OfMine = OfQueries<GROUPS>;

  // m: maximum of the scores so far, in base 2. l: sums of 2^(score - m). o: output times l.
  OfMine m, l = {};
  Products<PRODUCTS, GROUPS> o = {};

  __device__ RunningSums() {
#pragma unroll
    for (auto& of : m) of[0] = of[1] = -INFINITE;
  }

  template <typename F>
  __device__ static void for_queries(F&& f) {
    for_queries_of<GROUPS>(f);
  }

  // The factors of the sums so far and of those of a block whose largest scores are `largest`. Updates m.
  __device__ void merge(const OfMine& largest, OfMine& mine, OfMine& theirs) {
    for_queries([&](int group, int r) {
      float& of = m[group][r];
      const float m_new = fmaxf(of, largest[group][r]), base = finite_or_zero(m_new);
      mine[group][r] = ptx::exp2_approx(of - base), theirs[group][r] = ptx::exp2_approx(largest[group][r] - base);
      of = m_new;
    });
  }
};

// Makes elements finite.
template <typename T>
__device__ void clamp(uint32_t (&words)[4]) {
  using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  constexpr uint32_t LARGEST = std::is_same_v<T, __half> ? 0x7BFF7BFF : 0x7F7F7F7F, LOWEST = LARGEST | 0x80008000;
#pragma unroll
  for (uint32_t& word : words) {
    Two& two = reinterpret_cast<Two&>(word);
    two = __hmin2(__hmax2(two, reinterpret_cast<const Two&>(LOWEST)), reinterpret_cast<const Two&>(LARGEST));  // of NaN, the other one
  }
}

// What the warps exchange.
template <int ROWS>
struct alignas(1024) WarpExchange {
  uint8_t p[ROWS * KEYS];  // P of a page, rows with TMA's swizzle; or of a block in half precision
  float of_warps[ROWS][DECODER_WARPS];

  // There is a barrier between two calls.
  template <int GROUPS>
  __device__ void largest(OfQueries<GROUPS>& x, Fragment f) {
    reduce_over_warps<GROUPS>(of_warps, x, f, [](float a, float b) { return fmaxf(a, b); });
  }

  // May be followed by another call at once.
  template <int GROUPS>
  __device__ void sum(OfQueries<GROUPS>& x, Fragment f) {
    reduce_over_warps<GROUPS>(of_warps, x, f, [](float a, float b) { return a + b; });
    ptx::warpgroup_sync(1);
  }
};

// Scores of a page, divided by their factors: s = K · Qᵀ. `keys`, `queries`: their descriptors, of
// panels of KEYS and ROWS rows.
template <int DIM, int ROWS, int GROUPS, bool INT8, typename Sum>
__device__ void multiply_keys(Products<KEYS / WGMMA_ROWS, GROUPS, Sum>& s, uint64_t keys, uint64_t queries) {
  constexpr int PANEL = KEY_PANEL<DIM>, STEPS = PANEL / 32;
  using Product = std::conditional_t<INT8, ptx::WgmmaInt8<QUERY_GROUP * GROUPS>, ptx::Wgmma<QUERY_GROUP * GROUPS>>;
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < DIM / 32; ++step) {
    const uint64_t q = ptx::operand_of(ptx::operand_of(queries, step / STEPS * ROWS, PANEL), step % STEPS, 32);
#pragma unroll
    for (int t = 0; t < KEYS / WGMMA_ROWS; ++t) {
      const uint64_t k = ptx::operand_of(ptx::operand_of(keys, step / STEPS * KEYS + WGMMA_ROWS * t, PANEL), step % STEPS, 32);
      if (step == 0)
        Product::template run<false>(s[t], k, q);
      else
        Product::template run<true>(s[t], k, q);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
#pragma unroll
  for (auto& of : s) ptx::wgmma_touch(of);
}

// A block in half precision in shared memory: panels of HALF_BLOCK rows of HALF_PANEL bytes. `start`: its first token.
struct HalfBlock {
  using Tokens = SharedTile<HALF_BLOCK, HALF_PANEL, true>;
  static constexpr int CHANNELS = HALF_PANEL / 2;  // of a panel

  const uint8_t *k, *v;
  int start;

  __device__ static const Tokens& panel(const uint8_t* of, int channel) { return reinterpret_cast<const Tokens*>(of)[channel / CHANNELS]; }
};

// l: sums over pages; behind them, the thread's part of all sums.
template <int DIM, int GROUPS>
struct PagedRows : RunningSums<DIM / WGMMA_ROWS, GROUPS> {
  static constexpr int TILES = DIM / WGMMA_ROWS;
  using Sums = RunningSums<TILES, GROUPS>;
  using typename Sums::OfMine;
  using Sums::for_queries, Sums::l, Sums::m, Sums::merge, Sums::o;

  // Turns scores of a page, divided by `factor`, into P, in shared memory when all decoders have returned. P is
  // relative to the largest score of the page: PageSoftmax has the same codes. Sets the factors of the sums so far and
  // of those of the page. `hidden`: queries that don't see the page.
  template <bool INT8, int ROWS>
  __device__ void softmax_of_page(Products<KEYS / WGMMA_ROWS, GROUPS>& s, const OfMine& factor, const bool (&hidden)[GROUPS][2], WarpExchange<ROWS>& exchange,
                                  OfMine& alpha, OfMine& beta, Fragment f) {
    using Scores = PageScores<INT8, DIM>;
    OfMine largest, of_page;
    const auto for_scores = [&](int group, int r, auto&& of) {
#pragma unroll
      for (auto& scores : s)
#pragma unroll
        for (int i = r; i < 4; i += 2) of(scores[4 * group + i]);
    };
    bool in_range = true;  // the same in all threads that have these queries
    for_queries([&](int group, int r) {
      in_range &= Scores::in_range(factor[group][r]);
      for_scores(group, r, [&](float& score) { score = hidden[group][r] ? -INFINITE : score; });
    });
    if (!in_range) for_queries([&](int group, int r) { for_scores(group, r, [&](float& score) { score = Scores::multiply(score, factor[group][r]); }); });
    for_queries([&](int group, int r) {
      of_page[group][r] = -INFINITE;
      for_scores(group, r, [&](float score) { of_page[group][r] = fmaxf(of_page[group][r], score); });
    });
    exchange.largest(of_page, f);
    for_queries([&](int group, int r) { largest[group][r] = in_range ? Scores::multiply(of_page[group][r], factor[group][r]) : of_page[group][r]; });
    const auto row_of = [&](int group, int r) {
      return in_range ? Scores::row(of_page[group][r], largest[group][r], factor[group][r]) : DirectRow(1.0f, 0.0f);
    };
    if (!in_range) for_queries([&](int group, int r) { for_scores(group, r, [&](float& score) { score -= finite_or_zero(largest[group][r]); }); });
    // A lane and the one of the next row of keys exchange what they have of one of their queries. V has the four keys
    // of a query that they have in this order: layout.key_of_slot.
    const int odd = f.row % 2, selector = odd ? 0x3715 : 0x6240;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      const DirectRow first = row_of(group, 0), second = row_of(group, 1);
#pragma unroll
      for (int t = 0; t < KEYS / WGMMA_ROWS; ++t) {
        const float* of = s[t] + 4 * group;
        const uint32_t mine = direct_codes(first(of[0]), second(of[1]), first(of[2]), second(of[3])), other = __shfl_xor_sync(~0u, mine, 4);
        const int slot = WGMMA_ROWS * t + f.row / 16 * 16 + f.row % 16 / 2 * 4;
        *reinterpret_cast<uint32_t*>(exchange.p + ptx::swizzled<KEYS>(QUERY_GROUP * group + f.column + odd, slot)) = __byte_perm(mine, other, selector);
      }
    }
    ptx::fence_proxy_async();
    merge(largest, alpha, beta);
    for_queries([&](int group, int r) { beta[group][r] *= 1.0f / (1 << int(P_OFFSET)); });
  }

  // Scores of a page, divided by `factor`, become tanh of what they are over the soft cap, and the factors the cap's.
  // `mean_score`: what K's mean adds to those of the tile's rows.
  template <bool INT8>
  __device__ static void cap(Products<KEYS / WGMMA_ROWS, GROUPS>& s, OfMine& factor, const float* mean_score, float softcap, Fragment f) {
    const float inverse = 1.0f / softcap;
    for_queries([&](int group, int r) {
      const float scale = factor[group][r] * (inverse / LOG2E), offset = mean_score[QUERY_GROUP * group + f.column + r] / LOG2E * inverse;
#pragma unroll
      for (auto& scores : s)
#pragma unroll
        for (int i = 4 * group + r; i < 4 * group + 4; i += 2) scores[i] = ptx::tanh_approx(fmaf(PageScores<INT8, DIM>::multiply(scores[i], 1.0f), scale, offset));
      factor[group][r] = softcap * LOG2E;
    });
  }

  // Scores of keys before `first_keys`, in the page that begins with key `start`, become -inf.
  __device__ static void hide_keys_before(Products<KEYS / WGMMA_ROWS, GROUPS>& s, const int (&first_keys)[GROUPS][2], int start, Fragment f) {
    for_queries([&](int group, int r) {
#pragma unroll
      for (int t = 0; t < KEYS / WGMMA_ROWS; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (start + WGMMA_ROWS * t + f.row + 8 * h < first_keys[group][r]) s[t][4 * group + 2 * h + r] = -INFINITE;
    });
  }

  // Adds a sink to the sums of each query that sees one, a score in base 2.
  __device__ void add_sinks(const OfMine& sinks, Fragment f) {
    OfMine alpha, beta;
    merge(sinks, alpha, beta);
    for_queries([&](int group, int r) { l[group][r] = fmaf(l[group][r], alpha[group][r], f.row == 0 ? beta[group][r] : 0.0f); });
#pragma unroll
    for (auto& of : o)
#pragma unroll
      for (int i = 0; i < 4 * GROUPS; ++i) of[i] *= alpha[i / 4][i % 2];
  }

  // O = O alpha + Vᵀ·Pᵀ beta v_scale, l = l alpha + sums of P times beta. `values`, `p`: descriptors of a page of Vᵀ
  // and of P.
  __device__ void add_values(uint64_t values, uint64_t p, const OfMine& alpha, const OfMine& beta, float v_scale) {
    using Product = ptx::Wgmma<QUERY_GROUP * GROUPS>;
    constexpr uint32_t ones[4] = {FOUR_ONES, FOUR_ONES, FOUR_ONES, FOUR_ONES};
    Products<TILES, GROUPS> fresh;
    float sum[4 * GROUPS];
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < KEYS / 32; ++step) {
      const uint64_t of_keys = ptx::operand_of(p, step, 32);
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        const uint64_t v = ptx::operand_of(ptx::operand_of(values, WGMMA_ROWS * t, KEYS), step, 32);
        if (step == 0)
          Product::template run<false>(fresh[t], v, of_keys);
        else
          Product::template run<true>(fresh[t], v, of_keys);
      }
      if (step == 0)
        Product::template run<false>(sum, ones, of_keys);
      else
        Product::template run<true>(sum, ones, of_keys);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(sum);
    OfMine of_values;
    for_queries([&](int group, int r) {
      l[group][r] = fmaf(l[group][r], alpha[group][r], sum[4 * group + r] * beta[group][r]);
      of_values[group][r] = beta[group][r] * v_scale;
    });
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      ptx::wgmma_touch(fresh[t]);
#pragma unroll
      for (int i = 0; i < 4 * GROUPS; ++i) o[t][i] = fmaf(fresh[t][i], of_values[i / 4][i % 2], o[t][i] * alpha[i / 4][i % 2]);
    }
  }

  // Makes sums over pages those of K and V as they were. `v_scale`, `v_mean`: of the head's channels. `mean_score`: of
  // the tile's rows; scores that are `capped` have it.
  __device__ void restore(const float* v_scale, const float* v_mean, const float* mean_score, bool capped, Fragment f) {
    compute_late(f.row), compute_late(f.column);
    if (!capped) for_queries([&](int group, int r) { m[group][r] += mean_score[QUERY_GROUP * group + f.column + r]; });
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int channel = WGMMA_ROWS * t + f.row + 8 * h;
        const float scale = v_scale[channel], mean = v_mean[channel];
        for_queries([&](int group, int r) {
          float& of = o[t][4 * group + 2 * h + r];
          of = fmaf(of, scale, l[group][r] * mean);
        });
      }
    if (f.row != 0) for_queries([&](int group, int r) { l[group][r] = 0.0f; });  // one lane has the sum from here on
  }

  // Attends to a block in half precision, of which a warp has 16 tokens. `queries`: of the first group;
  // `queries_of(group)`: of others. `positions`: of the tile's rows.
  template <typename T, bool ANY, int ROWS, typename QueriesOf>
  __device__ void attend_to_half_block(const HalfBlock& block, HalfQueries<T, DIM>& queries, QueriesOf&& queries_of, const int* positions, const PagedScores<ANY>& mod,
                                       WarpExchange<ROWS>& exchange, Fragment f) {
    using Tokens = HalfBlock::Tokens;
    using Probabilities = SharedTile<ROWS, KEYS, true>;
    Probabilities& probabilities = *reinterpret_cast<Probabilities*>(exchange.p);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, at = lane_of_rows<Tokens>(), at_transposed = lane_of_columns<Operands::native, Tokens>();
    compute_late(warp), compute_late(lane), compute_late(at), compute_late(at_transposed);
    float s[GROUPS][4] = {}, nan_of_k[4] = {}, nan_of_v[4] = {};
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      if (group > 0) queries = queries_of(group);
#pragma unroll
      for (int channel = 0; channel < DIM; channel += 16) {
        const int chunks = channel % HalfBlock::CHANNELS / 16;
        uint32_t a[4];
        load_rows<Operands::native>(a, block.panel(block.k, channel), at, 16 * warp, chunks);
        mma_halves<T>(s[group], a, queries.words[channel / 16][0], queries.words[channel / 16][1]);
        if (group > 0) continue;
        // a product with zeros is NaN for tokens that are not finite
        mma_halves<T>(nan_of_k, a, 0, 0);
        load_rows<Operands::native>(a, block.panel(block.v, channel), at, 16 * warp, chunks);
        mma_halves<T>(nan_of_v, a, 0, 0);
      }
    }
    OfMine largest, alpha, beta;
    for_queries([&](int group, int r) {
      const int position = positions[QUERY_GROUP * group + f.column + r];
      const bool sees = own_page(position) == block.start / KEYS;
      largest[group][r] = -INFINITE;
#pragma unroll
      for (int i = r; i < 4; i += 2) {
        float& score = s[group][i];
        score += nan_of_k[i] + nan_of_v[i];
        const int key = block.start + f.row + i / 2 * 8;
        bool sees_key = sees && key <= position;
        if constexpr (ANY) sees_key = sees_key && key >= mod.first_key(position);
        const float in_base_2 = score * mod.p.score_scale;
        score = !sees_key ? -INFINITE : mod.capped() ? mod.cap(in_base_2) : in_base_2;
        largest[group][r] = fmaxf(largest[group][r], score);
      }
    });
    exchange.largest(largest, f);
    merge(largest, alpha, beta);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      float sum[2] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[group][i] = ptx::exp2_approx(s[group][i] - finite_or_zero(m[group][i % 2]));
        sum[i % 2] += s[group][i];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        l[group][i] = fmaf(l[group][i], alpha[group][i], sum[i]);
        // transposed, token g's queries 2c and 2c + 1 are query g's tokens 2c and 2c + 1
        const uint32_t two = ptx::transposed(word_of<T>(s[group][2 * i], s[group][2 * i + 1]));
        *reinterpret_cast<uint32_t*>(probabilities.at(QUERY_GROUP * group + lane / 4, 2 * warp + i) + lane % 4 * 4) = two;
      }
    }
    ptx::warpgroup_sync(1);
    uint32_t p[GROUPS][HALF_BLOCK / 16][2];
#pragma unroll
    for (int group = 0; group < GROUPS; ++group)
#pragma unroll
      for (int step = 0; step < HALF_BLOCK / 16; step += 2) ptx::ldmatrix(p[group][step], probabilities.at(QUERY_GROUP * group + lane % 8, 2 * step + lane / 8));
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
      for (int i = 0; i < 4 * GROUPS; ++i) o[t][i] *= alpha[i / 4][i % 2];
#pragma unroll
      for (int step = 0; step < HALF_BLOCK / 16; ++step) {
        uint32_t a[4];
        ptx::ldmatrix_transposed(a, block.panel(block.v, WGMMA_ROWS * t).beyond(at_transposed, 16 * step, 2 * warp));
        clamp<T>(a);  // queries that don't see a token multiply it by zero
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
          mma_halves<T>(reinterpret_cast<float(&)[4]>(o[t][4 * group]), a, p[group][step][0], p[group][step][1]);
      }
    }
  }

 private:
  static_assert(HalfBlock::CHANNELS == WGMMA_ROWS);
};

}  // namespace fp8attn
