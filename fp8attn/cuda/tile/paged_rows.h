// Running sums of eight rows of a tile of the decode kernel, of one warp, and what a block of keys adds to them.
//
// Products are transposed: keys or channels are the 16 rows of mma.sync, queries its eight columns. Lane 4g + c has
// queries 2c and 2c + 1 (r = 0, 1), and of each 16 keys or channels g and g + 8.
#pragma once

#include "../ptx/ldmatrix.h"
#include "../ptx/movmatrix.h"
#include "mask.h"
#include "paged_queries.h"
#include "products.h"
#include "rotate.h"
#include "shared_tile.h"
#include "softmax.h"

namespace fp8attn {

template <int DIM>
constexpr int KEY_PANEL = DIM < 128 ? DIM : 128;  // bytes of a row of a page's K in a panel, as TMA writes it
constexpr int HALF_PANEL = 128;                   // the same of tokens in half precision

__device__ inline float finite_or_zero(float m) { return m == -INFINITE ? 0.0f : m; }

// The largest of what the eight lanes with the same queries have.
__device__ inline float column_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 16));
}

__device__ inline float column_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 4);
  x += __shfl_xor_sync(~0u, x, 8);
  return x + __shfl_xor_sync(~0u, x, 16);
}

// The page of a query, which attends to it in half precision up to its own position.
__device__ inline int own_page(int position) { return max(position, 0) / KEYS; }

// d (16, 8) += a (16, 32) * b (32, 8). `a` are e4m3 codes, `b` are halves. sm_90 has no mma.sync of e4m3: ptxas would
// convert both operands, and would convert b again for each product.
__device__ inline void multiply_codes(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  uint32_t halves[2][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) ptx::halves_of_e4m3(a[i], halves[i / 2][i % 2], halves[i / 2][2 + i % 2]);
  ptx::mma_f16(d, halves[0], b);
  ptx::mma_f16(d, halves[1], b + 2);
}

// Scores of a page, divided by their factors, from K and Q in shared memory. `q`: eight rows.
template <int DIM, bool INT8>
__device__ void multiply_keys(std::conditional_t<INT8, int32_t, float> (&s)[KEYS / 16][4], const uint8_t* k, const uint8_t* q) {
  using Keys = SharedTile<KEYS, KEY_PANEL<DIM>, true>;
  const int lane = threadIdx.x % 32, at = lane_of_rows<Keys>();
#pragma unroll 1
  for (int channel = 0; channel < DIM; channel += 64) {
    const Keys& keys = reinterpret_cast<const Keys*>(k)[channel / KEY_PANEL<DIM>];
    uint32_t codes[4];
    ptx::ldmatrix(codes, q + lane % 8 * QUERY_PITCH<DIM> + channel + lane / 8 * 16);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t b[4] = {codes[2 * step], codes[2 * step + 1]};
      if constexpr (!INT8) {
        ptx::halves_of_e4m3(codes[2 * step + 1], b[2], b[3]);
        ptx::halves_of_e4m3(codes[2 * step], b[0], b[1]);
      }
#pragma unroll
      for (int t = 0; t < KEYS / 16; ++t) {
        uint32_t a[4];
        load_rows<Operands::native>(a, keys, at, 16 * t, channel % KEY_PANEL<DIM> / 32 + step);
        if constexpr (INT8)
          ptx::mma_s8(s[t], a, b);
        else
          multiply_codes(s[t], a, b);
      }
    }
  }
}

template <int DIM>
struct PagedRows {
  // m: maximum of the scores so far, in base 2. l: the lane's part of the sums of 2^(score - m). o: output times l.
  float m[2] = {-INFINITE, -INFINITE}, l[2] = {}, o[DIM / 16][4] = {};

  // The factors of the sums so far and of those of a block whose largest scores are `largest`. Updates m.
  __device__ void merge(const float (&largest)[2], float (&mine)[2], float (&theirs)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float m_new = fmaxf(m[r], largest[r]);
      mine[r] = ptx::exp2_approx(m[r] - finite_or_zero(m_new)), theirs[r] = ptx::exp2_approx(largest[r] - finite_or_zero(m_new));
      m[r] = m_new;
    }
  }

  // Turns scores of a page, divided by `factor`, into operands of P·V. P is relative to the largest score of the page.
  // Sets the factors with which O and P·V are added. `hidden`: rows that don't see the page.
  __device__ void softmax_of_page(float (&s)[KEYS / 16][4], const float (&factor)[2], const bool (&hidden)[2], float v_scale, uint32_t (&p)[KEYS / 32][4],
                                  float (&alpha)[2], float (&beta)[2]) {
    if (__any_sync(~0u, hidden[0] | hidden[1])) {
#pragma unroll
      for (auto& of : s)
#pragma unroll
        for (int i = 0; i < 4; ++i) of[i] = hidden[i % 2] ? -INFINITE : of[i];
    }
    float largest[2], sum[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = s[0][r];
#pragma unroll
      for (const auto& of : s) largest[r] = fmaxf(largest[r], fmaxf(of[r], of[2 + r]));
      largest[r] = column_max(largest[r]) * factor[r];
    }
    const float shift[2] = {P_OFFSET - finite_or_zero(largest[0]), P_OFFSET - finite_or_zero(largest[1])};
#pragma unroll
    for (int t = 0; t < KEYS / 16; ++t) {
      float (&of)[4] = s[t];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of[i] = ptx::exp2_approx(fmaf(of[i], factor[i % 2], shift[i % 2]));
        sum[i % 2] += of[i];
      }
      // Transposed, key g's queries 2c and 2c + 1 are query g's keys 2c and 2c + 1. V has the keys in this order.
      uint32_t low, high;
      ptx::halves_of_e4m3(ptx::e4m3x4(of[0], of[1], of[2], of[3]), low, high);
      p[t / 2][t % 2 * 2] = ptx::transposed(low), p[t / 2][t % 2 * 2 + 1] = ptx::transposed(high);
    }
    merge(largest, alpha, beta);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      beta[r] *= 1.0f / (1 << int(P_OFFSET));
      l[r] = fmaf(l[r], alpha[r], sum[r] * beta[r]);
      beta[r] *= v_scale;
    }
  }

  // O = O alpha + P·V beta. `v`: a page of Vᵀ in shared memory.
  __device__ void add_values(const uint8_t* v, const uint32_t (&p)[KEYS / 32][4], const float (&alpha)[2], const float (&beta)[2]) {
    using Values = SharedTile<DIM, KEYS, true>;
    constexpr int TILES = 4;  // at once: as many independent sums hide the latency of mma.sync
    const Values& values = *reinterpret_cast<const Values*>(v);
    const int at = lane_of_rows<Values>();
#pragma unroll
    for (int first = 0; first < DIM / 16; first += TILES) {
      float fresh[TILES][4] = {};
#pragma unroll
      for (int step = 0; step < KEYS / 32; ++step) {
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          uint32_t a[4];
          load_rows<Operands::native>(a, values, at, 16 * (first + t), step);
          multiply_codes(fresh[t], a, p[step]);
        }
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[first + t][i] = fmaf(fresh[t][i], beta[i % 2], o[first + t][i] * alpha[i % 2]);
    }
  }

  // Makes sums over pages those of K and V as they were. `v_scale`, `v_mean`: of the head's channels. `mean_score`: of
  // the lane's queries.
  __device__ void restore(const float* v_scale, const float* v_mean, const float* mean_score, Fragment f) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m[r] += mean_score[r];
      l[r] = column_sum(l[r]);
    }
#pragma unroll
    for (int t = 0; t < DIM / 16; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int channel = 16 * t + f.row + i / 2 * 8;
        o[t][i] = fmaf(o[t][i], v_scale[channel], l[i % 2] * v_mean[channel]);
      }
    if (f.row != 0) l[0] = l[1] = 0.0f;  // the sum is whole again, and one lane's
  }

  // Attends to a block in half precision, from token `start` on. `k`, `v`: panels of HALF_BLOCK rows of 128 bytes.
  template <typename T>
  __device__ void attend_to_half_block(const uint8_t* k, const uint8_t* v, int start, const HalfQueries<T, DIM>& queries, const int* positions,
                                       float score_scale, Fragment f) {
    using Tokens = SharedTile<HALF_BLOCK, HALF_PANEL, true>;
    constexpr int PANEL_CHANNELS = HALF_PANEL / 2;
    const auto panel = [](const uint8_t* of, int channel) -> const Tokens& { return reinterpret_cast<const Tokens*>(of)[channel / PANEL_CHANNELS]; };
    const int at = lane_of_rows<Tokens>(), at_transposed = lane_of_columns<Operands::native, Tokens>();
    float s[HALF_BLOCK / 16][4] = {};
#pragma unroll
    for (int channel = 0; channel < DIM; channel += 16) {
#pragma unroll
      for (int t = 0; t < HALF_BLOCK / 16; ++t) {
        uint32_t a[4];
        load_rows<Operands::native>(a, panel(k, channel), at, 16 * t, channel % PANEL_CHANNELS / 16);
        mma_halves<T>(s[t], a, queries.words[channel / 16][0], queries.words[channel / 16][1]);
        // a product with zeros makes the scores of tokens NaN that are not finite
        mma_halves<T>(s[t], a, 0, 0);
        load_rows<Operands::native>(a, panel(v, channel), at, 16 * t, channel % PANEL_CHANNELS / 16);
        mma_halves<T>(s[t], a, 0, 0);
      }
    }
    bool nonfinite = false;
    const int position[2] = {positions[0], positions[1]};
    float largest[2] = {-INFINITE, -INFINITE}, alpha[2], beta[2], sum[2] = {};
#pragma unroll
    for (int t = 0; t < HALF_BLOCK / 16; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i % 2, token = start + 16 * t + f.row + i / 2 * 8;
        const bool shown = own_page(position[r]) == start / KEYS && token <= position[r];
        nonfinite |= s[t][i] != s[t][i];
        s[t][i] = shown ? s[t][i] * score_scale : -INFINITE;
        largest[r] = fmaxf(largest[r], s[t][i]);
      }
    nonfinite = __any_sync(~0u, nonfinite);
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = column_max(largest[r]);
    merge(largest, alpha, beta);
    uint32_t p[HALF_BLOCK / 16][2];
#pragma unroll
    for (int t = 0; t < HALF_BLOCK / 16; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[t][i] = ptx::exp2_approx(s[t][i] - finite_or_zero(m[i % 2]));
        sum[i % 2] += s[t][i];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) p[t][i] = ptx::transposed(word_of<T>(s[t][2 * i], s[t][2 * i + 1]));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) l[r] = fmaf(l[r], alpha[r], sum[r]);
#pragma unroll
    for (int channel = 0; channel < DIM; channel += 16) {
      float (&of)[4] = o[channel / 16];
#pragma unroll
      for (int i = 0; i < 4; ++i) of[i] *= alpha[i % 2];
#pragma unroll
      for (int t = 0; t < HALF_BLOCK / 16; ++t) {
        uint32_t a[4];
        ptx::ldmatrix_transposed(a, panel(v, channel).beyond(at_transposed, 16 * t, channel % PANEL_CHANNELS / 8));
        if (nonfinite) clamp<T>(a);  // rows that don't see such tokens multiply them by zero
        mma_halves<T>(of, a, p[t][0], p[t][1]);
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

  // Makes elements finite.
  template <typename T>
  __device__ static void clamp(uint32_t (&words)[4]) {
    using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    constexpr uint32_t LARGEST = std::is_same_v<T, __half> ? 0x7BFF7BFF : 0x7F7F7F7F, LOWEST = LARGEST | 0x80008000;
#pragma unroll
    for (uint32_t& word : words) {
      Two& two = reinterpret_cast<Two&>(word);
      two = __hmin2(__hmax2(two, reinterpret_cast<const Two&>(LOWEST)), reinterpret_cast<const Two&>(LARGEST));  // of NaN, the other one
    }
  }
};

}  // namespace fp8attn
