// wgmma by the fragments and descriptors of the PTX ISA. A warp's products are computed when it commits them, or as
// late as when it waits for them. Until then the accumulators hold NaN. Operands, also those in registers, are read
// when the product is computed.
#pragma once

#include "mbarrier.h"
#include "operand.h"

namespace fp8attn::ptx {

inline void start_product(cta::Product&& product) {
  cta::meet_in_warpgroup();
  auto& products = cta::current->products;
  bool written = false;
  products.for_all([&](const cta::Product& other) { written |= other.d == product.d; });
  if (!written) {
    if (product.add) product.before.assign(product.d, product.d + product.n / 2);
    std::fill_n(product.d, product.n / 2, ~0u);
  }
  products.open.push_back(std::move(product));
}

template <int N, typename T, bool IS_UNSIGNED = false>
struct AnyWgmma {
  template <bool ADD>
  static void run(T (&d)[N / 2], uint64_t a, uint64_t b) {
    start_product({reinterpret_cast<uint32_t*>(d), N, nullptr, a, b, ADD, std::is_same_v<T, int32_t>, IS_UNSIGNED, 0, false});
  }
};

template <int N>
struct Wgmma : AnyWgmma<N, float> {
  using AnyWgmma<N, float>::run;

  template <bool ADD>
  static void run(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
    start_product({reinterpret_cast<uint32_t*>(d), N, a, 0, b, ADD, false, false, 0, false});
  }
};

template <typename T, int N>
struct WgmmaHalf {
  static constexpr int half = std::is_same_v<T, __half> ? 2 : 1;

  template <bool ADD>
  static void run(float (&d)[N / 2], uint64_t a, uint64_t b) {
    start_product({reinterpret_cast<uint32_t*>(d), N, nullptr, a, b, ADD, false, false, half, false});
  }

  template <bool ADD>
  static void run_transposed(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
    start_product({reinterpret_cast<uint32_t*>(d), N, a, 0, b, ADD, false, false, half, true});
  }
};

template <int N>
using WgmmaInt8 = AnyWgmma<N, int32_t>;

template <int N>
using WgmmaUint8 = AnyWgmma<N, int32_t, true>;

// Address of the byte (row, column) of an operand.
inline const uint8_t* operand_at(uint64_t descriptor, int row, int column) {
  const auto field = [&](int from) { return int(descriptor >> from & 0x3FFF) << 4; };
  const int start = field(0), leading = field(16), group = field(32), mode = descriptor >> 62;
  int at = start + row / 8 * group;
  if (mode == 0) {
    at += row % 8 * 16 + column / 16 * leading + column % 16;
  } else {  // 1: 128 bytes, 3: 32
    const int width = 256 >> mode;
    at += row % 8 * width + column;
    at ^= (at >> 7 & ((16 >> mode) - 1)) << 4;
  }
  if (at >= cta::SHARED) abort();
  return cta::shared_memory(seen_by_engines) + at;
}

inline float operand_value(const cta::Product& product, uint8_t code) {
  return product.is_unsigned ? code : product.int8 ? int8_t(code) : e4m3_value(code);
}

inline float half_operand_value(const cta::Product& product, uint16_t bits) {
  return product.half == 2 ? half_value(bits) : __uint_as_float(uint32_t(bits) << 16);
}

// An element of 16 bits of an operand that is K-major, or of a transposed B: PTX ISA, "Strides" of matrix descriptors.
// Transposed, rows of 64 columns have 128 bytes; 64 columns are `leading` bytes apart, and eight rows `group` bytes.
inline uint16_t half_bits(uint64_t descriptor, bool transposed, int row, int k) {
  if (!transposed) return *reinterpret_cast<const uint16_t*>(operand_at(descriptor, row, 2 * k));
  const auto field = [&](int from) { return int(descriptor >> from & 0x3FFF) << 4; };
  if (descriptor >> 62 != 1) abort();
  int at = field(0) + row / 64 * field(16) + k / 8 * field(32) + k % 8 * 128 + row % 64 * 2;
  at ^= (at >> 7 & 7) << 4;
  if (at >= cta::SHARED) abort();
  return *reinterpret_cast<const uint16_t*>(cta::shared_memory(seen_by_engines) + at);
}

// Computes one product of a warp, which has 16 of the 64 rows. Lane 4g + c has rows g and g + 8 of A, and columns
// 8j + 2c + {0, 1} of D.
inline void multiply(cta::Product* const (&lanes)[32], int warp) {
  constexpr int MOST = 32, WIDEST = 256;
  const cta::Product& first = *lanes[0];
  const int K = first.half ? 16 : 32;
  static float a[16][MOST], b[MOST][WIDEST], sums[16][WIDEST], values[256];
  for (int code = 0; code < 256; ++code) values[code] = operand_value(first, code);
  for (int l = 0; l < 32; ++l) {
    const cta::Product& mine = *lanes[l];
    if (mine.a_descriptor != first.a_descriptor || mine.b_descriptor != first.b_descriptor) abort();
    for (int i = 0; i < 8 && mine.a != nullptr && mine.half; ++i)
      a[l / 4 + i / 2 % 2 * 8][i / 4 * 8 + l % 4 * 2 + i % 2] = half_operand_value(mine, mine.a[i / 2] >> i % 2 * 16);
    for (int i = 0; i < 16 && mine.a != nullptr && !mine.half; ++i) a[l / 4 + i / 4 % 2 * 8][i / 8 * 16 + l % 4 * 4 + i % 4] = values[mine.a[i / 4] >> i % 4 * 8 & 255];
  }
  if (first.a == nullptr) {
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < K; ++k)
        a[row][k] = first.half ? half_operand_value(first, half_bits(first.a_descriptor, false, 16 * warp + row, k)) : values[*operand_at(first.a_descriptor, 16 * warp + row, k)];
  }
  for (int k = 0; k < K; ++k)
    for (int n = 0; n < first.n; ++n)
      b[k][n] = first.half ? half_operand_value(first, half_bits(first.b_descriptor, first.transposed, n, k)) : values[*operand_at(first.b_descriptor, n, k)];
  memset(sums, 0, sizeof(sums));
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < K; ++k)
      for (int n = 0; n < first.n; ++n) sums[row][n] += a[row][k] * b[k][n];
  for (int l = 0; l < 32; ++l) {
    const cta::Product& mine = *lanes[l];
    if (!mine.before.empty()) memcpy(mine.d, mine.before.data(), mine.before.size() * sizeof(uint32_t));
    for (int i = 0; i < mine.n / 2; ++i) {
      const float sum = sums[l / 4 + i / 2 % 2 * 8][i / 4 * 8 + l % 4 * 2 + i % 2];
      if (mine.int8) {
        reinterpret_cast<int32_t&>(mine.d[i]) = (mine.add ? int32_t(mine.d[i]) : 0) + int32_t(sum);
      } else {
        float& d = reinterpret_cast<float&>(mine.d[i]);
        d = mine.add ? d + sum : sum;
        if (d != d) mine.d[i] = 0x7FFFFFFF;  // as tensor cores do
      }
    }
  }
}

// Computes the products of all groups of a warp but the last `pending`.
inline void multiply_but(void** all, int pending) {
  const auto thread = [&](int lane) -> cta::Thread& { return *static_cast<cta::Thread*>(all[lane]); };
  while (int(thread(0).products.committed.size()) > pending) {
    for (size_t i = 0; i < thread(0).products.committed.front().size(); ++i) {
      cta::Product* lanes[32];
      for (int l = 0; l < 32; ++l) lanes[l] = &thread(l).products.committed.front().at(i);
      multiply(lanes, thread(0).index % 128 / 32);
    }
    for (int l = 0; l < 32; ++l) thread(l).products.committed.erase(thread(l).products.committed.begin());
  }
}

inline void wgmma_fence() {}

inline void wgmma_commit() {
  cta::current->products.commit();
  cta::together(cta::current, [](void** all) {
    if (cta::at_once()) multiply_but(all, 0);
  });
}

template <int PENDING>
inline void wgmma_wait() {
  cta::together(cta::current, [](void** all) { multiply_but(all, PENDING); });
}

template <typename T, int N>
inline void wgmma_touch(T (&)[N]) {}

}  // namespace fp8attn::ptx
