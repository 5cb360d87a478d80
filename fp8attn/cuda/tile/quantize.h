// The steps of fp8attn/quantization.py for bfloat16 and half, with the same bytes and scales for the default recipe.
// Slices have at most TOKEN_CHUNK tokens.
#pragma once

#include "../ptx/convert.h"
#include "mask.h"
#include "pair.h"
#include "rotate.h"
#include "softmax.h"

namespace fp8attn {

constexpr int STEPS = TOKEN_CHUNK / LANES;
constexpr int SLICE = 16;  // channels of K or V per warpgroup of the fused small kernel
constexpr int QUADS = SLICE / 4;

// quantization.sample_step
__device__ inline int sample_step(int length) { return (length + SAMPLE - 1) / SAMPLE | 1; }

// 1 / quantization.sample_size
__device__ inline float inverse_sample_of(int length) {
  const int step = sample_step(length);
  return __fdiv_rn(1.0f, (length + step - 1) / step);
}

// quantization.mean_of_sample, of a channel, from the sum of its sample.
__device__ inline float key_mean_of(float sum, float inverse_sample) {
  return Pair<__nv_bfloat16>::floats(word_of<__nv_bfloat16>(__fmul_rn(sum, inverse_sample), 0.0f)).x;
}

// Sum in the order of quantization.lane_sum.
template <int N>
__device__ float halving_sum(const float (&lanes)[N]) {
  if constexpr (N == 1) {
    return lanes[0];
  } else {
    float sum[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sum[i] = lanes[i] + lanes[i + N / 2];
    return halving_sum(sum);
  }
}

// Four codes of non-finite elements.
template <bool INT8>
constexpr uint32_t NAN_CODES = INT8 ? INT8_NAN * 0x01010101u : 0x7F7F7F7F;

__device__ inline bool is_finite(float x) { return fabsf(x) < INFINITE; }

// The scale that maps `largest` to `code`, a constant; 1 if `largest` is 0. A product with the inverse of a power of 2
// has the bits of the quotient.
__device__ inline float scale_of(float largest, float code = E4M3_MAX) {
  const bool is_power = (__float_as_uint(code) & 0x7FFFFF) == 0;
  return largest > 0.0f ? fmaxf(is_power ? __fmul_rn(largest, 1.0f / code) : __fdiv_rn(largest, code), SMALLEST_SCALE) : 1.0f;
}

// The scale of a row of Q or a block of K.
template <bool INT8>
__device__ float row_scale_of(float largest) {
  return scale_of(largest, INT8 ? INT8_LARGEST : E4M3_LARGEST);
}

__device__ inline float removable(float mean) { return fabsf(mean) < LARGEST_MEAN ? mean : 0.0f; }

__device__ inline float4 removable(float4 mean) { return {removable(mean.x), removable(mean.y), removable(mean.z), removable(mean.w)}; }

// Subtracts the mean of four channels.
__device__ inline void centre(float (&y)[4], float4 mean) { y[0] -= mean.x, y[1] -= mean.y, y[2] -= mean.z, y[3] -= mean.w; }

// The codes of four channels; `factor` is the inverse scale. int8 codes of NaN are arbitrary.
template <bool INT8>
__device__ uint32_t codes_of(const float* y, float factor) {
  if constexpr (INT8) {
    uint32_t rounded[4];  // to nearest even; the lowest byte is the code
#pragma unroll
    for (int i = 0; i < 4; ++i) rounded[i] = __float_as_uint(__fadd_rn(__fmul_rn(y[i], factor), ROUNDER));
    return __byte_perm(__byte_perm(rounded[0], rounded[1], 0x0040), __byte_perm(rounded[2], rounded[3], 0x0040), 0x5410);
  } else {
    return ptx::e4m3x4(y[0] * factor, y[1] * factor, y[2] * factor, y[3] * factor);
  }
}

// A step of a reduction of two values over lanes: the lane keeps one, and gives the other to the lane `distance` away.
template <typename X, typename Op>
__device__ X keep_one(X lower, X upper, bool keeps_upper, int distance, Op&& op) {
  return op(keeps_upper ? upper : lower, __shfl_xor_sync(~0u, keeps_upper ? lower : upper, distance));
}

// Reduces N values over a team of adjacent lanes. Lane `member` of it gets value member / (TEAM / N).
template <int TEAM, int N, typename X, typename Op>
__device__ X reduce_over_team(const X (&x)[N], int member, Op&& op) {
  if constexpr (TEAM == 1) {
    return x[0];
  } else if constexpr (N == 1) {
    const X both[1] = {op(x[0], __shfl_xor_sync(~0u, x[0], TEAM / 2))};
    return reduce_over_team<TEAM / 2>(both, member, op);
  } else {
    X kept[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) kept[i] = keep_one(x[i], x[i + N / 2], member & TEAM / 2, TEAM / 2, op);
    return reduce_over_team<TEAM / 2>(kept, member, op);
  }
}

// quantization.coarse. No product is fused into a sum, so that each is rounded where the definition rounds it.
__device__ inline float coarse(float mean, float low, float high) {
  const float largest = fmaxf(fmaxf(high, -low), 0.0f);
  const float step = __int_as_float(__float_as_int(largest) & 0x7F800000) * MEAN_STEP;
  const float far = __fmul_rn(step, ROUNDER);
  if (low == high) return low + 0.0f;
  return fabsf(mean) < step * MEAN_STEPS ? 0.0f : __fsub_rn(__fadd_rn(mean, far), far);
}

// quantization.encode_values for two channels. The tokens of a run come one after another.
struct Feedback {
  __half2 residual = __half2half2(__float2half(0.0f));

  // `gain`: quantization.feedback in both halves. MAY_BE_NAN: a number that is NaN counts as zero.
  template <bool MAY_BE_NAN>
  __device__ uint16_t codes(float2 x, __half2 gain) {
    __half2 z = __floats2half2_rn(x.x, x.y);
    if constexpr (MAY_BE_NAN) reinterpret_cast<uint32_t&>(z) &= __heq2_mask(z, z);
    const __half2 limit = __hmin2(__habs2(residual), __hmul2(__habs2(z), __half2half2(__float2half(LARGEST_CORRECTION))));
    const uint32_t correction = reinterpret_cast<const uint32_t&>(limit) | reinterpret_cast<const uint32_t&>(residual) & 0x80008000;
    const uint16_t codes = ptx::e4m3x2(__hadd2_rn(z, reinterpret_cast<const __half2&>(correction)));
    residual = __hfma2(__hsub2_rn(z, ptx::halves_of_e4m3x2(codes)), gain, residual);
    return codes;
  }
};

// The same without feedback, for lengths up to TOKEN_CHUNK.
__device__ inline uint16_t value_codes(float a, float b) {
  return ptx::e4m3x2(__hadd2_rn(__floats2half2_rn(a, b), __half2half2(__float2half(0.0f))));
}

// Codes of a group of tokens of V as they are stored, with tokens in the order of layout.key_of_slot: 16 bytes for each
// of two channels. `pairs`: codes of both channels of two tokens.
__device__ inline void transpose_group(const uint32_t (&pairs)[GROUP / 2], uint4 (&of_channel)[2]) {
  uint32_t words[2][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[0][i] = __byte_perm(pairs[i], pairs[i + 4], 0x6420), words[1][i] = __byte_perm(pairs[i], pairs[i + 4], 0x7531);
#pragma unroll
  for (int c = 0; c < 2; ++c) of_channel[c] = {words[c][0], words[c][1], words[c][2], words[c][3]};
}

// The codes of a group of tokens of V, 16 bytes for each of two channels. `number(i)`: token i of both channels,
// divided by their scales.
template <bool MAY_BE_NAN = false, typename Number>
__device__ void encode_group(Feedback& feedback, __half2 gain, Number&& number, uint4 (&of_channel)[2]) {
  uint32_t pairs[GROUP / 2];
#pragma unroll
  for (int i = 0; i < GROUP; i += 2) {
    uint16_t codes[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) codes[j] = feedback.codes<MAY_BE_NAN>(number(i + j), gain);
    pairs[i / 2] = ptx::pair(codes[0], codes[1]);
  }
  transpose_group(pairs, of_channel);
}

// Statistics of a slice per lane, in shared memory. Statistics::of reduces them over the lanes.
template <typename T>
struct LaneStatistics {
  float4 sum[LANES][QUADS];
  struct {
    T low[4], high[4];
  } extremes[LANES][QUADS];
};

// Statistics of one channel. Eight threads reduce one channel.
struct Statistics {
  float sum, low = INFINITE, high = -INFINITE;

  __device__ static int channel() { return threadIdx.x % 128 / 8; }

  // Sums in the order of quantization.lane_sum.
  template <bool EXTREMES, typename T>
  __device__ static Statistics of(const LaneStatistics<T>& lanes) {
    const int first = threadIdx.x % 8, quad = channel() / 4, c = channel() % 4;
    const auto sum_of = [&](int lane) { return reinterpret_cast<const float*>(&lanes.sum[lane][quad])[c]; };
    Statistics found = {(sum_of(first) + sum_of(first + 16)) + (sum_of(first + 8) + sum_of(first + 24))};
#pragma unroll
    for (int i = 4; i > 0; i /= 2) found.sum += __shfl_xor_sync(~0u, found.sum, i);
    if constexpr (EXTREMES) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto& of_lane = lanes.extremes[first + 8 * i][quad];
        found.low = fminf(found.low, float(of_lane.low[c])), found.high = fmaxf(found.high, float(of_lane.high[c]));
      }
#pragma unroll
      for (int i = 4; i > 0; i /= 2) {
        found.low = fminf(found.low, __shfl_xor_sync(~0u, found.low, i));
        found.high = fmaxf(found.high, __shfl_xor_sync(~0u, found.high, i));
      }
    }
    return found;
  }
};

// A thread's part of a slice: one quad of channels of the tokens of one lane.
template <typename T>
struct Slice {
  const T* first;  // first token of the lane
  int64_t step;    // from one token of the lane to the next
  int count;       // tokens of the lane that exist
  int lane, quad;
  uint2 raw[STEPS];
  uint32_t nonfinite = 0;  // bit i: the i-th token has a non-finite element

  __device__ Slice(const T* slice, int64_t stride, int length, int its_lane)
      : first(slice + its_lane * stride + threadIdx.x % 4 * 4), step(LANES * stride), count((length - its_lane + LANES - 1) / LANES), lane(its_lane), quad(threadIdx.x % 4) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) raw[i] = i < count ? *reinterpret_cast<const uint2*>(first + i * step) : uint2{};
  }

  // Statistics of the finite elements: of K the sums of the sampled tokens alone. Non-finite elements of K become NaN.
  // Those of V become zero, because their tokens' keys become NaN instead. `apart`: sample_step.
  //
  // Lane i of the sample has the tokens of the slice's lane i · apart mod LANES, in the same order. The sampling period
  // is odd, so lanes that are added are as far apart here as there.
  template <bool VALUES>
  __device__ void statistics(LaneStatistics<T>& lanes, int apart = 1) {
    constexpr uint32_t above = Pair<T>::infinities, below = above | 0x80008000;
    float sum[4] = {}, sampled[4] = {};
    uint2 low = {above, above}, high = {below, below};
    const auto add = [&](uint2 word, uint2 bad, bool of_sample) {
      const uint2 kept = without(word, bad);
      const float2 a = Pair<T>::floats(kept.x), b = Pair<T>::floats(kept.y);
      sum[0] += a.x, sum[1] += a.y, sum[2] += b.x, sum[3] += b.y;
      if (!VALUES && of_sample) sampled[0] += a.x, sampled[1] += a.y, sampled[2] += b.x, sampled[3] += b.y;
      if constexpr (VALUES) {
        low = {least<T>(low.x, kept.x | above & bad.x), least<T>(low.y, kept.y | above & bad.y)};
        high = {most<T>(high.x, kept.x | below & bad.x), most<T>(high.y, kept.y | below & bad.y)};
      }
    };
    int phase = lane % apart;  // of a token in the sampling period
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      if (i < count) add(raw[i], uint2{}, phase == 0);
      phase += LANES % apart;
      if (phase >= apart) phase -= apart;
    }
    if (!is_finite(fmaf(sum[0], 0.0f, sum[1] * 0.0f) + fmaf(sum[2], 0.0f, sum[3] * 0.0f))) {  // or a sum overflowed
      sampled[0] = sampled[1] = sampled[2] = sampled[3] = 0.0f;
      sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
      low = {above, above}, high = {below, below};
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const uint2 word = *reinterpret_cast<const uint2*>(first + i * step);
        const uint2 bad = not_finite<T>(word);
        if (bad.x | bad.y) nonfinite |= 1u << i;
        add(word, bad, (lane + i * LANES) % apart == 0);
      }
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        if (nonfinite >> i & 1) {
          const uint2 bad = not_finite<T>(raw[i]);
          raw[i] = VALUES ? without(raw[i], bad) : raw[i] | bad;
        }
      }
    }
    const float (&found)[4] = VALUES ? sum : sampled;
    lanes.sum[lane][quad] = {found[0], found[1], found[2], found[3]};
    if constexpr (VALUES) {
      uint2* extremes = reinterpret_cast<uint2*>(&lanes.extremes[lane][quad]);
      extremes[0] = low, extremes[1] = high;
    }
  }

  // Codes of V's i-th token.
  __device__ uint32_t codes(int i, float4 mean, float4 inverse) const {
    const float2 a = Pair<T>::floats(raw[i].x), b = Pair<T>::floats(raw[i].y);
    return ptx::pair(value_codes((a.x - mean.x) * inverse.x, (a.y - mean.y) * inverse.y), value_codes((b.x - mean.z) * inverse.z, (b.y - mean.w) * inverse.w));
  }
};

// A quarter of a rotated part of K's mean.
struct KeyMeanQuarter {
  float channels[QUARTER];
  bool exists;

  // From L2, where grids before have written it. Zeros if there is none: registers that are set under a condition stay
  // reserved through the main loop.
  __device__ static KeyMeanQuarter load(const float* from, bool exists) {
    KeyMeanQuarter mean;
    mean.exists = exists;
#pragma unroll
    for (int i = 0; i < QUARTER; i += 4) reinterpret_cast<float4&>(mean.channels[i]) = exists ? __ldcg(reinterpret_cast<const float4*>(from + i)) : float4{};
    return mean;
  }

  // From shared memory.
  __device__ static KeyMeanQuarter of(const float* from) {
    KeyMeanQuarter mean;
    mean.exists = true;
#pragma unroll
    for (int i = 0; i < QUARTER; i += 4) reinterpret_cast<float4&>(mean.channels[i]) = *reinterpret_cast<const float4*>(from + i);
    return mean;
  }
};

// K's mean as it was before its parts were rotated, as the second operand of products with rows of Q. Its channels are
// numbers of bfloat16, so that products are exact.
//
// The first operand is that of QueryRotation: words 0 and 2 of 16 bytes are in the upper of two rows, words 1 and 3 in
// the lower one. So each has a column of its own: of part p, 2p for the upper row, and 2p + 1 for the lower one.
template <int PARTS>
struct KeyMeanColumns {
  static_assert(PARTS <= 4);  // there are 8 columns

  // of each column and lane of a quad, for the lane's quarter: channels 0 and 1 of each four, or 2 and 3
  uint4 columns[8 * PARTS];

  // Turns a rotated mean back, in one warp: a lane has four channels, 16 lanes have a part.
  template <typename T>
  __device__ void turn_back(const float* rotated_mean) {
    const uint32_t lane = threadIdx.x % 32, four = lane % (PART / 4);
#pragma unroll
    for (int first = 0; first < PARTS; first += 2) {
      const uint32_t part = (first + lane / (PART / 4)) % PARTS;
      const float4 mean = turned_back(__ldcg(reinterpret_cast<const float4*>(rotated_mean + PART * part + 4 * four)));
      if (lane / (PART / 4) >= PARTS) return;
      reinterpret_cast<uint32_t*>(columns + 8 * part)[four] = word_of<T>(limited<T>(mean.x), limited<T>(mean.y));
      reinterpret_cast<uint32_t*>(columns + 8 * part + 4)[four] = word_of<T>(limited<T>(mean.z), limited<T>(mean.w));
    }
  }

  // What is too large for half becomes its largest number.
  template <typename T>
  __device__ static float limited(float x) {
    return std::is_same_v<T, __half> ? fminf(fmaxf(x, -65504.0f), 65504.0f) : x;
  }
};

// ROWS rows of Q in bfloat16 or half, which a warpgroup rotates and quantizes with one scale per row. A team of threads
// has a row; each thread has one quarter of a rotated part. Two threads of the team know what is found of one row.
template <int DIM, bool INT8>
struct Queries {
  static constexpr int team = DIM / QUARTER;
  static constexpr int rows_per_round = 128 / team;
  static constexpr int rounds = ROWS / rows_per_round;
  static_assert(team % QUARTERS == 0 && rounds % 2 == 0);  // two rounds are multiplied together
  static_assert(team == 2 * rounds);

  uint32_t thread;
  uint4 raw[rounds][2];
  float y[rounds][QUARTER];  // rotated
  float largest;             // largest magnitude of the row of which the thread knows

  __device__ uint32_t member() const { return thread % team; }

  // The round whose row the thread knows of.
  __device__ int known() const { return member() / 2; }

  __device__ int row(uint32_t round) const { return thread / team + round * rows_per_round; }

  // Loads the rows of `head` from `first` on. Rows outside 0 ... length - 1 are zero. Without a tile, `length` is 0 and
  // `first` may be negative.
  __device__ void load(const uint16_t* head, int64_t stride, int first, int length) {
    thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread), "+l"(stride));  // else addresses are computed before the tile loop, and spilled
    const uint16_t* at = head + int64_t(first + row(0)) * stride + QUARTER * member();
#pragma unroll
    for (int i = 0; i < rounds; ++i, at += rows_per_round * stride) {
      const bool exists = unsigned(first + row(i)) < unsigned(length);
#pragma unroll
      for (int half = 0; half < 2; ++half) raw[i][half] = exists ? reinterpret_cast<const uint4*>(at)[half] : uint4{};
    }
  }

  // Loads rows from where at(row) says; zeros if there are none.
  template <typename At>
  __device__ void load(bool exist, At&& at) {
    thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread));  // as above
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      raw[i][0] = raw[i][1] = {};
      if (!exist) continue;
      const uint16_t* const from = at(row(i)) + QUARTER * member();
#pragma unroll
      for (int half = 0; half < 2; ++half) raw[i][half] = reinterpret_cast<const uint4*>(from)[half];
    }
  }

  // Whether the team's row of a round is non-finite. The rotation spreads a NaN over its part, so one channel of each
  // thread suffices.
  __device__ bool is_hidden(const float (&y)[QUARTER]) const {
    constexpr uint32_t members = (1u << team) - 1;
    return __ballot_sync(~0u, y[0] != y[0]) >> thread % 32 / team * team & members;
  }

  template <typename T>
  __device__ void rotate() {
    const QueryRotation<T> rotation(thread);
#pragma unroll 1
    for (;;) {
      float of_quarter[rounds];
#pragma unroll
      for (int i = 0; i < rounds; ++i) of_quarter[i] = rotation(y[i], raw[i]);
      largest = reduce_over_team<team>(of_quarter, member(), [](float a, float b) { return fmaxf(a, b); });
      if (!__any_sync(~0u, largest == INFINITE)) break;
#pragma unroll
      for (int i = 0; i < 2 * rounds; ++i) raw[i / 2][i % 2] = nan_where_nonfinite<T>(raw[i / 2][i % 2]);
    }
  }

  // Calls store(row, column, codes of a quarter). Writes the rows' scales to `scale`.
  template <typename Store>
  __device__ void quantize(float (&scale)[ROWS], Store&& store) const {
    const float restores = row_scale_of<INT8>(largest), inverse = __frcp_rn(restores);
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      const float factor = __shfl_sync(~0u, inverse, 2 * i, team);
      uint32_t codes[QUARTER / 4];
#pragma unroll
      for (int c = 0; c < QUARTER; c += 4) codes[c / 4] = codes_of<INT8>(y[i] + c, factor);
      // int8 has no NaN: all of the row becomes INT8_NAN
      if (INT8 && is_hidden(y[i])) codes[0] = codes[1] = codes[2] = codes[3] = NAN_CODES<true>;
      store(row(i), QUARTER * member(), uint4{codes[0], codes[1], codes[2], codes[3]});
    }
    // The definition divides both Q and K by PART, although their product should be divided only once. The scale of Q
    // compensates.
    if (member() % 2 == 0) scale[row(known())] = largest > 0.0f ? restores * PART : 1.0f;
  }

  // Writes the rows' products with `mean`, times `unit`, to `products`, by tensor cores. Several rounds are multiplied
  // together. Of a quad with part p, one lane has the sum of each: with four parts, lane p ^ i that of round i, whose
  // columns are exchanged accordingly. With fewer, columns come twice: lane p has round 0, and lane p + 2 round 1.
  template <typename T, int PARTS>
  __device__ void multiply(const KeyMeanColumns<PARTS>& mean, float unit, float (&products)[ROWS]) const {
    static_assert(team == QUARTERS * PARTS && PARTS != 3);
    constexpr bool exchanged = PARTS == 4;
    constexpr int together = exchanged ? 4 : 2, orders = exchanged ? 4 : 1;
    const uint32_t mine = exchanged ? (thread ^ thread / QUARTERS) % 4 : thread / 2 % 2;
    uint4 words[orders];
#pragma unroll
    for (int j = 0; j < orders; ++j) words[j] = mean.columns[(thread ^ 8 * j) % (8 * PARTS)];
#pragma unroll
    for (int i = 0; i < rounds; i += together) {
      float product = 0.0f;
#pragma unroll
      for (int j = 0; j < together; ++j) {
        float sums[4] = {};
        mma_halves<T>(sums, raw[i + j][0], words[j % orders].x, words[j % orders].y);
        mma_halves<T>(sums, raw[i + j][1], words[j % orders].z, words[j % orders].w);
        product = mine == j ? sums[0] + sums[3] : product;  // of the upper and the lower row
      }
      // the neighbouring part's sum of the same round
#pragma unroll
      for (int distance = 1; distance < PARTS; distance *= 2) product += __shfl_xor_sync(~0u, product, distance * (QUARTERS + 1));
      const bool stores = exchanged ? member() < QUARTERS : (member() & ~2u) == 0;
      if (stores) products[row(i + mine)] = product * unit;
    }
  }

  // Writes the rows' products with `mean`, times `unit`, to `products`. The branch for each two rounds keeps ptxas from
  // mixing more of them: it would spill registers of the main loop for that.
  __device__ void multiply(const KeyMeanQuarter& mean, float unit, float (&products)[ROWS]) const {
    constexpr auto sum = [](float a, float b) { return a + b; };
#pragma unroll
    for (int i = 0; i < rounds; i += 2) {
      if (!mean.exists) continue;
      float of_quarter[2] = {};
#pragma unroll
      for (int c = 0; c < QUARTER; ++c) {
#pragma unroll
        for (int j = 0; j < 2; ++j) of_quarter[j] = fmaf(y[i + j][c], mean.channels[c], of_quarter[j]);
      }
      const float product = reduce_over_team<team>(of_quarter, member(), sum);
      if (member() % (team / 2) == i / 2) products[row(i + member() / (team / 2))] = product * (unit * PART);  // as of the scale
    }
  }
};

}  // namespace fp8attn
