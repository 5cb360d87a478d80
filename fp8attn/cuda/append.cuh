// Appends tokens to a KV cache, sm_80 and later: fp8attn.pages.append, with the same bytes.
//
// A CTA brings one page of a head into shared memory once. V: extremes of channels, the page's scale, codes with error
// feedback along runs of tokens. K: rows are rotated and stay in registers until their largest magnitude is known.
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
#include "tile/row_team.h"

namespace fp8attn {

constexpr int RUNS = SCALE_BLOCK / RUN;
constexpr int PAGE_WORDS = SCALE_BLOCK / 4;        // of a channel's codes
constexpr int CODES_PITCH = 2 * PAGE_WORDS + 4;    // words of two channels' codes: neighbours have other banks
constexpr int NONFINITE_WORDS = SCALE_BLOCK / 32;  // a bit for each token
constexpr float INVERSE_PAGE = 1.0f / SCALE_BLOCK;

// Threads of a CTA. A word has two channels. OF_WORD threads measure it, and RUNS threads encode it.
template <AppendConfig C>
constexpr int APPENDERS = OF_WORD * C.head_dim / 2;
static_assert(RUNS <= OF_WORD && LANES % OF_WORD == 0);

template <AppendConfig C>
struct alignas(128) AppendStorage {
  uint32_t values[SCALE_BLOCK * C.head_dim / 2];  // the page's tokens, two channels to a word
  union {
    uint32_t keys[SCALE_BLOCK * C.head_dim / 2];
    uint32_t codes[C.head_dim / 2 * CODES_PITCH];  // of V, once all keys are in registers
  };
  // of the first page; `k_shift`: what is added to rotated keys
  float k_shift[C.head_dim], v_mean[C.head_dim], v_scale[C.head_dim];
  float2 sums[OF_WORD][C.head_dim / 2];
  uint2 extremes[OF_WORD][C.head_dim / 2];  // of V: minima, maxima
  float2 of_warps[APPENDERS<C> / 32];     // largest magnitudes of K, and of V in units of its channel scales
  uint32_t nonfinite[NONFINITE_WORDS];    // tokens of V
  uint32_t has_hidden_keys;
};

// pages.page_scale. E4M3_MAX is 1.75 * 2^8.
__device__ inline float page_scale(float largest) {
  const int bits = __float_as_int(largest);
  const int exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000);
  return largest > 0.0f ? __int_as_float((min(max(exponent, -LARGEST_EXPONENT), LARGEST_EXPONENT) + 127) << 23) : 1.0f;
}

__device__ inline float largest_of_warp(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

// A page that a CTA quantizes. All threads call all functions, unless they say otherwise.
template <AppendConfig C, bool INT8, typename T>
struct AppendedPage {
  static constexpr int THREADS = APPENDERS<C>;
  static constexpr int ROUNDS = SCALE_BLOCK * (C.head_dim / CHUNK) / THREADS;  // rows of a team at most
  static constexpr int TOGETHER = 4;                                           // rows that are rotated at the same time
  using Rows = float[ROUNDS][CHUNK];
  static_assert(ROUNDS % TOGETHER == 0);

  const AppendParams& p;
  AppendStorage<C>& shared;
  const HeadOfRow& of;
  const int first_token;
  const RowTeam team;
  const int first_row, row_step;  // the team's first row, and the distance of its rows

  __device__ AppendedPage(const AppendParams& params, AppendStorage<C>& storage, const PageOfHead& page)
      : p(params), shared(storage), of(page.head), first_token(page.page * SCALE_BLOCK), team(params.head_dim), first_row(threadIdx.x / team.lanes), row_step(THREADS / team.lanes) {}

  // Starts copies of all tokens, V before K. A thread copies the keys that it reads.
  __device__ void load() {
    copy(shared.values, HeadTokens<T>::values(p, of));
    ptx::cp_async_commit();
    copy(shared.keys, HeadTokens<T>::keys(p, of));
    ptx::cp_async_commit();
    if (threadIdx.x < NONFINITE_WORDS) shared.nonfinite[threadIdx.x] = 0;
    if (threadIdx.x == NONFINITE_WORDS) shared.has_hidden_keys = 0;
  }

  // What an earlier launch has stored.
  __device__ void load_statistics() {
    const int64_t key = of.index(p) * p.head_dim + threadIdx.x, value = of.index(p) * p.value_dim + threadIdx.x;
    if (threadIdx.x < p.head_dim) shared.k_shift[threadIdx.x] = shift_of(__ldcg(p.k_mean + key));
    if (threadIdx.x < p.value_dim) shared.v_mean[threadIdx.x] = __ldcg(p.v_mean + value), shared.v_scale[threadIdx.x] = __ldcg(p.v_scale + value);
  }

  // Extremes of V's channels over finite elements, in shared memory; tokens that have other elements.
  __device__ void measure_values() {
    ptx::cp_async_wait_but<1>();
    __syncthreads();
    const int words = p.value_dim / 2, word = threadIdx.x % words, part = threadIdx.x / words;
    if (part < OF_WORD) {
      constexpr uint32_t infinities = Pair<T>::infinities;
      uint32_t low = infinities, high = infinities | SIGN_BITS, carries = 0;
#pragma unroll 8
      for (int token = part; token < SCALE_BLOCK; token += OF_WORD) {
        const uint32_t two = shared.values[token * words + word];
        low = least<T>(low, two), high = most<T>(high, two);
        carries |= exponent_carries<T>(two);
      }
      if (carries & SIGN_BITS) {
        low = infinities, high = infinities | SIGN_BITS;
#pragma unroll 1
        for (int token = part; token < SCALE_BLOCK; token += OF_WORD) {
          const uint32_t two = shared.values[token * words + word], bad = not_finite<T>(two);
          low = least<T>(low, two | bad), high = most<T>(high, two | bad);  // NaN changes neither
          if (bad != 0) atomicOr(&shared.nonfinite[token / 32], 1u << token % 32);
        }
      }
      shared.extremes[part][word] = {low, high};
    }
    __syncthreads();
  }

  // pages.first_statistics of this page, to shared and global memory.
  __device__ void measure_first_page() {
    ptx::cp_async_wait_but<0>();
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const bool of_keys = i == 0;
      sum_finite(of_keys ? shared.keys : shared.values, of_keys ? p.head_dim : p.value_dim);
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
    const float scale = scale_of(fmaxf(largest, __fmul_rn(largest_of_cta(0.0f, largest).y, LEAST_CHANNEL)));
    if (has_channel) {
      const int64_t at = of.index(p) * p.value_dim + channel;
      p.v_mean[at] = shared.v_mean[channel] = mean;
      p.v_scale[at] = shared.v_scale[channel] = scale;
    }
    __syncthreads();
  }

  // Writes codes and scales of page `number` of the cache.
  __device__ void quantize(int number) {
    const float units = units_of_values();
    Rows rows;
    const float2 largest = largest_of_cta(rotate_keys(rows), units);
    const int64_t index = int64_t(number) * p.kv_heads + of.head;
    const float k_scale = row_scale_of<INT8>(largest.x), v_scale = page_scale(fminf(largest.y, -NOTHING));
    const bool values_are_finite = all_finite();
    write_keys(rows, index, k_scale, values_are_finite);
    if (values_are_finite)
      encode_values<false>(v_scale);
    else
      encode_values<true>(v_scale);
    __syncthreads();
    if (threadIdx.x == 0) p.k_scale[index] = INT8 && shared.has_hidden_keys ? -k_scale : k_scale, p.v_page_scale[index] = v_scale;
    auto* to = reinterpret_cast<uint4*>(p.v_pages + index * p.value_dim * SCALE_BLOCK);
#pragma unroll 4
    for (int i = threadIdx.x; i < p.value_dim * (PAGE_WORDS / 4); i += THREADS) {
      const int channel = i / (PAGE_WORDS / 4), word = channel / 2 * CODES_PITCH + channel % 2 * PAGE_WORDS + i % (PAGE_WORDS / 4) * 4;
      to[i] = *reinterpret_cast<const uint4*>(&shared.codes[word]);
    }
  }

 private:
  __device__ void copy(uint32_t* to, const HeadTokens<T>& tokens) const {
    const RowTeam copiers(tokens.dim);
    if (!copiers.has_channels) return;
    const int first = threadIdx.x / copiers.lanes, step = THREADS / copiers.lanes;
    const T* added = tokens.new_token(first_token + first) + copiers.channel;  // outside of them where the token isn't new
#pragma unroll 4
    for (int row = first; row < SCALE_BLOCK; row += step, added += step * tokens.stride) {
      const int token = first_token + row;
      ptx::cp_async_16(&to[(row * tokens.dim + copiers.channel) / 2], token < tokens.old ? tokens.recent_token(token) + copiers.channel : added, true);
    }
  }

  // Sums of channels over finite elements. A thread has some lanes of quantization.lane_sum, which are OF_WORD apart.
  __device__ void sum_finite(const uint32_t* tokens, int dim) {
    const int words = dim / 2, word = threadIdx.x % words, part = threadIdx.x / words;
    if (part >= OF_WORD) return;
    float low[LANES / OF_WORD], high[LANES / OF_WORD];
#pragma unroll
    for (int i = 0; i < LANES / OF_WORD; ++i) {
      low[i] = high[i] = 0.0f;
#pragma unroll
      for (int token = i * OF_WORD; token < SCALE_BLOCK; token += LANES) {
        const float2 x = Pair<T>::floats(tokens[(token + part) * words + word]);
        low[i] += is_finite(x.x) ? x.x : 0.0f, high[i] += is_finite(x.y) ? x.y : 0.0f;
      }
    }
    shared.sums[part][word] = {halving_sum(low), halving_sum(high)};
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
    const TeamRotation rotation(p.part, team, p.inverse_part);
    float y[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) y[i] = p.smooth_k && team.has_channels ? mean_of(team.channel + i) : 0.0f;
    rotation.rotate(y);
    if (threadIdx.x >= team.lanes || !team.has_channels) return;
    float* to = p.k_mean + of.index(p) * p.head_dim + team.channel;
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
    return __fmul_rn(magnitude(extremes_of(channel), shared.v_mean[channel]), __fdiv_rn(1.0f, shared.v_scale[channel]));
  }

  // The largest of the threads' numbers.
  __device__ float2 largest_of_cta(float x, float y) {
    x = largest_of_warp(x), y = largest_of_warp(y);
    if (threadIdx.x % 32 == 0) shared.of_warps[threadIdx.x / 32] = {x, y};
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; ++warp) x = fmaxf(x, shared.of_warps[warp].x), y = fmaxf(y, shared.of_warps[warp].y);
    return {x, y};
  }

  // The team's rows of K, rotated and centred, and the largest magnitude of the thread's part. Rows that don't exist
  // are zero: else they are thought to be used uninitialised, and take registers from the start on.
  __device__ float rotate_keys(Rows& rows) {
    const TeamRotation rotation(p.part, team, p.inverse_part);
    float largest = 0.0f;
    ptx::cp_async_wait_but<0>();
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
        if (team.has_channels && row < SCALE_BLOCK) chunk.template load<true>(reinterpret_cast<const T*>(&shared.keys[(row * p.head_dim + team.channel) / 2]));
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

  // Hidden keys become NaN: those whose values aren't finite, and int8 keys that aren't.
  __device__ void write_keys(const Rows& rows, int64_t index, float scale, bool values_are_finite) {
    const float inverse = __fdiv_rn(1.0f, scale);
    uint8_t* to = p.k_pages + index * SCALE_BLOCK * p.head_dim + team.channel;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int row = first_row + i * row_step;
      if (row >= SCALE_BLOCK) break;
      bool hidden = !values_are_finite && (shared.nonfinite[row / 32] >> row % 32 & 1);
      if constexpr (INT8) {
        bool has_nan = false;
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) has_nan |= rows[i][j] != rows[i][j];
        hidden |= team.any(has_nan);
        if (hidden) shared.has_hidden_keys = 1;
      }
      uint2 codes = {codes_of<INT8>(rows[i], inverse), codes_of<INT8>(rows[i] + 4, inverse)};
      if (hidden) codes = {NAN_CODES<INT8>, NAN_CODES<INT8>};
      if (team.has_channels) *reinterpret_cast<uint2*>(to + row * p.head_dim) = codes;
    }
  }

  // Codes of V, transposed, to shared memory. A thread has a run of two channels. CAREFUL: some elements aren't finite.
  template <bool CAREFUL>
  __device__ void encode_values(float scale) {
    const int words = p.value_dim / 2, word = threadIdx.x % words, run = threadIdx.x / words;
    if (run >= RUNS) return;
    const auto factor_of = [&](int channel) { return __fdiv_rn(1.0f, __fmul_rn(shared.v_scale[channel], scale)); };
    const float2 mean = {shared.v_mean[2 * word], shared.v_mean[2 * word + 1]}, factor = {factor_of(2 * word), factor_of(2 * word + 1)};
    const __half2 gain = __half2half2(__float2half(FEEDBACK));
    const uint32_t* from = &shared.values[run * RUN * words + word];
    uint32_t* to = &shared.codes[word * CODES_PITCH + run * (RUN / 4)];
    Feedback feedback;
#pragma unroll 1
    for (int group = 0; group < RUN / GROUP; ++group, from += GROUP * words, to += GROUP / 4) {
      const auto number = [&](int i) -> float2 {
        const float2 y = Pair<T>::floats(from[i * words]);
        float2 x = {(y.x - mean.x) * factor.x, (y.y - mean.y) * factor.y};
        if constexpr (CAREFUL) x = {is_finite(y.x) ? x.x : 0.0f, is_finite(y.y) ? x.y : 0.0f};
        return x;
      };
      uint4 of_channel[2];
      encode_group(feedback, gain, number, of_channel);
#pragma unroll
      for (int c = 0; c < 2; ++c) *reinterpret_cast<uint4*>(to + c * PAGE_WORDS) = of_channel[c];
    }
  }
};

// What the launch does with a page that becomes complete. The first page's statistics are measured whether the cache
// has the page or not. For other pages they are stored already.
template <AppendConfig C, bool INT8, typename T>
__device__ void append_page(const AppendParams& p, AppendStorage<C>& shared, const PageOfHead& of) {
  const int number = of.page < p.table_width ? __ldcg(p.page_table + of.head.row * p.table_stride + of.page) : -1;
  const bool measures = of.page == 0 && p.step != AppendStep::pages, quantizes = unsigned(number) < unsigned(p.every_page) && p.step != AppendStep::statistics;
  if (!of.becomes_complete() || (!measures && !quantizes)) return;
  AppendedPage<C, INT8, T> appended(p, shared, of);
  appended.load();
  if (!measures) appended.load_statistics();
  appended.measure_values();
  if (measures) appended.measure_first_page();
  if (quantizes) appended.quantize(number);
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
    const int index = blockIdx.x + (__ffs(pages) - 1) * gridDim.x;
    append_page<C, INT8, T>(p, shared, p.step == AppendStep::pages ? PageOfHead::at_place(p, index) : PageOfHead::first_of(p, index));
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
