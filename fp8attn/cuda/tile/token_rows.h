// Running sums of the rows of a tile that attends to the KV cache of another engine, and what a block of its tokens
// adds to them. A warpgroup has them. `fp8attn/paged_tensors.py` defines the arithmetic.
//
// Products are transposed: tokens or channels are the 16 rows of mma.sync, queries its columns. A warp has the scores
// of 16 tokens, and the output of a quarter of the channels, of which a lane has adjacent ones. Lane 4g + c has queries
// 2c and 2c + 1 (r = 0, 1) of each group of eight.
#pragma once

#include "paged_rows.h"

namespace fp8attn {

constexpr int TOKENS = 64;  // of a block
static_assert(TOKENS == 16 * DECODER_WARPS);

// Which tokens the query at a position sees, of a sequence of `end` tokens.
__device__ inline int first_seen(const DecodeParams& p, int position) { return p.left >= 0 ? max(position - p.left, 0) : 0; }
__device__ inline int last_seen(const DecodeParams& p, int position, int end) { return p.right >= 0 ? position + min(p.right, end - 1 - position) : end - 1; }

// The blocks of tokens that some rows of a key/value head see, from block `first` of the sequence on.
struct TokenBlocks {
  int first = 0, count = 0;

  TokenBlocks() = default;

  // Whatever the row's numbers are, there are at most p.capacity / TOKENS + 1. Rows that see tokens have one, even if
  // it isn't there.
  __device__ TokenBlocks(const DecodeParams& p, const BatchRow& row, int first_row, int rows) {
    const int start = row.end - row.count;
    const int first_query = query_of(p, first_row), last_query = min(query_of(p, first_row + rows - 1), row.count - 1);
    if (!row.exists || first_query > last_query) return;
    first = first_seen(p, start + first_query) / TOKENS;
    count = max(min(last_seen(p, start + last_query, row.end), p.capacity - 1) / TOKENS + 1 - first, 1);
  }

  __device__ int size() const { return count; }
};

// A score in base 2 under a soft cap, by tanh(x) = 1 - 2 / (1 + e^2x): exact up to some float32 roundings of 1.
__device__ inline float capped(float score, float softcap) {
  return softcap * LOG2E * (1.0f - 2.0f / (1.0f + ptx::exp2_approx(score * (2.0f / softcap))));
}

// A block in shared memory: panels of TOKENS rows with TMA's swizzle.
template <int ROW_BYTES>
struct TokenPanels {
  static constexpr int PANEL = ROW_BYTES < 128 ? ROW_BYTES : 128, STEPS = PANEL / 32;  // bytes of a row, and of a product
  using Panel = SharedTile<TOKENS, PANEL, true>;

  // The panel that has step `step` of products.
  __device__ static const Panel& panel(const uint8_t* of, int step) { return reinterpret_cast<const Panel*>(of)[step / STEPS]; }
};

// What is said of a lane's tokens of a block, 8 rows apart.
struct TokenScales {
  float k[2], v[2];  // scales; 1 where a scale is of all tokens
  float nan[2];      // 0; NaN if the token or its scales are not finite, or it isn't there
};

// What is shared of a block beside WarpExchange.
template <int ROWS>
struct TokenExchange {
  float maxima[ROWS][DECODER_WARPS];  // for the scales of P
  uint8_t nonfinite[DECODER_WARPS];   // whether a warp's tokens have values that are not finite
};

// The signs of a word's elements that are not finite. T: __half or __nv_bfloat16; or uint8_t: e4m3.
template <typename T>
__device__ uint32_t carried(uint32_t word) {
  constexpr bool FP8 = sizeof(T) == 1, F16 = std::is_same_v<T, __half>;
  constexpr uint32_t EXPONENT = FP8 ? 0x7F7F7F7F : F16 ? 0x7C007C00 : 0x7F807F80, LAST = FP8 ? 0x01010101 : F16 ? 0x04000400 : 0x00800080;
  constexpr uint32_t SIGN = FP8 ? 0x80808080 : 0x80008000;
  // where all bits of the exponent are set, adding its last one carries into the sign
  return (word & EXPONENT) + LAST & SIGN;
}

// Makes elements of a word that are not finite zero.
template <typename T>
__device__ uint32_t finite_elements(uint32_t word) {
  constexpr uint32_t ELEMENT = sizeof(T) == 1 ? 0xFF : 0xFFFF;
  return word & ~((carried<T>(word) >> (8 * sizeof(T) - 1)) * ELEMENT);
}

// T: of queries, and of tokens that aren't FP8. l: the thread's part of the sums. Element 4 group + 2 h + r of o[i] is
// channel 2 i + h of the lane's.
template <typename T, int DIM, bool FP8, int GROUPS>
struct TokenRows : RunningSums<DIM / WGMMA_ROWS, GROUPS> {
  static constexpr int ROW_BYTES = FP8 ? DIM : 2 * DIM;
  static constexpr int TILES = DIM / WGMMA_ROWS;          // pairs of channels of a lane
  static constexpr int OWN_BYTES = ROW_BYTES / 32;        // a lane's channels of a token
  static constexpr float OFFSET = FP8 ? P_OFFSET : 0.0f;  // of exponents of P
  using Value = std::conditional_t<FP8, __half, T>;       // P and V as they are multiplied
  using Panels = TokenPanels<ROW_BYTES>;
  using Sums = RunningSums<TILES, GROUPS>;
  using typename Sums::OfMine;
  using Sums::for_queries, Sums::l, Sums::m, Sums::merge, Sums::o;

  // Four numbers of P as they are multiplied, two to a word.
  __device__ static void pack(const float (&p)[4], uint32_t* words) {
    if constexpr (FP8)
      ptx::halves_of_e4m3(ptx::e4m3x4(p[0], p[1], p[2], p[3]), words[0], words[1]);
    else
      words[0] = word_of<T>(p[0], p[1]), words[1] = word_of<T>(p[2], p[3]);
  }

  // Makes values of a block zero that are not finite. Called by all decoders.
  __device__ static void remove_nonfinite(uint8_t* v) {
    uint32_t* const words = reinterpret_cast<uint32_t*>(v);
#pragma unroll 1
    for (int i = threadIdx.x; i < TOKENS * ROW_BYTES / 4; i += DECODERS) words[i] = finite_elements<std::conditional_t<FP8, uint8_t, T>>(words[i]);
    ptx::fence_proxy_async();  // TMA writes there next
  }

  // The first of the lane's channels.
  __device__ static int channel() { return threadIdx.x / 32 * (DIM / 4) + threadIdx.x % 32 / 4 * (DIM / 32); }

  // K · Qᵀ of the warp's tokens, and whether a token's values are finite: 0 or NaN. `q`: panels of HEIGHT rows.
  template <int HEIGHT>
  __device__ static void multiply_keys(float (&s)[GROUPS][4], float (&nan_of_v)[4], const uint8_t* k, const uint8_t* v, const uint8_t* q) {
    using Queries = SharedTile<HEIGHT, Panels::PANEL, true>;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, at = lane_of_rows<typename Panels::Panel>();
    compute_late(warp), compute_late(lane), compute_late(at);
    constexpr uint32_t zeros[2] = {};
#pragma unroll
    for (int step = 0; step < ROW_BYTES / 32; step += 2) {
      const Queries& queries = reinterpret_cast<const Queries*>(q)[step / Panels::STEPS];
      uint32_t b[GROUPS][4];
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) ptx::ldmatrix(b[group], queries.at(QUERY_GROUP * group + lane % 8, step % Panels::STEPS * 2 + lane / 8));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t a[4];
        load_rows<Operands::native>(a, Panels::panel(k, step), at, 16 * warp, (step + i) % Panels::STEPS);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) multiply(s[group], a, b[group] + 2 * i);
        load_rows<Operands::native>(a, Panels::panel(v, step), at, 16 * warp, (step + i) % Panels::STEPS);
        multiply(nan_of_v, a, zeros);  // a product with zeros is NaN for what is not finite
      }
    }
  }

  // Attends to a block, from token `first` of the sequence on. `s`: what multiply_keys returns. `factor`: of scores.
  // `seen`: the first and the last token that each row of the tile sees. `nonfinite`: whether the lane's tokens have
  // values that are not finite.
  template <bool BY_TOKEN, int ROWS, int SCALED_ROWS>
  __device__ void attend(float (&s)[GROUPS][4], uint8_t* v, const OfMine& factor, const TokenScales& scales, bool nonfinite, const int2* seen, int first,
                         float softcap, WarpExchange<ROWS>& exchange, TokenExchange<SCALED_ROWS>& more, Fragment f) {
    using Probabilities = SharedTile<ROWS, 2 * TOKENS, true>;
    Probabilities& probabilities = *reinterpret_cast<Probabilities*>(exchange.p);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    compute_late(warp), compute_late(lane);
    OfMine largest, alpha, beta;
    const auto for_scores = [&](auto&& of) {
      for_queries([&](int group, int r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) of(s[group][2 * h + r], group, r, h);
      });
    };
    for_scores([&](float& score, int group, int r, int h) {
      const float scale = BY_TOKEN ? score_factor(factor[group][r] * scales.k[h], false) : factor[group][r];
      score = fmaf(score, scale, fmaf(score, 0.0f, scales.nan[h]));  // 0 times a key that is not finite is NaN
    });
    if (softcap > 0.0f) for_scores([&](float& score, int, int, int) { score = capped(score, softcap); });
    for_queries([&](int group, int r) { largest[group][r] = -INFINITE; });
    for_scores([&](float& score, int group, int r, int h) {
      const int2 of_row = seen[QUERY_GROUP * group + f.column + r];
      const int token = first + f.row + 8 * h;
      if (token < of_row.x || token > of_row.y) score = -INFINITE;
      largest[group][r] = fmaxf(largest[group][r], score);
    });
    nonfinite = __any_sync(~0u, nonfinite);
    if (lane == 0) more.nonfinite[warp] = nonfinite;
    exchange.largest(largest, f);
    if (*reinterpret_cast<const uint32_t*>(more.nonfinite) != 0) remove_nonfinite(v);  // queries that don't see a token multiply it by zero
    merge(largest, alpha, beta);
    for_queries([&](int group, int r) {
      beta[group][r] *= 1.0f / (1 << int(OFFSET));
      float sum = 0.0f;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& p = s[group][2 * h + r];
        p = ptx::exp2_approx(p - finite_or_zero(largest[group][r]) + OFFSET);
        sum += p;
      }
      l[group][r] = fmaf(l[group][r], alpha[group][r], sum * beta[group][r]);
    });
    if constexpr (BY_TOKEN) {
      OfMine most;
      for_queries([&](int group, int r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) s[group][2 * h + r] *= scales.v[h];
        most[group][r] = fmaxf(fabsf(s[group][r]), fabsf(s[group][2 + r]));
      });
      reduce_over_warps<GROUPS>(more.maxima, most, f, [](float a, float b) { return fmaxf(a, b); });
      for_queries([&](int group, int r) {
        const float scale = scale_of(most[group][r], float(1 << int(OFFSET))), inverse = __frcp_rn(scale);
        s[group][r] *= inverse, s[group][2 + r] *= inverse;
        beta[group][r] *= scale;
      });
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      uint32_t words[2];
      pack(s[group], words);
      // transposed, token g's queries 2c and 2c + 1 are query g's tokens 2c and 2c + 1
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<uint32_t*>(probabilities.at(QUERY_GROUP * group + lane / 4, 2 * warp + i) + lane % 4 * 4) = ptx::transposed(words[i]);
    }
    ptx::warpgroup_sync(1);
    Products<TILES, GROUPS> fresh = {};
#pragma unroll
    for (int step = 0; step < TOKENS / 16; step += 2) {
      uint32_t b[GROUPS][4];
#pragma unroll
      for (int group = 0; group < GROUPS; ++group) ptx::ldmatrix(b[group], probabilities.at(QUERY_GROUP * group + lane % 8, 2 * step + lane / 8));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t a[TILES][4];
        load_values(a, v, step + i, lane);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
#pragma unroll
          for (int group = 0; group < GROUPS; ++group)
            mma_halves<Value>(reinterpret_cast<float(&)[4]>(fresh[t][4 * group]), a[t], b[group][2 * i], b[group][2 * i + 1]);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int i = 0; i < 4 * GROUPS; ++i) o[t][i] = fmaf(fresh[t][i], beta[i / 4][i % 2], o[t][i] * alpha[i / 4][i % 2]);
  }

 private:
  static constexpr int WORDS = (OWN_BYTES + 3) / 4;

  // Hopper has no mma.sync of e4m3: what the compiler makes of it converts operands, too, and adds sums one by one.
  __device__ static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t* b) {
    if constexpr (FP8) {
      uint32_t halves[2][4], of_b[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::halves_of_e4m3(a[i], halves[0][i], halves[1][i]);
#pragma unroll
      for (int i = 0; i < 2; ++i) ptx::halves_of_e4m3(b[i], of_b[0][i], of_b[1][i]);
#pragma unroll
      for (int i = 0; i < 2; ++i) ptx::mma_f16(d, halves[i], of_b[i]);
    } else {
      mma_halves<T>(d, a, b[0], b[1]);
    }
  }

  // Vᵀ of 16 tokens and the lane's channels, as A operands: rows g and g + 8 of operand t are channels 2 t and 2 t + 1
  // of lane g. The bytes of two adjacent tokens are interleaved.
  __device__ static void load_values(uint32_t (&a)[TILES][4], const uint8_t* v, int step, int lane) {
    constexpr int PANEL = Panels::PANEL;
    const int byte = channel() * (ROW_BYTES / DIM), token = lane % 4 * 2;
    const uint8_t* const panel = v + byte / PANEL * TOKENS * PANEL;
    int even = ptx::swizzled<PANEL>(token, byte % PANEL), odd = ptx::swizzled<PANEL>(token + 1, byte % PANEL);
    compute_late(even), compute_late(odd);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t of_even[WORDS], of_odd[WORDS];
      load_own(of_even, panel + even + (16 * step + 8 * h) * PANEL);
      load_own(of_odd, panel + odd + (16 * step + 8 * h) * PANEL);
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        if constexpr (FP8) {
          ptx::halves_of_e4m3(__byte_perm(of_even[t / 2], of_odd[t / 2], t % 2 ? 0x7362 : 0x5140), a[t][2 * h], a[t][2 * h + 1]);
        } else {
          a[t][2 * h] = __byte_perm(of_even[t], of_odd[t], 0x5410);
          a[t][2 * h + 1] = __byte_perm(of_even[t], of_odd[t], 0x7632);
        }
      }
    }
  }

  __device__ static void load_own(uint32_t (&words)[WORDS], const uint8_t* from) {
    if constexpr (OWN_BYTES == 16) {
      const uint4 found = *reinterpret_cast<const uint4*>(from);
      words[0] = found.x, words[1] = found.y, words[2] = found.z, words[3] = found.w;
    } else if constexpr (OWN_BYTES == 8) {
      const uint2 found = *reinterpret_cast<const uint2*>(from);
      words[0] = found.x, words[1] = found.y;
    } else if constexpr (OWN_BYTES == 4) {
      words[0] = *reinterpret_cast<const uint32_t*>(from);
    } else {
      words[0] = *reinterpret_cast<const uint16_t*>(from);
    }
  }
};

}  // namespace fp8attn
