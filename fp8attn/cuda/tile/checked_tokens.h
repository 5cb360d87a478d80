// What a warpgroup does to a block of tokens before others multiply it: values in e4m3 become halves, and values that
// are not finite become zeros, as queries that don't see a token multiply it by zero.
//
// Tensor cores take e4m3 values with a channel's tokens in a row only, which a cache doesn't have, and halves in any
// order. A warp has 16 tokens, and lanes l and l + 16 have every second chunk of 16 bytes of token l.
#pragma once

#include "../ptx/fma.h"
#include "token_rows.h"

namespace fp8attn {

// Which tokens are not finite, or aren't there.
struct NonfiniteTokens {
  uint8_t warps[DECODER_WARPS];  // whether a warp has found some
  uint8_t tokens[TOKENS];        // which ones, if the warp has found some

  __device__ uint32_t any() const { return *reinterpret_cast<const uint32_t*>(warps); }
  __device__ bool has(int token) const { return warps[token / 16] && tokens[token]; }
};

// T: of tokens that aren't FP8. thread: of the warpgroup.
template <typename T, int DIM, bool FP8>
struct CheckedTokens {
  static constexpr int ROW_BYTES = FP8 ? DIM : 2 * DIM, CHUNKS = ROW_BYTES / 16;
  static constexpr int PANEL = TokenPanels<ROW_BYTES>::PANEL;
  static constexpr int CONVERTED = 2 * TOKENS * DIM;  // bytes of values as halves, in panels of HALF_PANEL bytes of a token
  using Element = std::conditional_t<FP8, uint8_t, T>;
  using Sums = float[4];

  __device__ static int token(int thread) { return thread / 32 * 16 + thread % 16; }

  // Starts to multiply values in e4m3 and zeros, which gives NaN for tokens that are not finite.
  __device__ static void start_products(Sums& sums, const uint8_t* tokens, const uint8_t* zeros) {
    using Product = std::conditional_t<FP8, ptx::Wgmma<QUERY_GROUP>, void>;
    constexpr int STEPS = TokenPanels<ROW_BYTES>::STEPS;
    const uint64_t b = ptx::uniform(ptx::wgmma_descriptor_of_one(ptx::shared_address(zeros)));
    const uint64_t a = ptx::uniform(ptx::wgmma_descriptor<PANEL>(ptx::shared_address(tokens)));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < ROW_BYTES / 32; ++step) {
      const uint64_t of_step = ptx::operand_of(ptx::operand_of(a, step / STEPS, TOKENS * PANEL), step % STEPS, 32);
      if (step == 0)
        Product::template run<false>(sums, of_step, b);
      else
        Product::template run<true>(sums, of_step, b);
    }
    ptx::wgmma_commit();
  }

  // Whether the thread's token is not finite. Waits for the products.
  __device__ static bool is_nonfinite(Sums& sums, int thread) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(sums);
    // lane 4g has the products of tokens g and g + 8
    const uint32_t first = __ballot_sync(~0u, sums[0] != 0.0f), second = __ballot_sync(~0u, sums[2] != 0.0f);
    return ((thread & 8 ? second : first) >> 4 * (thread % 8)) & 1;
  }

  // The same of a token in half precision, by multiplying it and zeros: tensor cores are what attention waits for.
  __device__ static bool is_nonfinite(const uint8_t* k, const uint8_t* v, int thread) {
    uint32_t sums[4] = {};  // zeros, or NaN
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; ++i) {
      const int at = offset(i, thread);
#pragma unroll
      for (const uint8_t* of : {k, v}) {
        const uint4 x = *reinterpret_cast<const uint4*>(of + at);
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[j] = ptx::add_nothing<T>(words[j], sums[j]);
      }
    }
    const bool found = ((sums[0] | sums[1] | sums[2] | sums[3]) & 0x7FFF7FFF) != 0;
    return __shfl_xor_sync(~0u, found, 16) || found;
  }

  // Converts e4m3 values.
  template <bool FINITE>
  __device__ static void convert(const uint8_t* v, uint8_t* to, int thread) {
    constexpr int TOGETHER = CHUNKS / 2 < 4 ? CHUNKS / 2 : 4;  // loads in flight
#pragma unroll
    for (int first = 0; first < CHUNKS / 2; first += TOGETHER) {
      uint4 codes[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) codes[i] = *reinterpret_cast<const uint4*>(v + offset(first + i, thread));
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int channel = 16 * (2 * (first + i) + thread / 16 % 2);
        uint8_t* const panel = to + channel / HalfBlock::CHANNELS * TOKENS * HALF_PANEL;
        const int at = ptx::swizzled<HALF_PANEL>(token(thread), 2 * (channel % HalfBlock::CHANNELS));
        const uint4 x = FINITE ? codes[i] : finite(codes[i]);
        uint4 low, high;
        ptx::halves_of_e4m3(x.x, low.x, low.y), ptx::halves_of_e4m3(x.y, low.z, low.w);
        ptx::halves_of_e4m3(x.z, high.x, high.y), ptx::halves_of_e4m3(x.w, high.z, high.w);
        *reinterpret_cast<uint4*>(panel + at) = low;
        *reinterpret_cast<uint4*>(panel + (at ^ 16)) = high;
      }
    }
  }

  // Makes the thread's elements zero that are not finite.
  __device__ static void remove(uint8_t* tokens, int thread) {
#pragma unroll 1
    for (int i = 0; i < CHUNKS / 2; ++i) {
      uint4& x = *reinterpret_cast<uint4*>(tokens + offset(i, thread));
      x = finite(x);
    }
  }

 private:
  // Where the thread's chunk i is.
  __device__ static int offset(int i, int thread) {
    const int byte = 16 * (2 * i + thread / 16 % 2);
    return byte / PANEL * TOKENS * PANEL + ptx::swizzled<PANEL>(token(thread), byte % PANEL);
  }

  __device__ static uint4 finite(const uint4& x) {
    return {finite_elements<Element>(x.x), finite_elements<Element>(x.y), finite_elements<Element>(x.z), finite_elements<Element>(x.w)};
  }
};

}  // namespace fp8attn
