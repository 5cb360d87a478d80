// wgmma by the fragments and descriptors of the PTX ISA. A warp's products are computed when it commits them, or as
// late as when it waits for them. Until then the accumulators hold NaN. Operands, also those in registers, are read
// when the product is computed.
#pragma once

#include "mbarrier.h"
#include "operand.h"

namespace fp8attn::ptx {

// A wgmma product, as one thread has it: its accumulators, and its registers of A if A has no descriptor.
struct Product {
  uint32_t* d;
  int n;
  const uint32_t* a;
  uint64_t a_descriptor, b_descriptor;
  bool add, int8, is_unsigned;
  int half;         // of A and B: 1 bfloat16, 2 half; 0: elements of 8 bits
  bool transposed;  // B, which then isn't K-major
};

void start_product(const Product& product);
void wgmma_commit();
void wgmma_wait_but(int pending);

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

inline void wgmma_fence() {}

template <int PENDING>
inline void wgmma_wait() {
  wgmma_wait_but(PENDING);
}

template <typename T, int N>
inline void wgmma_touch(T (&)[N]) {}

}  // namespace fp8attn::ptx
