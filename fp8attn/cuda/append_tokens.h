// What the CTAs of the append kernel work on: rows of the batch, their new tokens, and the steps of a call. All of it
// but the grids follows from numbers on the device.
#pragma once

#include "config.h"
#include "params.h"
#include "tile/channels.h"
#include "tile/packed.h"
#include "tile/paged_schedule.h"

namespace fp8attn {

// Calls run(parameters, CTAs) for each launch of a call. `ctas`: of the one that quantizes pages.
template <typename Run>
cudaError_t for_each_step(const AppendParams& p, int ctas, Run&& run) {
  if (p.step == AppendStep::few) return run(p, ctas);
  const int heads = p.rows * p.kv_heads;
  AppendParams step = p;
  cudaError_t error = cudaSuccess;
  const auto next = [&](AppendStep its_step, int its_ctas) {
    step.step = its_step;
    if (error == cudaSuccess) error = run(step, its_ctas);
  };
  if (p.pages) next(AppendStep::statistics, heads), next(AppendStep::pages, ctas);
  if (p.tokens) next(AppendStep::tokens, heads);
  return error;
}

// One head of a row of the batch: `old` tokens that the cache has, and new ones up to `end`. Both are 0 without a
// sequence.
struct HeadOfRow {
  int row = 0, head = 0, sequence = 0, old = 0, end = 0, begin = 0;  // `begin`: the row's first new token among packed ones

  HeadOfRow() = default;

  __device__ HeadOfRow(const AppendParams& p, int its_row, int its_head) : row(its_row), head(its_head) {
    int length = p.length;
    if (p.cu_seqlens != nullptr) {
      begin = begin_of(p, row);
      length = max(begin_of(p, row + 1) - begin, 0);
    }
    const BatchRow numbers(p, row, length);
    sequence = numbers.sequence;
    if (numbers.exists && numbers.count <= p.most) end = numbers.end, old = numbers.end - numbers.count;
  }

  // Of heads in the order of rows. Behind the last one there are no tokens.
  __device__ static HeadOfRow at(const AppendParams& p, int index) {
    return index < p.rows * p.kv_heads ? HeadOfRow(p, index / p.kv_heads, index % p.kv_heads) : HeadOfRow();
  }

  // That of a lane. Called by a whole warp.
  __device__ HeadOfRow of_lane(int lane) const {
    HeadOfRow found;
    found.row = __shfl_sync(~0u, row, lane), found.head = __shfl_sync(~0u, head, lane), found.sequence = __shfl_sync(~0u, sequence, lane);
    found.old = __shfl_sync(~0u, old, lane), found.end = __shfl_sync(~0u, end, lane), found.begin = __shfl_sync(~0u, begin, lane);
    return found;
  }

  // Its index in tensors (N, Hkv).
  __device__ int64_t index(const AppendParams& p) const { return int64_t(sequence) * p.kv_heads + head; }
};

// A page of a head that has new tokens.
struct PageOfHead {
  HeadOfRow head;
  int page;

  // The first one that may become complete. `index`: as of HeadOfRow::at.
  __device__ static PageOfHead first_of(const AppendParams& p, int index) {
    const HeadOfRow head = HeadOfRow::at(p, index);
    return {head, head.old / SCALE_BLOCK};
  }

  // That of a CTA in a grid of pages that may become complete x heads x rows; of packed tokens, places of pages x
  // heads.
  __device__ static PageOfHead at_place(const AppendParams& p, int cta) {
    const int which = cta / p.most_pages, place = cta % p.most_pages, row = p.cu_seqlens == nullptr ? which / p.kv_heads : sequence_at<SCALE_BLOCK>(p, p.rows, place);
    const HeadOfRow head(p, row, which % p.kv_heads);
    return {head, head.old / SCALE_BLOCK + (p.cu_seqlens == nullptr ? place : max(place - first_place<SCALE_BLOCK>(begin_of(p, row), row), 0))};
  }

  __device__ bool becomes_complete() const { return page < head.end / SCALE_BLOCK; }
};

// K or V of one head: recent tokens before `old`, new ones from it on.
template <typename T>
struct HeadTokens {
  T* recent;
  const T* added;
  int64_t stride;
  int dim, old;

  __device__ const T* new_token(int token) const { return added + int64_t(token - old) * stride; }
  __device__ T* recent_token(int token) const { return recent + token % RECENT * dim; }

  __device__ static HeadTokens keys(const AppendParams& p, const HeadOfRow& of) { return make(p.k, p.k_strides, p.recent_k, p.head_dim, p, of); }
  __device__ static HeadTokens values(const AppendParams& p, const HeadOfRow& of) { return make(p.v, p.v_strides, p.recent_v, p.value_dim, p, of); }

 private:
  __device__ static HeadTokens make(const void* x, const int64_t (&strides)[3], void* recent, int dim, const AppendParams& p, const HeadOfRow& of) {
    const T* added = static_cast<const T*>(x) + of.row * strides[0] + of.head * strides[1] + of.begin * strides[2];
    return {static_cast<T*>(recent) + of.index(p) * RECENT * dim, added, strides[2], dim, of.old};
  }
};

// Stores the last new tokens of a head, as they came, 16 bytes at a time. `index`: of the thread among `threads`. A
// token has a power of two of them, some of which may be idle.
template <typename T>
__device__ void copy_tokens(const AppendParams& p, const HeadOfRow& of, int index, int threads) {
  constexpr int IN_FLIGHT = 8;
  const auto keys = HeadTokens<T>::keys(p, of), values = HeadTokens<T>::values(p, of);
  const int start = max(of.old, of.end - RECENT), of_keys = p.head_dim / CHUNK, of_both = of_keys + p.value_dim / CHUNK;
  int log = 1;
  while (1 << log < of_both) ++log;
  const int count = of.end - start << log;
#pragma unroll 1
  for (int first = index; first < count; first += IN_FLIGHT * threads) {
    uint4 loaded[IN_FLIGHT];
    const auto for_all = [&](auto&& use) {
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
        const int at = first + i * threads, token = start + (at >> log), chunk = at & (1 << log) - 1;
        const bool is_key = chunk < of_keys;
        if (at < count && chunk < of_both) use(loaded[i], is_key ? keys : values, token, CHUNK * (is_key ? chunk : chunk - of_keys));
      }
    };
    for_all([](uint4& words, const HeadTokens<T>& x, int token, int channel) { words = *reinterpret_cast<const uint4*>(x.new_token(token) + channel); });
    for_all([](uint4& words, const HeadTokens<T>& x, int token, int channel) { *reinterpret_cast<uint4*>(x.recent_token(token) + channel) = words; });
  }
}

}  // namespace fp8attn
