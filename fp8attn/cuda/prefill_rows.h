// Running sums of a consumer warpgroup's 64 rows, and what pages and blocks in half precision add to them.
#pragma once

#include "prefill_storage.h"
#include "ptx/uniform.h"
#include "tile/page_softmax.h"
#include "tile/products.h"
#include "tile/quantize.h"
#include "tile/score_mod.h"

namespace fp8attn {

// Issues Q·Kᵀ of a page. `q`, `k`: descriptors of the first panels.
template <PrefillConfig C>
__device__ void issue_page_scores(typename PrefillShape<C>::Score (&s)[KEYS / 2], uint64_t q, uint64_t k) {
  using S = PrefillShape<C>;
  using Product = std::conditional_t<C.int8, ptx::WgmmaInt8<KEYS>, ptx::Wgmma<KEYS>>;
  constexpr int steps = S::panel / 32;
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < C.head_dim / 32; ++i) {
    const uint64_t a = ptx::operand_of(ptx::operand_of(q, i / steps, ROWS * S::panel), i % steps, 32);
    const uint64_t b = ptx::operand_of(ptx::operand_of(k, i / steps, KEYS * S::panel), i % steps, 32);
    if (i == 0)
      Product::template run<false>(s, a, b);
    else
      Product::template run<true>(s, a, b);
  }
  ptx::wgmma_commit();
}

// int8's scores of a page as PageScores, or, to be capped, as numbers. `k`: the page's keys, which are read if one is
// not finite.
template <PrefillConfig C>
__device__ void float_scores(const typename PrefillShape<C>::Score (&sums)[KEYS / 2], float (&s)[KEYS / 2], const uint8_t* k, bool has_nonfinite_key, Fragment f) {
#pragma unroll
  for (int i = 0; i < KEYS / 2; ++i) s[i] = PageScores<C.int8 && !C.capped, C.head_dim>::of(sums[i]);
  if (!has_nonfinite_key) return;
#pragma unroll
  for (int i = 0; i < KEYS / 2; ++i)
    if (k[ptx::swizzled<PrefillShape<C>::panel>(i / 4 * 8 + f.column + i % 2, 0)] == INT8_NAN) s[i] = NAN;
}

// Under a soft cap, scores are tanh of what they were over the cap, and factors are the cap's.
template <PrefillConfig C>
struct PrefillRows {
  using S = PrefillShape<C>;
  static constexpr int N = S::part / 2;

  PageSoftmax<C.int8 && !C.capped, C.head_dim> softmax;
  float o[S::parts][N] = {};  // two-level accumulation: sums of P·V of all blocks

  __device__ void rescale(const float (&alpha)[2]) {
#pragma unroll
    for (auto& part : o)
#pragma unroll
      for (int i = 0; i < N; ++i) part[i] *= alpha[i / 2 % 2];
  }

  template <int M>
  __device__ void add(int part, const float (&fresh)[M], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) o[part][i] = fmaf(fresh[i], factor[i / 2 % 2], o[part][i]);
  }

  // Adds P·V of a page and sums of P. `v`: descriptor of its first channels, behind all of which there are ones.
  // `beta`: by row. `read_v_scale`: the page's, read as late as possible: registers are scarce until P isn't needed any
  // more.
  template <typename Read>
  __device__ void add_page(const uint32_t (&p)[KEYS / 32][4], uint64_t v, const float (&beta)[2], Read&& read_v_scale) {
    float of_values[2];
    const auto find_factors = [&] {
      const float v_scale = read_v_scale();
      of_values[0] = beta[0] * v_scale, of_values[1] = beta[1] * v_scale;
    };
    const auto add_part = [&]<int PART>(std::integral_constant<int, PART>, auto& fresh) {
      if constexpr (PART == 0) find_factors();
      add(PART, fresh, of_values);
      if constexpr (PART == S::parts - 1) {
#pragma unroll
        for (int r = 0; r < 2; ++r) softmax.l[r] = fmaf(fresh[N + 2 * r], beta[r], softmax.l[r]);
      }
    };
    if constexpr (S::parts > 1) {
      static_assert(S::part == VALUE_PART);
      add_in_parts<S::dim + ONES>(p, v, add_part);
    } else {
      float fresh[N + ONES / 2];
      issue_pv<S::part + ONES>(fresh, p, v);
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(fresh);
      add_part(std::integral_constant<int, 0>(), fresh);
    }
  }

  // Makes sums over pages those of K and V as they were: with V's scales per channel, and the means. Rows that see no
  // page keep theirs: the scales and means are of tokens behind them.
  template <typename Range>
  __device__ void end_pages(const TileScales<C.head_dim>& scales, const float (&mean_score)[ROWS], const Range& range, Fragment f) {
    const bool sees[2] = {range.row_end(f.row) > 0, range.row_end(f.row + 8) > 0};
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (sees[r]) softmax.end_pages(r, C.capped ? 0.0f : mean_score[f.row + 8 * r]);
    of_channels(f, [&](int channel, int r, float (&of)[2]) {
      const float2 scale = reinterpret_cast<const float2&>(scales.channel_scale[channel]), mean = reinterpret_cast<const float2&>(scales.channel_mean[channel]);
      if (sees[r]) of[0] = fmaf(of[0], scale.x, softmax.l[r] * mean.x), of[1] = fmaf(of[1], scale.y, softmax.l[r] * mean.y);
    });
  }

  // The opposite, for sums over blocks in half precision to which those over pages are added.
  template <typename Range, int M>
  __device__ void begin_pages(const TileScales<C.head_dim>& scales, const float (&inverse_scale)[M], const float (&mean_score)[ROWS], const Range& range, Fragment f) {
    const bool sees[2] = {range.row_end(f.row) > 0, range.row_end(f.row + 8) > 0};
    of_channels(f, [&](int channel, int r, float (&of)[2]) {
      const float2 inverse = reinterpret_cast<const float2&>(inverse_scale[channel]), mean = reinterpret_cast<const float2&>(scales.channel_mean[channel]);
      if (sees[r]) of[0] = fmaf(-softmax.l[r], mean.x, of[0]) * inverse.x, of[1] = fmaf(-softmax.l[r], mean.y, of[1]) * inverse.y;
    });
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (sees[r]) softmax.begin_pages(r, C.capped ? 0.0f : mean_score[f.row + 8 * r]);
  }

 private:
  // Calls of(channel, row of the thread, its sums of this channel and the next) for all that the thread has.
  template <typename Of>
  __device__ void of_channels(Fragment f, Of&& of) {
#pragma unroll
    for (int part = 0; part < S::parts; ++part)
#pragma unroll
      for (int i = 0; i < N; i += 2) of(part * S::part + i / 4 * 8 + f.column, i / 2 % 2, reinterpret_cast<float (&)[2]>(o[part][i]));
  }
};

// The operand of P·V of 16 tokens of a block in half precision, from P of 64.
template <typename T>
__device__ void half_operand(uint32_t (&a)[4], const float* p) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, __half>) {
      a[i] = ptx::half2(p[2 * i], p[2 * i + 1]);
    } else {
      const __nv_bfloat162 two = __floats2bfloat162_rn(p[2 * i], p[2 * i + 1]);
      a[i] = reinterpret_cast<const uint32_t&>(two);
    }
  }
}

// Issues Q·Kᵀ of a block in half precision. `k`: descriptor of its first panel.
template <PrefillConfig C, typename T>
__device__ void issue_half_scores(float (&s)[HALF_BLOCK / 2], PrefillStorage<C>& shared, int consumer, uint64_t k) {
  using Product = ptx::WgmmaHalf<T, HALF_BLOCK>;
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < C.head_dim / 16; ++i) {
    const int panel = i / 4, step = i % 4;
    const uint64_t q = ptx::uniform(ptx::wgmma_descriptor<HALF_ROW>(ptx::shared_address(shared.half_queries(consumer, panel))));
    const uint64_t a = ptx::operand_of(q, step, 32), b = ptx::operand_of(ptx::operand_of(k, panel, HALF_BLOCK * HALF_ROW), step, 32);
    if (i == 0)
      Product::template run<false>(s, a, b);
    else
      Product::template run<true>(s, a, b);
  }
  ptx::wgmma_commit();
}

// Scores of tokens that a row doesn't see become -inf, the others those in base 2. Tokens that aren't finite have NaN.
template <PrefillConfig C>
__device__ void see_own_page(const PrefillParams& params, float (&s)[HALF_BLOCK / 2], const typename PrefillShape<C>::Range& range, int block, Fragment f) {
  const Params& p = params.call;
  const int left = params.left;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = f.row + 8 * r;
    const int before = block * HALF_BLOCK + f.column, position = range.is_token(row) ? range.position(row) : -1;
    const int last = position - before, first = max(position / KEYS * KEYS, position - left) - before;
#pragma unroll
    for (int j = 0; j < HALF_BLOCK / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = s[4 * j + 2 * r + i];
        const float seen = C.capped ? cap_score(score * p.score_scale, p.softcap, p.inverse_softcap) : score * p.score_scale;
        score = 8 * j + i >= first && 8 * j + i <= last ? seen : -INFINITE;
      }
  }
}

// Adds attention to a block in half precision, from its scores.
template <PrefillConfig C, typename T>
__device__ void add_half_block(PrefillRows<C>& rows, float (&s)[HALF_BLOCK / 2], uint64_t v) {
  using S = PrefillShape<C>;
  using Product = ptx::WgmmaHalf<T, S::part>;
  float alpha[2], beta[2];
  rows.softmax.step_of_halves(s, alpha, beta);
  rows.rescale(alpha);
  uint32_t p[HALF_BLOCK / 16][4];
#pragma unroll
  for (int step = 0; step < HALF_BLOCK / 16; ++step) half_operand<T>(p[step], s + 8 * step);
#pragma unroll
  for (int part = 0; part < S::parts; ++part) {
    float fresh[S::part / 2];
    const uint64_t channels = ptx::operand_of(v, part * S::part / HALF_CHANNELS, HALF_BLOCK * HALF_ROW);
    ptx::wgmma_fence();
    Product::template run_transposed<false>(fresh, p[0], channels);
#pragma unroll
    for (int step = 1; step < HALF_BLOCK / 16; ++step) Product::template run_transposed<true>(fresh, p[step], ptx::operand_of(channels, step, 16 * HALF_ROW));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(fresh);
    rows.add(part, fresh, beta);
  }
}

// Stores what a split has of a row: as the largest score the LSE in base 2, and as the sum of 2^(score - largest) 1; 0
// if the row sees no keys, or NaN.
__device__ inline void store_sums(const Params& p, int split, int row, int batches, float lse) {
  const int64_t rows = int64_t(batches) * p.q_heads * p.q_length;
  float* to = p.part_rows + 2 * split * rows + row;
  to[0] = lse == lse ? lse : 0.0f;
  to[rows] = lse == lse ? float(lse != -INFINITE) : NAN;
}

// Normalises and stores the output of rows, and their LSE, or what a split has of them.
template <PrefillConfig C>
__device__ void store_rows(const PrefillParams& params, PrefillStorage<C>& shared, const typename PrefillShape<C>::Range& range, int consumer, const PrefillRows<C>& rows, Fragment f) {
  using S = PrefillShape<C>;
  const Params& p = params.call;
  const auto& tile = range.tile;
  const Restored<C.head_dim> scales;
  float l[2] = {rows.softmax.l[0], rows.softmax.l[1]}, limit[2] = {rows.softmax.limit[0], rows.softmax.limit[1]};
  const auto row_end = [&] {
    if constexpr (C.packed)
      return tile.end;
    else
      return p.q_length;
  };
  const int warp = threadIdx.x % 128 / 32, head = ptx::uniform(range.head_of(warp * OUTPUT_ROWS));  // of all rows of the warp
  if (head >= tile.heads_end) return;
  const int first_row = tensor_row(tile) + ptx::uniform(range.query(warp * OUTPUT_ROWS));
  const int batch = tensor_batch(tile), batches = C.packed ? 1 : p.batches;
  const Tile place = {tile.split * batches + batch, head, tile.kv_head, first_row};
  StagedOutput<Restored<C.head_dim>, S::output_boxes, true, C.packed> output(p, place, first_row, row_end, scales, shared.output[consumer], l);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (p.sinks == nullptr || !tile.is_last || !range.is_token(f.row + 8 * r)) continue;
    output.set_weight(r, SinkRow::add<0>(limit[r], l[r], p.sinks[head]).weight);
  }
  [&]<int... PART_OF>(std::integer_sequence<int, PART_OF...>) {
    (output.template store<PART_OF * S::part, S::part>(rows.o[PART_OF]), ...);
  }(std::make_integer_sequence<int, S::parts>());
  if (f.column != 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + f.row % OUTPUT_ROWS + 8 * r;
    if (row >= row_end()) continue;
    const float lse = l[r] == 0.0f ? -INFINITE : limit[r] + log2f(l[r]);  // in base 2
    if (p.part_rows == nullptr)
      p.lse[(int64_t(batch) * p.q_heads + head) * p.q_length + row] = lse / LOG2E;
    else
      store_sums(p, tile.split, C.packed ? row * p.q_heads + head : (batch * p.q_heads + head) * p.q_length + row, batches, lse);
  }
}

}  // namespace fp8attn
