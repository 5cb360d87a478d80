// The kernel that adds to the LSE what K's mean adds to scores.
#include "instance.h"
#include "run.h"

namespace fp8attn {

template <typename T>
bool run(const UnsmoothLseParams& p, int ctas) {
  return cta::run(unsmooth_lse<Instance, T>, p, ctas, LSE_THREADS);
}

}  // namespace fp8attn

// Returns whether the kernel ended.
extern "C" bool unsmooth(const fp8attn::UnsmoothLseParams* params, int bytes, int ctas) {
  using fp8attn::OutType;
  if (bytes != sizeof(*params)) abort();
  return params->type == OutType::bf16  ? fp8attn::run<__nv_bfloat16>(*params, ctas)
         : params->type == OutType::f16 ? fp8attn::run<__half>(*params, ctas)
                                        : fp8attn::run<float>(*params, ctas);
}
