// Running sums of 64 rows of a tile that attends to the KV cache of another engine, and what a block of its tokens adds
// to them. A warpgroup has them. `fp8attn/paged_tensors.py` defines the arithmetic.
//
// Unlike in token_rows.h, products aren't transposed: queries are the rows of wgmma, so a warp has 16 queries with all
// of their scores, and P stays in registers. Lane 4g + c of warp w has rows 16w + g and 16w + g + 8 (h = 0, 1).
#pragma once

#include "../ptx/uniform.h"
#include "checked_tokens.h"

namespace fp8attn {

// T: of queries, and of tokens that aren't FP8.
template <typename T, int DIM, bool FP8, bool BY_TOKEN>
struct ManyRows {
  static constexpr int ROW_BYTES = FP8 ? DIM : 2 * DIM;
  static constexpr int PART = DIM < 128 ? DIM : 128;  // channels of a product
  static constexpr int OF_TOKENS = TOKENS / 8, OF_CHANNELS = DIM / 8;  // pairs that a lane has of a row
  static constexpr float OFFSET = FP8 ? P_OFFSET : 0.0f, UNIT = 1 << int(OFFSET);
  static constexpr float MOST = 64.0f;  // of how far, in base 2, a unit of sums may be below the largest one so far
  using Value = std::conditional_t<FP8, __half, T>;
  using Panels = TokenPanels<ROW_BYTES>;
  using Scores = float[OF_TOKENS][4];  // element 2h + r of i: row h, token 8i + 2c + r

  // Sums are relative to 2^m, o also to `scale`. Each block's own largest score is the next m, as P is relative to it.
  // Where that is far below `top`, the largest m so far, m is not.
  float m[2] = {-INFINITE, -INFINITE}, top[2] = {-INFINITE, -INFINITE}, l[2] = {};
  float scale[2] = {!BY_TOKEN, !BY_TOKEN}, above[2] = {1.0f, 1.0f};  // `above`: how far the largest unit of o so far is above this one
  float o[OF_CHANNELS][4] = {};  // like scores
  uint32_t p[TOKENS / 16][4] = {};  // P, which products read until they are waited for

  // Adds a sink, a score in base 2, before the first block.
  __device__ void add_sink(int h, float score, bool counts) {
    m[h] = top[h] = score;
    if (counts) l[h] += UNIT;
  }

  // Starts to multiply queries and keys. `q`: the first of the rows, in panels of MANY_ROWS rows.
  __device__ static void start(Scores& s, const uint8_t* k, const uint8_t* q) {
    constexpr int PANEL = Panels::PANEL;
    using Product = std::conditional_t<FP8, ptx::Wgmma<TOKENS>, ptx::WgmmaHalf<T, TOKENS>>;
    auto& scores = reinterpret_cast<float(&)[4 * OF_TOKENS]>(s);
    const auto descriptor = [](const uint8_t* x) { return ptx::uniform(ptx::wgmma_descriptor<PANEL>(ptx::shared_address(x))); };
    const auto operand = [](uint64_t first, int step, int rows) {
      return ptx::operand_of(ptx::operand_of(first, step / Panels::STEPS, rows * PANEL), step % Panels::STEPS, 32);
    };
    const uint64_t keys = descriptor(k), queries = descriptor(q);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < ROW_BYTES / 32; ++step) {
      const uint64_t of_q = operand(queries, step, MANY_ROWS), of_k = operand(keys, step, TOKENS);
      if (step == 0)
        Product::template run<false>(scores, of_q, of_k);
      else
        Product::template run<true>(scores, of_q, of_k);
    }
    ptx::wgmma_commit();
  }

  // Waits for scores, and not for LATER products.
  template <int LATER>
  __device__ static void wait_scores(Scores& s) {
    ptx::wgmma_wait<LATER>();
    ptx::wgmma_touch(reinterpret_cast<float(&)[4 * OF_TOKENS]>(s));
  }

  // Calls f(score, token) for what a lane has of row h; tokens are counted from its first one.
  template <typename F>
  __device__ static void for_row(Scores& s, int h, F&& f) {
#pragma unroll
    for (int i = 0; i < OF_TOKENS; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) f(s[i][2 * h + r], 8 * i + r);
  }

  // Makes scores those in base 2 if tokens have scales. `factor`: of the rows.
  __device__ static void scale_by_token(Scores& s, const float (&factor)[2], const float* k_scale, Fragment f) {
#pragma unroll
    for (int h = 0; h < 2; ++h) for_row(s, h, [&](float& x, int token) { x *= score_factor(factor[h] * k_scale[token + f.column], false); });
  }

  // Hides tokens from rows that don't see them. `seen`: the first and the last token of each row.
  __device__ static void hide(Scores& s, const int2* seen, int first, Fragment f) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int2 of_row = seen[f.row + 8 * h];
      const int begin = of_row.x - first - f.column, last = of_row.y - first - f.column;
      for_row(s, h, [&](float& x, int token) { x = token < begin || token > last ? -INFINITE : x; });
    }
  }

  // Makes scores those in base 2, whatever they are of. `factor`: of the rows. `is_nan(token)`: whether a token isn't
  // finite, or isn't there. `seen`: as above.
  template <typename IsNan>
  __device__ static void finish_scores(Scores& s, const float (&factor)[2], const float* k_scale, IsNan&& is_nan, const int2* seen, int first, float softcap, Fragment f) {
    if constexpr (BY_TOKEN) scale_by_token(s, factor, k_scale, f);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int2 of_row = seen[f.row + 8 * h];
#pragma unroll
      for (int i = 0; i < OF_TOKENS; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int token = 8 * i + f.column + r;
          float& score = s[i][2 * h + r];
          float x = BY_TOKEN ? score : score * factor[h];
          if (softcap > 0.0f) x = capped(x, softcap);
          if (is_nan(token)) x = NAN;
          score = first + token < of_row.x || first + token > of_row.y ? -INFINITE : x;
        }
    }
  }

  // Turns a block's scores, which `factor` makes those in base 2, into P before it is rounded, and adds it to l. Values
  // of the block before may still be multiplied. `v_scale`: of tokens, if each has its own. `kept`: what sums are
  // multiplied by.
  __device__ void weigh(Scores& s, const float (&factor)[2], const float* v_scale, Fragment f, float (&kept)[2]) {
    float largest[2], base[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float of_parity[2] = {-INFINITE, -INFINITE};  // two chains are shorter than one
      for_row(s, h, [&](float& x, int token) { of_parity[token % 2] = fmaxf(of_parity[token % 2], x); });
      largest[h] = fmaxf(of_parity[0], of_parity[1]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float next = fmaxf(of_quad(largest[h], [](float a, float b) { return fmaxf(a, b); }) * factor[h], top[h] - MOST);
      base[h] = finite_or_zero(next), kept[h] = ptx::exp2_approx(m[h] - base[h]);
      m[h] = next, top[h] = fmaxf(top[h], next);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = 0.0f;
      for_row(s, h, [&](float& x, int) { x = ptx::exp2_approx(fmaf(x, factor[h], OFFSET - base[h])), sum += x; });
      l[h] = fmaf(l[h], kept[h], sum);
    }
    if constexpr (BY_TOKEN) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float most = 0.0f;
        for_row(s, h, [&](float& x, int token) {
          const float of_token = v_scale[token + f.column];
          x *= fabsf(of_token) <= -NOTHING ? of_token : 0.0f, most = fmaxf(most, fabsf(x));
        });
        most = of_quad(most, [](float a, float b) { return fmaxf(a, b); });
        // not so small that sums relative to it would be too large
        const float before = kept[h] * scale[h], next = fmaxf(scale_of(most, UNIT), before * above[h] * 0x1p-64f), inverse = __frcp_rn(next);
        for_row(s, h, [&](float& x, int) { x *= inverse; });
        kept[h] = before * inverse, above[h] = fmaxf(above[h] * kept[h], 1.0f), scale[h] = next;
      }
    }
  }

  // Rounds P, when no products are under way. Scores are free then.
  __device__ void take(const Scores& s) {
#pragma unroll
    for (int i = 0; i < OF_TOKENS; ++i) TokenRows<T, DIM, FP8, 1>::pack(s[i], p[i / 2] + i % 2 * 2);
  }

  // Multiplies the output, when no products with values are under way.
  __device__ void keep(const float (&kept)[2]) {
#pragma unroll
    for (auto& of : o)
#pragma unroll
      for (int i = 0; i < 4; ++i) of[i] *= kept[i / 2];
  }

  // Starts o += P · V. `values`: V in half precision.
  __device__ void multiply(const uint8_t* values) {
    using Product = ptx::WgmmaHalf<Value, PART>;
    const uint64_t v = ptx::uniform(ptx::wgmma_descriptor_transposed(ptx::shared_address(values), TOKENS * HALF_PANEL));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < TOKENS / 16; ++step)
#pragma unroll
      for (int channel = 0; channel < DIM; channel += PART)
        Product::template run_transposed<true>(reinterpret_cast<float(&)[PART / 2]>(o[channel / 8]), p[step],
                                               ptx::operand_of(ptx::operand_of(v, channel / HalfBlock::CHANNELS, TOKENS * HALF_PANEL), step, 16 * HALF_PANEL));
    ptx::wgmma_commit();
  }

  // Waits for all products.
  __device__ void finish_products() {
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(reinterpret_cast<float(&)[4 * OF_CHANNELS]>(o));
    ptx::wgmma_touch(reinterpret_cast<int32_t(&)[TOKENS / 4]>(p));
  }

  // Makes sums those of P and V as they are, and adds up l. Called behind the last block.
  __device__ void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      l[h] = of_quad(l[h], [](float a, float b) { return a + b; }) / UNIT;
      scale[h] /= UNIT;
    }
#pragma unroll
    for (auto& of : o)
#pragma unroll
      for (int i = 0; i < 4; ++i) of[i] *= scale[i / 2];
  }

  // What a thread of a warpgroup hands to the same thread of another one, whose rows are the same: sums, and then
  // their output in passes of PASS elements.
  static constexpr int PASS = 32, PASSES = 4 * OF_CHANNELS / PASS;

  // Adds another warpgroup's `theirs`, (m, l) of both rows. Returns the factors of this one's output and of theirs.
  __device__ float4 merge(float4 theirs) {
    const float m_of[2] = {theirs.x, theirs.z}, l_of[2] = {theirs.y, theirs.w};
    float of_mine[2], of_theirs[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float both = fmaxf(m[h], m_of[h]), base = finite_or_zero(both);
      of_mine[h] = ptx::exp2_approx(m[h] - base), of_theirs[h] = ptx::exp2_approx(m_of[h] - base);
      m[h] = both, l[h] = fmaf(l[h], of_mine[h], l_of[h] * of_theirs[h]);
    }
    return {of_mine[0], of_theirs[0], of_mine[1], of_theirs[1]};
  }

 private:
  template <typename F>
  __device__ static float of_quad(float x, F&& op) {
    x = op(x, __shfl_xor_sync(~0u, x, 1));
    return op(x, __shfl_xor_sync(~0u, x, 2));
  }
};

}  // namespace fp8attn
