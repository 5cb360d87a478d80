// nvcuda::wmma with another fragment layout than a GPU's: every lane has the whole operands, and eight adjacent
// elements of an accumulator.
#pragma once

#include <type_traits>

#include "cta.h"

namespace nvcuda::wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
  float x[16][16];
};

template <>
struct fragment<accumulator, 16, 16, 16, float> {
  static constexpr int num_elements = 8;
  float x[8];
};

using Sums = fragment<accumulator, 16, 16, 16, float>;

inline int element(int i) { return threadIdx.x % 32 * 8 + i; }

inline void fill_fragment(Sums& f, float value) { std::fill_n(f.x, 8, value); }

template <typename Use, typename Layout>
void load_matrix_sync(fragment<Use, 16, 16, 16, __half, Layout>& f, const __half* from, unsigned pitch) {
  if (uintptr_t(from) % 32 != 0 || pitch % 8 != 0) abort();
  __syncwarp();
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) f.x[i][j] = __half2float(from[std::is_same_v<Layout, row_major> ? i * pitch + j : j * pitch + i]);
  }
}

inline int place(int i, unsigned pitch, layout_t layout) {
  const int row = element(i) / 16, column = element(i) % 16;
  return layout == mem_row_major ? row * pitch + column : column * pitch + row;
}

inline void load_matrix_sync(Sums& f, const float* from, unsigned pitch, layout_t layout) {
  __syncwarp();
  for (int i = 0; i < 8; ++i) f.x[i] = from[place(i, pitch, layout)];
}

inline void store_matrix_sync(float* to, const Sums& f, unsigned pitch, layout_t layout) {
  for (int i = 0; i < 8; ++i) to[place(i, pitch, layout)] = f.x[i];
  __syncwarp();
}

template <typename A, typename B>
void mma_sync(Sums& d, const A& a, const B& b, const Sums& c) {
  for (int i = 0; i < 8; ++i) {
    float sum = c.x[i];
    for (int k = 0; k < 16; ++k) sum += a.x[element(i) / 16][k] * b.x[k][element(i) % 16];
    d.x[i] = sum;
  }
}

}  // namespace nvcuda::wmma
