// Appends tokens to a KV cache, sm_80 and later: fp8attn.pages.append, with the same bytes.
//
// A CTA brings one page of a head into shared memory once. V: extremes of channels, the page's scale, codes with error
// feedback along runs of tokens. K: rows are rotated and stay in registers until their largest magnitude is known. A
// thread rotates a part of a row by itself if parts have PART channels; else teams of lanes rotate rows.
//
// Few tokens take one launch, in which a CTA looks at several heads. No token that a page still needs is replaced: few
// are at most RECENT - SCALE_BLOCK. More tokens take three: statistics of first pages, pages, last tokens.
#pragma once

#include "append_tokens.h"
#include "config.h"
#include "launch.h"
#include "params.h"
#include "ptx/cp_async.h"
#include "ptx/grid.h"
#include "ptx/max.h"
#include "tile/row_team.h"

namespace fp8attn {

constexpr int RUNS = SCALE_BLOCK / RUN;
constexpr int PAGE_CHUNKS = SCALE_BLOCK / 16;      // of 16 bytes of a channel's codes
constexpr int NONFINITE_WORDS = SCALE_BLOCK / 32;  // a bit for each token
constexpr float INVERSE_PAGE = 1.0f / SCALE_BLOCK;

// Threads of a CTA. A word has two channels. OF_WORD threads measure it, and RUNS threads encode it.
template <AppendConfig C>
constexpr int APPENDERS = OF_WORD * C.head_dim / 2;
static_assert(RUNS <= OF_WORD && LANES % OF_WORD == 0);

// The place of a chunk of 16 bytes among those of its row, so that eight threads reach all banks whether they have
// eight chunks of a row or the same chunk of eight rows.
__device__ inline int swizzled(int chunk, int row) { return chunk ^ row % 8; }

// What all threads of a CTA have to know of a page. One warp finds it.
struct PageFacts {
  PageOfHead page;
  int number;                         // of the page in the cache; known once values have come
  int64_t first_key, first_value;     // of the head's first channels in statistics
  HeadTokens<uint16_t> keys, values;  // of either dtype

  __device__ PageFacts(const AppendParams& p, const PageOfHead& its_page)
      : page(its_page), number(-1), first_key(page.head.index(p) * p.head_dim), first_value(page.head.index(p) * p.value_dim),
        keys(HeadTokens<uint16_t>::keys(p, page.head)), values(HeadTokens<uint16_t>::values(p, page.head)) {}
};

template <AppendConfig C>
struct alignas(128) AppendStorage {
  uint4 values[SCALE_BLOCK][C.head_dim / CHUNK];  // the page's tokens
  union {
    uint4 keys[SCALE_BLOCK][C.head_dim / CHUNK];  // swizzled
    struct {                                      // once all keys are in registers
      uint4 value_codes[C.head_dim][PAGE_CHUNKS];          // swizzled by the channel's word
      uint4 key_codes[APPENDERS<C> / 32][32 * PART / 16];  // of the parts of each warp, swizzled, eight to a row
    };
  };
  // of the first page; `k_shift`: what is added to rotated keys
  float k_shift[C.head_dim], v_mean[C.head_dim], v_scale[C.head_dim];
  float2 sums[OF_WORD][C.head_dim / 2];
  uint2 extremes[OF_WORD][C.head_dim / 2];  // of V: minima, maxima
  PageFacts facts;
  uint32_t nonfinite[NONFINITE_WORDS];  // tokens of V, and int8 keys of whole parts
  // bits of largest magnitudes: of K, of V in units of its channel scales, of the first page's V
  uint32_t largest_key, largest_value, largest_channel;
  uint32_t has_hidden_keys;
};

// pages.page_scale. E4M3_MAX is 1.75 * 2^8.
__device__ inline float page_scale(float largest) {
  const int bits = __float_as_int(largest);
  const int exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000);
  return largest > 0.0f ? __int_as_float((min(max(exponent, -LARGEST_EXPONENT), LARGEST_EXPONENT) + 127) << 23) : 1.0f;
}

// Raises a magnitude in shared memory to |x|, unless x is NaN. Bits of magnitudes are in the magnitudes' order. The
// compiler reduces a warp's by one instruction.
__device__ inline void raise(uint32_t& largest, float x) { atomicMax(&largest, __float_as_uint(fmaxf(fabsf(x), 0.0f))); }

// A page that a CTA quantizes. All threads call all functions, unless they say otherwise.
template <AppendConfig C, bool INT8, typename T>
struct AppendedPage {
  static constexpr int THREADS = APPENDERS<C>, WORDS = C.head_dim / 2, CHUNKS = C.head_dim / CHUNK;
  static constexpr int ROUNDS = SCALE_BLOCK * CHUNKS / THREADS;  // rows of a team at most
  static constexpr int TOGETHER = 4;                             // rows that are rotated at the same time
  using Rows = float[ROUNDS][CHUNK];
  static_assert(ROUNDS % TOGETHER == 0 && ROUNDS * CHUNK == PART);

  const AppendParams& p;
  AppendStorage<C>& shared;
  const PageFacts& facts;
  const int word, member;  // the thread's word of V's channels, and which of its OF_WORD threads it is

  __device__ AppendedPage(const AppendParams& params, AppendStorage<C>& storage)
      : p(params), shared(storage), facts(storage.facts), word(threadIdx.x % WORDS), member(threadIdx.x / WORDS) {}

  // Starts copies of all tokens, V before K.
  __device__ void load() {
    copy<false>(shared.values, facts.values);
    ptx::cp_async_commit();
    copy<true>(shared.keys, facts.keys);
    ptx::cp_async_commit();
    if (threadIdx.x < NONFINITE_WORDS) shared.nonfinite[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.largest_key = shared.largest_value = shared.largest_channel = shared.has_hidden_keys = 0;
  }

  // What an earlier launch has stored.
  __device__ void load_statistics() {
    const int64_t key = facts.first_key + threadIdx.x, value = facts.first_value + threadIdx.x;
    if (threadIdx.x < p.head_dim) shared.k_shift[threadIdx.x] = shift_of(__ldcg(p.k_mean + key));
    if (threadIdx.x < p.value_dim) shared.v_mean[threadIdx.x] = __ldcg(p.v_mean + value), shared.v_scale[threadIdx.x] = __ldcg(p.v_scale + value);
  }

  // Extremes of V's channels over finite elements, in shared memory; tokens that have other elements. Then all keys are
  // in shared memory, too.
  __device__ void measure_values() {
    ptx::cp_async_wait_but<1>();
    __syncthreads();
    if (2 * word < p.value_dim) {
      constexpr uint32_t infinities = Pair<T>::infinities;
      const uint32_t* from = words_of(shared.values) + member * WORDS + word;
      uint32_t low = infinities, high = infinities | SIGN_BITS;
#pragma unroll
      for (int token = 0; token < SCALE_BLOCK; token += OF_WORD) {
        const uint32_t two = from[token * WORDS];
        low = least_or_nan<T>(low, two), high = most_or_nan<T>(high, two);
      }
      if (not_finite<T>(low) | not_finite<T>(high)) {
        low = infinities, high = infinities | SIGN_BITS;
#pragma unroll 1
        for (int token = 0; token < SCALE_BLOCK; token += OF_WORD) {
          const uint32_t two = from[token * WORDS], bad = not_finite<T>(two);
          low = least<T>(low, two | bad), high = most<T>(high, two | bad);  // NaN changes neither
          if (bad != 0) hide(token + member);
        }
      }
      shared.extremes[member][word] = {low, high};
    }
    ptx::cp_async_wait_but<0>();
    __syncthreads();
  }

  // pages.first_statistics of this page, to shared and global memory.
  __device__ void measure_first_page() {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const bool of_keys = i == 0;
      sum_finite(of_keys);
      __syncthreads();
      if (of_keys && threadIdx.x < 32) finish_key_mean();
      if (of_keys) __syncthreads();
    }
    const int channel = threadIdx.x;
    const bool has_channel = channel < p.value_dim;
    float mean = 0.0f, largest = 0.0f;
    if (has_channel) {
      const float2 extremes = extremes_of(channel);
      if (p.smooth_v) mean = removable(coarse(mean_of(channel), extremes.x, extremes.y));
      largest = magnitude(extremes, mean);
    }
    raise(shared.largest_channel, largest);
    __syncthreads();
    const float scale = scale_of(fmaxf(largest, __fmul_rn(__uint_as_float(shared.largest_channel), LEAST_CHANNEL)));
    if (has_channel) {
      const int64_t at = facts.first_value + channel;
      p.v_mean[at] = shared.v_mean[channel] = mean;
      p.v_scale[at] = shared.v_scale[channel] = scale;
    }
    __syncthreads();
  }

  // Writes codes and scales.
  __device__ void quantize() {
    const bool by_parts = p.part == PART;
    raise(shared.largest_value, units_of_values());
    Rows rows;
    raise(shared.largest_key, by_parts ? rotate_part(reinterpret_cast<float(&)[PART]>(rows)) : rotate_rows(rows));
    __syncthreads();
    const int64_t index = int64_t(facts.number) * p.kv_heads + facts.page.head.head;
    const float k_scale = row_scale_of<INT8>(__uint_as_float(shared.largest_key)), v_scale = page_scale(fminf(__uint_as_float(shared.largest_value), -NOTHING));
    const bool values_are_finite = all_finite();
    uint8_t* keys = p.k_pages + index * SCALE_BLOCK * p.head_dim;
    if (by_parts)
      write_part(reinterpret_cast<const float(&)[PART]>(rows), keys, k_scale);
    else
      write_rows(rows, keys, k_scale, values_are_finite);
    if (values_are_finite)
      encode_values<false>(v_scale);
    else
      encode_values<true>(v_scale);
    __syncthreads();
    if (threadIdx.x == 0) p.k_scale[index] = INT8 && shared.has_hidden_keys ? -k_scale : k_scale, p.v_page_scale[index] = v_scale;
    store_values(p.v_pages + index * p.value_dim * SCALE_BLOCK);
  }

 private:
  using Tokens = uint4[SCALE_BLOCK][CHUNKS];

  __device__ static const uint32_t* words_of(const Tokens& tokens) { return reinterpret_cast<const uint32_t*>(tokens); }

  template <bool SWIZZLED>
  __device__ void copy(Tokens& to, const HeadTokens<uint16_t>& tokens) const {
    constexpr int STEP = THREADS / CHUNKS;
    static_assert(STEP % 8 == 0);  // a thread's chunks are at the same place of their tokens
    const int first_token = facts.page.page * SCALE_BLOCK, first = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS, channel = chunk * CHUNK;
    if (channel >= tokens.dim) return;
    uint4* at = &to[first][SWIZZLED ? swizzled(chunk, first) : chunk];
    const uint16_t* added = tokens.new_token(first_token + first) + channel;  // outside of them where the token isn't new
    const int64_t step = STEP * tokens.stride;
    if (first_token >= tokens.old) {
#pragma unroll
      for (int row = 0; row < SCALE_BLOCK; row += STEP, added += step) ptx::cp_async_16(at + row * CHUNKS, added);
    } else {
#pragma unroll 1
      for (int row = 0; row < SCALE_BLOCK; row += STEP, added += step) {
        const int token = first_token + first + row;
        ptx::cp_async_16(at + row * CHUNKS, token < tokens.old ? tokens.recent_token(token) + channel : added);
      }
    }
  }

  // Sums of channels over finite elements. A thread has some lanes of quantization.lane_sum, which are OF_WORD apart.
  __device__ void sum_finite(bool of_keys) {
    if (2 * word >= (of_keys ? p.head_dim : p.value_dim)) return;
    const uint32_t* tokens = words_of(of_keys ? shared.keys : shared.values);
    float low[LANES / OF_WORD], high[LANES / OF_WORD];
#pragma unroll
    for (int i = 0; i < LANES / OF_WORD; ++i) {
      const int first = i * OF_WORD + member, place = first * WORDS + (of_keys ? swizzled(word / 4, first) * 4 + word % 4 : word);
      low[i] = high[i] = 0.0f;
#pragma unroll
      for (int token = 0; token < SCALE_BLOCK; token += LANES) {
        const float2 x = Pair<T>::floats(tokens[token * WORDS + place]);
        low[i] += is_finite(x.x) ? x.x : 0.0f, high[i] += is_finite(x.y) ? x.y : 0.0f;
      }
    }
    shared.sums[member][word] = {halving_sum(low), halving_sum(high)};
  }

  __device__ float mean_of(int channel) const {
    float sums[OF_WORD];
#pragma unroll
    for (int part = 0; part < OF_WORD; ++part) sums[part] = channel % 2 ? shared.sums[part][channel / 2].y : shared.sums[part][channel / 2].x;
    return __fmul_rn(halving_sum(sums), INVERSE_PAGE);
  }

  // Minus the mean. No rotated zero is negative, so neither is what is added to it.
  __device__ float shift_of(float mean) const { return p.part > 0 ? 0.0f - mean : -mean; }

  // Called by a warp.
  __device__ void finish_key_mean() {
    const RowTeam team(p.head_dim);
    const TeamRotation rotation(p.part, team, p.inverse_part);
    float y[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) y[i] = p.smooth_k && team.has_channels ? mean_of(team.channel + i) : 0.0f;
    rotation.rotate(y);
    if (threadIdx.x >= team.lanes || !team.has_channels) return;
    float* to = p.k_mean + facts.first_key + team.channel;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) to[i] = removable(y[i]), shared.k_shift[team.channel + i] = shift_of(removable(y[i]));
  }

  __device__ float2 extremes_of(int channel) const {
    uint2 found = shared.extremes[0][channel / 2];
#pragma unroll
    for (int part = 1; part < OF_WORD; ++part) {
      const uint2 more = shared.extremes[part][channel / 2];
      found = {least<T>(found.x, more.x), most<T>(found.y, more.y)};
    }
    const float2 low = Pair<T>::floats(found.x), high = Pair<T>::floats(found.y);
    return channel % 2 ? float2{low.y, high.y} : float2{low.x, high.x};
  }

  // Largest magnitude of a channel without its mean. Rounding is monotonic, so one of the extremes has it.
  __device__ static float magnitude(float2 extremes, float mean) { return fmaxf(fmaxf(extremes.y - mean, mean - extremes.x), 0.0f); }

  // The largest magnitude of the thread's channel of V, in units of its scale.
  __device__ float units_of_values() const {
    const int channel = threadIdx.x;
    if (channel >= p.value_dim) return 0.0f;
    return __fmul_rn(magnitude(extremes_of(channel), shared.v_mean[channel]), __frcp_rn(shared.v_scale[channel]));
  }

  // A token's key is hidden: its value isn't finite, or its int8 key.
  __device__ void hide(int token) { atomicOr(&shared.nonfinite[token / 32], 1u << token % 32); }

  // The thread's row among those of the page, and the first channel of its part.
  __device__ static int row_of_part() { return threadIdx.x % SCALE_BLOCK; }
  __device__ static int channel_of_part() { return threadIdx.x / SCALE_BLOCK * PART; }

  // The thread's part of a row of K, rotated and centred, and its largest magnitude. Threads without a part rotate
  // another one: zeros would take others an instruction for each register.
  __device__ float rotate_part(float (&y)[PART]) {
    const int row = row_of_part(), channel = min(channel_of_part(), p.head_dim - PART);
    const auto* shift = reinterpret_cast<const float4*>(&shared.k_shift[channel]);
    // Sums are divided by PART, not what is added: division rounds nothing. Only if a sum overflows, it is the other
    // way round.
    float before = 1.0f, after = 1.0f / PART, largest;
#pragma unroll 1
    for (;;) {
      __syncwarp();  // else elements stay in registers for the second time
#pragma unroll
      for (int i = 0; i < PART / CHUNK; ++i) {
        Chunk<T> chunk;
        chunk.template load<true>(reinterpret_cast<const T*>(&shared.keys[row][swizzled(channel / CHUNK + i, row)]));
        chunk.floats(reinterpret_cast<float(&)[CHUNK]>(y[i * CHUNK]));
      }
      if (before != 1.0f) {
#pragma unroll
        for (int i = 0; i < PART; ++i) y[i] = __fmul_rn(y[i], before);  // else the product is fused into a sum
      }
      transform_part(y);
      largest = 0.0f;
#pragma unroll
      for (int i = 0; i < PART; i += 4) {
        const float4 its_shift = shift[i / 4];
        const float added[] = {its_shift.x, its_shift.y, its_shift.z, its_shift.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          y[i + j] = fmaf(y[i + j], after, added[j]);
          largest = ptx::max_nan(largest, fabsf(y[i + j]));
        }
      }
      if (__all_sync(~0u, largest < INFINITE)) return largest;
      if (before != 1.0f) break;
      before = after, after = 1.0f;
    }
    if (INT8 && !(largest < INFINITE)) hide(row);
    return without_infinities(reinterpret_cast<Rows&>(y));
  }

  // Times the definition's matrix, in the order of its additions.
  __device__ static void transform_part(float (&y)[PART]) {
#pragma unroll
    for (int distance = 1; distance < PART; distance *= 2) {
#pragma unroll
      for (int i = 0; i < PART; ++i) {
        if (i & distance) continue;
        const bool flips_low = distance == 1 && SIGNS >> i & 1, flips_high = distance == 1 && SIGNS >> (i + 1) & 1;
        const float low = flips_low ? -y[i] : y[i], high = flips_high ? -y[i + distance] : y[i + distance];
        y[i] = low + high, y[i + distance] = low - high;
      }
    }
  }

  // The team's rows of K, rotated and centred, and the largest magnitude of the thread's part. Rows that don't exist
  // are zero: else they are thought to be used uninitialised, and take registers from the start on.
  __device__ float rotate_rows(Rows& rows) {
    const RowTeam team(p.head_dim);
    const TeamRotation rotation(p.part, team, p.inverse_part);
    const int first_row = threadIdx.x / team.lanes, row_step = THREADS / team.lanes;
    float largest = 0.0f;
#pragma unroll
    for (int first = 0; first < ROUNDS; first += TOGETHER) {
      auto& some = reinterpret_cast<float(&)[TOGETHER][CHUNK]>(rows[first]);
      if (first_row + first * row_step >= SCALE_BLOCK) {
#pragma unroll
        for (int i = 0; i < TOGETHER * CHUNK; ++i) some[i / CHUNK][i % CHUNK] = 0.0f;
        continue;
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int row = first_row + (first + i) * row_step;
        Chunk<T> chunk;
        if (team.has_channels && row < SCALE_BLOCK) chunk.template load<true>(reinterpret_cast<const T*>(&shared.keys[row][swizzled(team.member, row)]));
        chunk.floats(some[i]);
      }
      if (p.part > 0) {
#pragma unroll
        for (int i = 0; i < TOGETHER * CHUNK; ++i) some[i / CHUNK][i % CHUNK] = __fmul_rn(some[i / CHUNK][i % CHUNK], rotation.factor[i % CHUNK]);
        rotation.transform(some);
      }
      float shift[CHUNK] = {};
      if (team.has_channels) {
        const auto* of_chunk = reinterpret_cast<const float4*>(&shared.k_shift[team.channel]);
        reinterpret_cast<float4&>(shift[0]) = of_chunk[0], reinterpret_cast<float4&>(shift[4]) = of_chunk[1];
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        if (first_row + (first + i) * row_step >= SCALE_BLOCK) break;
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
          some[i][j] += shift[j];  // finite if it was
          largest = fmaxf(largest, fabsf(some[i][j]));  // fmaxf ignores NaN
        }
      }
    }
    return largest < INFINITE ? largest : without_infinities(rows);
  }

  // Infinite elements become NaN. Returns the largest magnitude of the others.
  __device__ float without_infinities(Rows& rows) const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) {
        if (!is_finite(rows[i][j])) rows[i][j] = NAN;
        largest = fmaxf(largest, fabsf(rows[i][j]));
      }
    }
    return largest;
  }

  __device__ bool all_finite() const {
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < NONFINITE_WORDS; ++i) any |= shared.nonfinite[i];
    return any == 0;
  }

  __device__ bool is_hidden(int token) const { return shared.nonfinite[token / 32] >> token % 32 & 1; }

  // Codes of the thread's part, by way of shared memory: a warp stores whole sectors. Hidden keys become NaN: those
  // whose values aren't finite, and int8 keys that aren't.
  __device__ void write_part(const float (&y)[PART], uint8_t* keys, float scale) {
    if (channel_of_part() >= p.head_dim) return;  // the whole warp
    constexpr int CHUNKS_OF_PART = PART / 16;
    const bool hidden = is_hidden(row_of_part());
    const float inverse = !INT8 && hidden ? NAN : __frcp_rn(scale);
    if (INT8 && hidden) shared.has_hidden_keys = 1;
    auto& codes = shared.key_codes[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < CHUNKS_OF_PART; ++i) {
      const auto four = [&](int j) { return codes_of<INT8>(y + 16 * i + 4 * j, inverse); };
      uint4 chunk = {four(0), four(1), four(2), four(3)};
      if (INT8 && hidden) chunk = {NAN_CODES<INT8>, NAN_CODES<INT8>, NAN_CODES<INT8>, NAN_CODES<INT8>};
      codes[swizzled(CHUNKS_OF_PART * lane, lane / 2) ^ i] = chunk;
    }
    __syncwarp();
    uint8_t* to = keys + (row_of_part() - lane + lane / CHUNKS_OF_PART) * p.head_dim + channel_of_part() + lane % CHUNKS_OF_PART * 16;
#pragma unroll
    for (int i = 0; i < CHUNKS_OF_PART; ++i, to += 32 / CHUNKS_OF_PART * p.head_dim) *reinterpret_cast<uint4*>(to) = codes[32 * i + swizzled(lane, 4 * i + lane / 8)];
  }

  // The same of the team's rows.
  __device__ void write_rows(const Rows& rows, uint8_t* keys, float scale, bool values_are_finite) {
    const RowTeam team(p.head_dim);
    const int first_row = threadIdx.x / team.lanes, row_step = THREADS / team.lanes;
    const float inverse = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int row = first_row + i * row_step;
      if (row >= SCALE_BLOCK) break;
      bool hidden = !values_are_finite && is_hidden(row);
      if constexpr (INT8) {
        bool has_nan = false;
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) has_nan |= rows[i][j] != rows[i][j];
        hidden |= team.any(has_nan);
        if (hidden) shared.has_hidden_keys = 1;
      }
      uint2 codes = {codes_of<INT8>(rows[i], inverse), codes_of<INT8>(rows[i] + 4, inverse)};
      if (hidden) codes = {NAN_CODES<INT8>, NAN_CODES<INT8>};
      if (team.has_channels) *reinterpret_cast<uint2*>(keys + row * p.head_dim + team.channel) = codes;
    }
  }

  // Codes of V, transposed, to shared memory. A thread has a run of two channels. CAREFUL: some elements aren't finite.
  template <bool CAREFUL>
  __device__ void encode_values(float scale) {
    const int run = member;
    if (run >= RUNS || 2 * word >= p.value_dim) return;
    const auto factor_of = [&](int channel) { return __frcp_rn(__fmul_rn(shared.v_scale[channel], scale)); };
    const float2 mean = {shared.v_mean[2 * word], shared.v_mean[2 * word + 1]}, factor = {factor_of(2 * word), factor_of(2 * word + 1)};
    const __half2 gain = __half2half2(__float2half(FEEDBACK));
    const uint32_t* from = words_of(shared.values) + run * RUN * WORDS + word;
    Feedback feedback;
#pragma unroll 1
    for (int group = 0; group < RUN / GROUP; ++group, from += GROUP * WORDS) {
      const auto number = [&](int i) -> float2 {
        const float2 y = Pair<T>::floats(from[i * WORDS]);
        float2 x = {(y.x - mean.x) * factor.x, (y.y - mean.y) * factor.y};
        if constexpr (CAREFUL) x = {is_finite(y.x) ? x.x : 0.0f, is_finite(y.y) ? x.y : 0.0f};
        return x;
      };
      uint4 of_channel[2];
      encode_group(feedback, gain, number, of_channel);
#pragma unroll
      for (int c = 0; c < 2; ++c) shared.value_codes[2 * word + c][swizzled(run * (RUN / GROUP) + group, word)] = of_channel[c];
    }
  }

  // Codes of V from shared to global memory.
  __device__ void store_values(uint8_t* to) const {
    constexpr int STEP = THREADS / PAGE_CHUNKS;
    static_assert(GROUP == 16 && STEP % 16 == 0);  // a thread's chunks are at the same place of their channels
    const int first = threadIdx.x / PAGE_CHUNKS, chunk = threadIdx.x % PAGE_CHUNKS;
    const uint4* from = &shared.value_codes[first][swizzled(chunk, first / 2)];
#pragma unroll
    for (int channel = 0; channel < C.head_dim; channel += STEP)
      if (first + channel < p.value_dim) reinterpret_cast<uint4*>(to)[threadIdx.x + channel * PAGE_CHUNKS] = from[channel * PAGE_CHUNKS];
  }
};

// What the launch does with a page that becomes complete. The first page's statistics are measured whether the cache
// has the page or not. For other pages they are stored already.
template <AppendConfig C, bool INT8, typename T>
__device__ void append_page(const AppendParams& p, AppendStorage<C>& shared) {
  const PageOfHead& of = shared.facts.page;
  const bool measures = of.page == 0 && p.step != AppendStep::pages;
  if (!of.becomes_complete() || (!measures && p.step == AppendStep::statistics)) return;
  AppendedPage<C, INT8, T> appended(p, shared);
  appended.load();
  if (!measures) appended.load_statistics();
  // by a thread that loads no statistics, if there is one
  if (threadIdx.x == APPENDERS<C> - 1) shared.facts.number = of.page < p.table_width ? __ldcg(p.page_table + of.head.row * p.table_stride + of.page) : -1;
  appended.measure_values();
  if (measures) appended.measure_first_page();
  if (p.step != AppendStep::statistics && unsigned(shared.facts.number) < unsigned(p.every_page)) appended.quantize();
}

// The grid of few tokens: at least a CTA for 32 heads of rows; a lane looks at a head. Of statistics and last tokens:
// heads of rows. Of pages: PageOfHead::at_place.
template <class Instance, bool INT8, typename T>
__global__ void __launch_bounds__(APPENDERS<Instance::config>, Instance::config.ctas) append(const __grid_constant__ AppendParams p) {
  constexpr AppendConfig C = Instance::config;
  extern __shared__ __align__(128) uint8_t bytes[];
  auto& shared = *reinterpret_cast<AppendStorage<C>*>(bytes);
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  const bool is_few = p.step == AppendStep::few;
  uint32_t pages = 1;  // bit i: one of head blockIdx.x + i * gridDim.x; the same in all warps
  if (is_few || p.step == AppendStep::tokens) {
    const int lane = threadIdx.x % 32;
    const PageOfHead mine = PageOfHead::first_of(p, blockIdx.x + (is_few ? lane * int(gridDim.x) : 0));
    const uint32_t appends = __ballot_sync(~0u, p.tokens && mine.head.old < mine.head.end);
    pages = __ballot_sync(~0u, is_few && p.pages && mine.becomes_complete());
    // a warp copies tokens of a head, or all warps do
#pragma unroll 1
    for (int i = is_few ? threadIdx.x / 32 : 0; i < (is_few ? 32 : 1); i += APPENDERS<C> / 32)
      if (appends >> i & 1) copy_tokens<T>(p, mine.head.of_lane(i), is_few ? lane : threadIdx.x, is_few ? 32 : APPENDERS<C>);
  }
#pragma unroll 1
  for (; pages != 0; pages &= pages - 1) {
    if (threadIdx.x < 32) {
      const int index = blockIdx.x + (__ffs(pages) - 1) * gridDim.x;
      const PageOfHead page = p.step == AppendStep::pages ? PageOfHead::at_place(p, index) : PageOfHead::first_of(p, index);
      if (threadIdx.x == 0) shared.facts = PageFacts(p, page);
    }
    __syncthreads();
    append_page<C, INT8, T>(p, shared);
    __syncthreads();
  }
}

// `ctas`: of the launch that quantizes pages.
template <class Instance>
cudaError_t launch(const AppendParams& p, int ctas, cudaStream_t stream) {
  constexpr int bytes = sizeof(AppendStorage<Instance::config>);
  using T = __nv_bfloat16;
  const auto kernel = p.int8 ? (p.half ? append<Instance, true, __half> : append<Instance, true, T>) : (p.half ? append<Instance, false, __half> : append<Instance, false, T>);
  const cudaError_t error = take_shared_memory(kernel, bytes);
  if (error != cudaSuccess) return error;
  return for_each_step(p, ctas, [&](const AppendParams& step, int its_ctas) { return launch_grid(kernel, step, its_ctas, APPENDERS<Instance::config>, bytes, stream); });
}

}  // namespace fp8attn
