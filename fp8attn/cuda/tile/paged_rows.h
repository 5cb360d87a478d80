// Running sums of a thread's two rows of a tile of the decode kernel, and what a block of keys adds to them.
#pragma once

#include "../ptx/ldmatrix.h"
#include "attend.h"
#include "paged_queries.h"
#include "rotate.h"

namespace fp8attn {

__device__ inline float finite_or_zero(float m) { return m == -INFINITE ? 0.0f : m; }

// The largest of what a row's four threads have.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The tokens of a block in half precision that a row attends to: from `begin` to `position`.
struct VisibleTokens {
  int begin, position;
};

template <int DIM>
struct PagedRows {
  // m: maximum of the scores so far, in base 2. l: the thread's part of the sums of 2^(score - m). o: output times l.
  float m[2] = {-INFINITE, -INFINITE}, l[2] = {}, o[DIM / 2] = {};

  // The factors of the sums so far and of those of a block whose largest scores are `largest`. Updates m.
  __device__ void merge(const float (&largest)[2], float (&mine)[2], float (&theirs)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float m_new = fmaxf(m[r], largest[r]);
      mine[r] = ptx::exp2_approx(m[r] - finite_or_zero(m_new)), theirs[r] = ptx::exp2_approx(largest[r] - finite_or_zero(m_new));
      m[r] = m_new;
    }
  }

  // Turns sums of products of codes with a page's keys into an operand of P·V. P is relative to the largest score of
  // the page. Sets the factors with which O and P·V are added. `factor`: of the sums. `hidden`: rows that don't see it.
  __device__ void softmax_of_page(float (&s)[KEYS / 2], const float (&factor)[2], const bool (&hidden)[2], float v_scale, uint32_t (&p)[KEYS / 32][4],
                                  float (&alpha)[2], float (&beta)[2]) {
    if (__any_sync(~0u, hidden[0] | hidden[1])) {
#pragma unroll
      for (int i = 0; i < KEYS / 2; ++i) s[i] = hidden[i / 2 % 2] ? -INFINITE : s[i];
    }
    float largest[2], sum[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = s[2 * r];
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) largest[r] = fmaxf(largest[r], fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      largest[r] = quad_max(largest[r]) * factor[r];
    }
    const float shift[2] = {P_OFFSET - finite_or_zero(largest[0]), P_OFFSET - finite_or_zero(largest[1])};
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) {
      s[i] = ptx::exp2_approx(fmaf(s[i], factor[i / 2 % 2], shift[i / 2 % 2]));
      sum[i / 2 % 2] += s[i];
    }
    // with the key order of quantized V, a thread's P of one row and 16 keys are the bytes of one register
#pragma unroll
    for (int t = 0; t < KEYS / 16; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) p[t / 2][t % 2 * 2 + r] = ptx::e4m3x4(s[8 * t + 2 * r], s[8 * t + 2 * r + 1], s[8 * t + 4 + 2 * r], s[8 * t + 5 + 2 * r]);
    }
    merge(largest, alpha, beta);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      beta[r] *= 1.0f / (1 << int(P_OFFSET));
      l[r] = fmaf(l[r], alpha[r], sum[r] * beta[r]);
      beta[r] *= v_scale;
    }
  }

  // Makes sums over pages those of K and V as they were. `v_scale`, `v_mean`: of the head's channels.
  __device__ void restore(const float* v_scale, const float* v_mean, const float (&mean_score)[2], Fragment f) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m[r] += mean_score[r];
      l[r] = quad_sum(l[r]);
    }
#pragma unroll
    for (int j = 0; j < DIM / 8; ++j) {
      const float2 scale = *reinterpret_cast<const float2*>(v_scale + 8 * j + f.column), mean = *reinterpret_cast<const float2*>(v_mean + 8 * j + f.column);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        o[4 * j + 2 * r] = fmaf(o[4 * j + 2 * r], scale.x, l[r] * mean.x);
        o[4 * j + 2 * r + 1] = fmaf(o[4 * j + 2 * r + 1], scale.y, l[r] * mean.y);
      }
    }
    if (f.column != 0) l[0] = l[1] = 0.0f;  // the sum is whole again, and one thread's
  }

  // Attends to a block in half precision, from token `start` on. `k`, `v`: panels of HALF_BLOCK rows of 128 bytes, with
  // TMA's swizzle. `nonfinite`: tokens that are not finite. Called by a whole warp.
  template <typename T>
  __device__ void attend_to_half_block(const uint8_t* k, const uint8_t* v, const uint8_t* nonfinite, int start, const HalfQueries<T>& queries,
                                       const VisibleTokens (&visible)[2], float score_scale, Fragment f) {
    constexpr int PANEL = 128, PANEL_CHANNELS = PANEL / 2;
    const int lane = threadIdx.x % 32;
    const auto row_at = [](const uint8_t* of, int token, int channel) {
      return of + channel / PANEL_CHANNELS * (HALF_BLOCK * PANEL) + ptx::swizzled<PANEL>(token, 2 * (channel % PANEL_CHANNELS));
    };
    float s[HALF_BLOCK / 2] = {};
#pragma unroll 1
    for (int channel = 0; channel < DIM; channel += 16) {
      uint32_t a[4], b[4];
      queries.load(a, channel);
#pragma unroll
      for (int token = 0; token < HALF_BLOCK; token += 16) {
        ptx::ldmatrix(b, row_at(k, token + lane / 16 * 8 + lane % 8, channel + lane / 8 % 2 * 8));
#pragma unroll
        for (int j = 0; j < 2; ++j) mma_halves<T>(reinterpret_cast<float(&)[4]>(s[token / 2 + 4 * j]), a, b[2 * j], b[2 * j + 1]);
      }
    }
    float largest[2] = {-INFINITE, -INFINITE}, alpha[2], beta[2], sum[2] = {};
#pragma unroll
    for (int i = 0; i < HALF_BLOCK / 2; ++i) {
      const int r = i / 2 % 2, token = i / 4 * 8 + f.column + i % 2, position = start + token;
      const bool shown = visible[r].begin <= position && position <= visible[r].position;
      s[i] = !shown ? -INFINITE : nonfinite[token] ? NAN : s[i] * score_scale;
      largest[r] = fmaxf(largest[r], s[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = quad_max(largest[r]);
    merge(largest, alpha, beta);
#pragma unroll
    for (int i = 0; i < HALF_BLOCK / 2; ++i) {
      s[i] = ptx::exp2_approx(s[i] - finite_or_zero(m[i / 2 % 2]));
      sum[i / 2 % 2] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) l[r] = fmaf(l[r], alpha[r], sum[r]);
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) o[i] *= alpha[i / 2 % 2];
#pragma unroll
    for (int token = 0; token < HALF_BLOCK; token += 16) {
      const float* of = s + token / 2;
      const uint32_t a[4] = {word_of<T>(of[0], of[1]), word_of<T>(of[2], of[3]), word_of<T>(of[4], of[5]), word_of<T>(of[6], of[7])};
#pragma unroll
      for (int channel = 0; channel < DIM; channel += 16) {
        uint32_t b[4];
        ptx::ldmatrix_transposed(b, row_at(v, token + lane / 8 % 2 * 8 + lane % 8, channel + lane / 16 * 8));
#pragma unroll
        for (int j = 0; j < 2; ++j) mma_halves<T>(reinterpret_cast<float(&)[4]>(o[channel / 2 + 4 * j]), a, b[2 * j], b[2 * j + 1]);
      }
    }
  }

 private:
  template <typename T>
  __device__ static uint32_t word_of(float a, float b) {
    if constexpr (std::is_same_v<T, __half>) {
      return ptx::half2(a, b);
    } else {
      const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
      return reinterpret_cast<const uint32_t&>(two);
    }
  }
};

}  // namespace fp8attn
