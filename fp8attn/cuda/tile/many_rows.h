// Running sums of 64 rows of a tile that attends to the KV cache of another engine, and what a block of its tokens adds
// to them. A warpgroup has them. `fp8attn/paged_tensors.py` defines the arithmetic.
//
// Unlike in token_rows.h, products aren't transposed: queries are the rows of wgmma, so a warp has 16 queries with all
// of their scores, and P stays in registers. Lane 4g + c of warp w has rows 16w + g and 16w + g + 8 (h = 0, 1). Tensor
// cores take e4m3 values with a channel's tokens in a row only, which a cache doesn't have. So they are converted to
// halves in shared memory.
#pragma once

#include "../ptx/uniform.h"
#include "token_rows.h"

namespace fp8attn {

static_assert(MANY_ROWS == WGMMA_ROWS);
constexpr int MANY_PANEL = 128, MANY_CHANNELS = 64;  // bytes and channels of a token in a panel of values in half precision

// What is shared of a block. Blocks take turns, so that one barrier for each suffices. CONVERTED: bytes of V's halves.
template <int CONVERTED>
struct alignas(1024) ManyExchange {
  uint8_t v[2][CONVERTED];
  uint8_t zeros[128];
  uint8_t nonfinite[2][DECODER_WARPS];  // whether a warp's tokens have elements that are not finite
  uint8_t of_token[2][TOKENS];          // which ones, if a warp has some
};

// T: of queries, and of tokens that aren't FP8.
template <typename T, int DIM, bool FP8, bool BY_TOKEN>
struct ManyRows {
  static constexpr int ROW_BYTES = FP8 ? DIM : 2 * DIM, PANELS = DIM / MANY_CHANNELS;
  static constexpr int PANEL_BYTES = TOKENS * MANY_PANEL, CONVERTED = FP8 ? PANELS * PANEL_BYTES : 16;
  static constexpr int OF_TOKENS = TOKENS / 8, OF_CHANNELS = DIM / 8;  // pairs that a lane has of a row
  static constexpr float OFFSET = FP8 ? P_OFFSET : 0.0f, UNIT = 1 << int(OFFSET);
  static constexpr float MOST = 64.0f;  // of how far, in base 2, a unit of sums may be below the largest one so far
  using Value = std::conditional_t<FP8, __half, T>;
  using Panels = TokenPanels<ROW_BYTES>;
  using Exchange = ManyExchange<CONVERTED>;
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

  // Starts to multiply queries and keys, and tokens and zeros, which is NaN for what is not finite.
  __device__ static void start(Scores& s, float (&nan)[4], const uint8_t* k, const uint8_t* v, const uint8_t* q, const Exchange& exchange) {
    constexpr int PANEL = Panels::PANEL;
    using OfKeys = std::conditional_t<FP8, ptx::Wgmma<TOKENS>, ptx::WgmmaHalf<T, TOKENS>>;
    using OfZeros = std::conditional_t<FP8, ptx::Wgmma<QUERY_GROUP>, ptx::WgmmaHalf<T, QUERY_GROUP>>;
    static_assert(MANY_ROWS == TOKENS);
    auto& scores = reinterpret_cast<float(&)[4 * OF_TOKENS]>(s);
    const auto descriptor = [](const uint8_t* x) { return ptx::uniform(ptx::wgmma_descriptor<PANEL>(ptx::shared_address(x))); };
    const auto operand = [](uint64_t first, int step) {
      return ptx::operand_of(ptx::operand_of(first, step / Panels::STEPS, TOKENS * PANEL), step % Panels::STEPS, 32);
    };
    const uint64_t keys = descriptor(k), values = descriptor(v), queries = descriptor(q);
    const uint64_t zeros = ptx::uniform(ptx::wgmma_descriptor_of_one(ptx::shared_address(exchange.zeros)));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < ROW_BYTES / 32; ++step) {
      const uint64_t of_q = operand(queries, step), of_k = operand(keys, step), of_v = operand(values, step);
      if (step == 0)
        OfKeys::template run<false>(scores, of_q, of_k), OfZeros::template run<false>(nan, of_v, zeros);
      else
        OfKeys::template run<true>(scores, of_q, of_k), OfZeros::template run<true>(nan, of_v, zeros);
      if constexpr (!FP8) OfZeros::template run<true>(nan, of_k, zeros);  // e4m3 keys show in scores: they are NaN, or finite
    }
    ptx::wgmma_commit();
  }

  // Converts a block's values. Called by all decoders; each thread has one token, and every second of its chunks.
  __device__ static void convert_values(const uint8_t* v, uint8_t* to) {
    constexpr int PANEL = Panels::PANEL, CHUNKS = DIM / 16;
    static_assert(DECODERS == 2 * TOKENS);
    const int token = threadIdx.x % TOKENS, first = threadIdx.x / TOKENS;
    // chunks of a row differ in bits that swizzling only inverts
    const int source = ptx::swizzled<PANEL>(token, 16 * first), target = ptx::swizzled<MANY_PANEL>(token, 32 * first);
#pragma unroll
    for (int i = 0; i < CHUNKS; i += 2) {
      const int byte = 16 * i, channel = byte % MANY_CHANNELS;
      uint4 low, high;
      spread_in_order(*reinterpret_cast<const uint4*>(v + byte / PANEL * TOKENS * PANEL + (source ^ byte % PANEL)), low, high);
      uint8_t* const panel = to + byte / MANY_CHANNELS * PANEL_BYTES;
      *reinterpret_cast<uint4*>(panel + (target ^ 2 * channel)) = low;
      *reinterpret_cast<uint4*>(panel + (target ^ (2 * channel + 16))) = high;
    }
    ptx::fence_proxy_async();
  }

  // Waits for all products, those of values of the block before, too.
  __device__ void wait(Scores& s, float (&nan)[4]) {
    finish_products();
    ptx::wgmma_touch(reinterpret_cast<float(&)[4 * OF_TOKENS]>(s));
    ptx::wgmma_touch(nan);
  }

  // Says which tokens are not finite, those of the lane where `nan` isn't 0. `turn`: of the block.
  __device__ static void share_nonfinite(const float (&nan)[4], Exchange& exchange, int turn, Fragment f) {
    const bool any = __any_sync(~0u, nan[0] != 0.0f || nan[2] != 0.0f);
    if (threadIdx.x % 32 == 0) exchange.nonfinite[turn][threadIdx.x / 32] = any;
    if (any && f.column == 0) exchange.of_token[turn][f.row] = nan[0] != 0.0f, exchange.of_token[turn][f.row + 8] = nan[2] != 0.0f;
  }

  __device__ static bool any_nonfinite(const Exchange& exchange, int turn) { return *reinterpret_cast<const uint32_t*>(exchange.nonfinite[turn]) != 0; }

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

  // Makes scores those in base 2, whatever they are of. `factor`: of the rows. `is_nan(token)`: whether a token isn't
  // finite, or isn't there. `seen`: the first and the last token of each row.
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

  // Attends to a block with its scores, which `factor` makes those in base 2, and starts to multiply P and V.
  // `values`: V in half precision. `v_scale`: of tokens, if each has its own.
  __device__ void attend(Scores& s, const float (&factor)[2], const uint8_t* values, const float* v_scale, Fragment f) {
    float kept[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = -INFINITE;
      for_row(s, h, [&](float& x, int) { largest = fmaxf(largest, x); });
      largest = of_quad(largest, [](float a, float b) { return fmaxf(a, b); }) * factor[h];
      const float next = fmaxf(largest, top[h] - MOST), base = finite_or_zero(next);
      kept[h] = ptx::exp2_approx(m[h] - base);
      m[h] = next, top[h] = fmaxf(top[h], next);
      float sum = 0.0f;
      for_row(s, h, [&](float& x, int) { x = ptx::exp2_approx(fmaf(x, factor[h], OFFSET - base)), sum += x; });
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
#pragma unroll
    for (auto& of : o)
#pragma unroll
      for (int i = 0; i < 4; ++i) of[i] *= kept[i / 2];
    multiply_values(s, values);
  }

  // Waits for all products.
  __device__ void finish_products() {
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(reinterpret_cast<float(&)[4 * OF_CHANNELS]>(o));
    ptx::wgmma_touch(reinterpret_cast<int32_t(&)[TOKENS / 4]>(p));
  }

  // Makes sums those of P and V as they are, and adds up l. Called behind the last block.
  __device__ void finish() {
    finish_products();
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

 private:
  template <typename F>
  __device__ static float of_quad(float x, F&& op) {
    x = op(x, __shfl_xor_sync(~0u, x, 1));
    return op(x, __shfl_xor_sync(~0u, x, 2));
  }

  // 16 e4m3 codes as halves.
  __device__ static void spread_in_order(const uint4& codes, uint4& low, uint4& high) {
    ptx::halves_of_e4m3(codes.x, low.x, low.y), ptx::halves_of_e4m3(codes.y, low.z, low.w);
    ptx::halves_of_e4m3(codes.z, high.x, high.y), ptx::halves_of_e4m3(codes.w, high.z, high.w);
  }

  // Starts o += P · V.
  __device__ void multiply_values(const Scores& s, const uint8_t* values) {
    const uint64_t v = ptx::uniform(ptx::wgmma_descriptor_transposed(ptx::shared_address(values), PANEL_BYTES));
#pragma unroll
    for (int i = 0; i < OF_TOKENS; ++i) TokenRows<T, DIM, FP8, 1>::pack(s[i], p[i / 2] + i % 2 * 2);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < TOKENS / 16; ++step)
      ptx::WgmmaHalf<Value, DIM>::template run_transposed<true>(reinterpret_cast<float(&)[4 * OF_CHANNELS]>(o), p[step], ptx::operand_of(v, step, 16 * MANY_PANEL));
    ptx::wgmma_commit();
  }
};

}  // namespace fp8attn
