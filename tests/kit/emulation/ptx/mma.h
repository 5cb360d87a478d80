// mma.sync by the fragments of the PTX ISA: lane 4g + c has rows g and g + 8 of A, column g of B, and columns 2c and 2c
// + 1 of D.
#pragma once

#include "cta.h"

namespace fp8attn::ptx {

// Operands have K summands, K / 8 of them in each word of A and B. F(word, i) is the i-th value of a word.
template <int K, typename D, typename F>
void multiply_add(D* d, const uint32_t* a, const uint32_t* b, F) {
  struct Lane {
    D* d;
    const uint32_t *a, *b;
  } mine{d, a, b};
  cta::together(&mine, [](void** all) {
    constexpr int per_word = K / 8;
    float rows[16][K], columns[8][K];
    for (int l = 0; l < 32; ++l) {
      const Lane& lane = *static_cast<Lane*>(all[l]);
      for (int i = 0; i < per_word; ++i) {
        for (int word = 0; word < 4; ++word) rows[l / 4 + 8 * (word % 2)][K / 2 * (word / 2) + l % 4 * per_word + i] = F()(lane.a[word], i);
        for (int word = 0; word < 2; ++word) columns[l / 4][K / 2 * word + l % 4 * per_word + i] = F()(lane.b[word], i);
      }
    }
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 4; ++i) {
        float sum = 0.0f;
        for (int k = 0; k < K; ++k) sum += rows[l / 4 + 8 * (i / 2)][k] * columns[l % 4 * 2 + i % 2][k];
        static_cast<Lane*>(all[l])->d[i] += D(sum);
      }
    }
  });
}

inline void mma_f16(float* d, const uint32_t* a, const uint32_t* b) {
  multiply_add<16>(d, a, b, [](uint32_t word, int i) { return half_value(word >> 16 * i); });
}

inline void mma_bf16(float* d, const uint32_t* a, const uint32_t* b) {
  multiply_add<16>(d, a, b, [](uint32_t word, int i) { return __uint_as_float(word >> 16 * i << 16); });
}

inline void mma_e4m3(float* d, const uint32_t* a, const uint32_t* b) {
  multiply_add<32>(d, a, b, [](uint32_t word, int i) { return e4m3_value(word >> 8 * i); });
}

inline void mma_e4m3(uint32_t* d, const uint32_t* a, const uint32_t* b) {
  float sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = half_value(d[i / 2] >> i % 2 * 16);
  mma_e4m3(sums, a, b);
  for (int i = 0; i < 2; ++i) {
    const __half2 halves = __floats2half2_rn(sums[2 * i], sums[2 * i + 1]);
    memcpy(&d[i], &halves, 4);
  }
}

inline void mma_s8(int32_t* d, const uint32_t* a, const uint32_t* b) {
  // sums of 32 products are exact
  multiply_add<32>(d, a, b, [](uint32_t word, int i) { return float(int8_t(word >> 8 * i)); });
}

}  // namespace fp8attn::ptx
