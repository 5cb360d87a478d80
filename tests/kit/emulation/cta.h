// A CTA or a cluster of CTAs on a CPU: threads are fibers, and warps run in a random order and ahead of each other.
// CUDA's built-in variables and functions, for g++.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#undef __device__
#undef __global__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#undef __align__
#undef __noinline__
#define __device__
#define __global__
#define __shared__
#define __launch_bounds__(...)
#define __noinline__
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

using std::max;
using std::min;
using std::signbit;

namespace cta {

struct Index {
  int x;
};

struct Thread {
  int index, rank;  // of the thread in its CTA, and of the CTA in its cluster
};

extern Thread* current;
extern Index block, grid;
extern int threads, cluster;  // threads of a CTA, CTAs of a cluster

constexpr int64_t SHARED = 1 << 18;  // bytes of shared memory per CTA

// The shared memory of the current thread's CTA.
inline uint8_t* shared_memory(uint8_t* of_all) { return of_all + current->rank * SHARED; }

// Lets other threads run.
void yield();

// Lets other warps run for a while, at random.
void perhaps_rest();

// Lets other threads run until the barrier's phase has another parity.
void wait_for_phase(const uint64_t* barrier, uint32_t parity);

// Barrier `id` of `count` threads of the CTA.
void barrier(int id, int count);

// Barrier of all threads of the cluster, in two halves.
void cluster_arrive();
void cluster_wait();

// Waits for the 32 lanes of the warp. The last lane calls f with the arguments of all lanes.
void together(void* argument, void (*f)(void** arguments));

// Whether this is the last of the 32 lanes to get here. Does not wait.
bool is_last_of_warp();

// The n-th call of each of a warpgroup's four warps must have the same call path, or the run fails: PTX's
// `.sync.aligned` of a warpgroup.
void meet_in_warpgroup();

}  // namespace cta

#define threadIdx (cta::Index{cta::current->index})
#define blockIdx (cta::Index{cta::block.x + cta::current->rank})
#define gridDim (cta::grid)

template <typename T>
T __ldcg(const T* from) {
  return *from;
}

inline void __syncthreads() { cta::barrier(0, cta::threads); }

inline void __syncwarp() {
  cta::together(nullptr, [](void**) {});
}

template <typename T>
T __shfl_xor_sync(unsigned, T x, int lanes) {
  struct Lane {
    T x, received;
    int lanes;
  } mine{x, x, lanes};
  cta::together(&mine, [](void** all) {
    for (int i = 0; i < 32; ++i) static_cast<Lane*>(all[i])->received = static_cast<Lane*>(all[i ^ static_cast<Lane*>(all[i])->lanes])->x;
  });
  return mine.received;
}

template <typename T>
T __shfl_sync(unsigned, T x, int lane, int width = 32) {
  struct Lane {
    T x, received;
    int lane, width;
  } mine{x, x, lane, width};
  cta::together(&mine, [](void** all) {
    for (int i = 0; i < 32; ++i) {
      Lane& to = *static_cast<Lane*>(all[i]);
      to.received = static_cast<Lane*>(all[i / to.width * to.width + to.lane % to.width])->x;
    }
  });
  return mine.received;
}

inline int __any_sync(unsigned, int x) {
  cta::together(&x, [](void** all) {
    bool any = false;
    for (int i = 0; i < 32; ++i) any |= *static_cast<int*>(all[i]) != 0;
    for (int i = 0; i < 32; ++i) *static_cast<int*>(all[i]) = any;
  });
  return x;
}

inline int __all_sync(unsigned, int x) {
  cta::together(&x, [](void** all) {
    bool every = true;
    for (int i = 0; i < 32; ++i) every &= *static_cast<int*>(all[i]) != 0;
    for (int i = 0; i < 32; ++i) *static_cast<int*>(all[i]) = every;
  });
  return x;
}

inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  cta::together(&x, [](void** all) {
    unsigned most = 0;
    for (int i = 0; i < 32; ++i) most = max(most, *static_cast<unsigned*>(all[i]));
    for (int i = 0; i < 32; ++i) *static_cast<unsigned*>(all[i]) = most;
  });
  return x;
}

inline unsigned __vmaxu2(unsigned a, unsigned b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }

inline int __reduce_add_sync(unsigned, int x) {
  cta::together(&x, [](void** all) {
    int sum = 0;
    for (int i = 0; i < 32; ++i) sum += *static_cast<int*>(all[i]);
    for (int i = 0; i < 32; ++i) *static_cast<int*>(all[i]) = sum;
  });
  return x;
}

inline unsigned __ballot_sync(unsigned, int x) {
  unsigned votes = x;
  cta::together(&votes, [](void** all) {
    unsigned every = 0;
    for (int i = 0; i < 32; ++i) every |= unsigned(*static_cast<unsigned*>(all[i]) != 0) << i;
    for (int i = 0; i < 32; ++i) *static_cast<unsigned*>(all[i]) = every;
  });
  return votes;
}

inline int __vimax3_s32(int a, int b, int c) { return max(max(a, b), c); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }

inline void __threadfence() {}

inline int atomicAdd(int* to, int x) {
  const int before = *to;
  *to += x;
  return before;
}

inline unsigned atomicOr(unsigned* to, unsigned x) {
  const unsigned before = *to;
  *to |= x;
  return before;
}

inline unsigned atomicMax(unsigned* to, unsigned x) {
  const unsigned before = *to;
  *to = max(before, x);
  return before;
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __log2f(float x) { return log2f(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }

inline unsigned __float_as_uint(float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline float __uint_as_float(unsigned bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline int __float_as_int(float x) { return __float_as_uint(x); }
inline float __int_as_float(int bits) { return __uint_as_float(bits); }

inline unsigned __vcmpeq2(unsigned a, unsigned b) { return ((a ^ b) & 0xFFFF ? 0 : 0xFFFF) | ((a ^ b) >> 16 ? 0 : 0xFFFF0000); }

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selectors) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= unsigned(bytes >> 8 * (selectors >> 4 * i & 7) & 255) << 8 * i;
  return found;
}

// Computed in float32, which holds the products and sums of halves, or rounds them such that the second rounding is
// harmless.
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  const float2 x = __half22float2(a), y = __half22float2(b), z = __half22float2(c);
  return __floats2half2_rn(x.x * y.x + z.x, x.y * y.y + z.y);
}

inline float half_value(uint16_t bits) {
  __half_raw raw;
  raw.x = bits;
  return __half2float(__half(raw));
}

inline float e4m3_value(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = (code & 127) == 127 ? NAN : exponent > 0 ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
  return code & 128 ? -magnitude : magnitude;
}
