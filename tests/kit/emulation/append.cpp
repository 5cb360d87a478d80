// The append kernel: the launches of a call, one after another.
#include "instance.h"
#include "run.h"

namespace fp8attn {

// CTAs run one after another, so those of few tokens may have several pages each.
constexpr long PATIENCE = 20000;

template <bool INT8, typename T>
bool run(const AppendParams& p, int ctas) {
  return for_each_step(p, ctas, [](const AppendParams& step, int its_ctas) {
           return cta::run(append<Instance, INT8, T>, step, its_ctas, APPENDERS<Instance::config>, 1, PATIENCE) ? cudaSuccess : cudaErrorUnknown;
         }) == cudaSuccess;
}

}  // namespace fp8attn

// Returns whether the kernels ended.
extern "C" bool append(const fp8attn::AppendParams* params, int bytes, int ctas) {
  if (bytes != sizeof(*params)) abort();
  if (params->int8) return params->half ? fp8attn::run<true, __half>(*params, ctas) : fp8attn::run<true, __nv_bfloat16>(*params, ctas);
  return params->half ? fp8attn::run<false, __half>(*params, ctas) : fp8attn::run<false, __nv_bfloat16>(*params, ctas);
}
