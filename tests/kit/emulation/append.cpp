// The append kernel: the launches of a call, one after another. Variant::int8: keys are int8, else e4m3;
// half: tokens are halves, else bfloat16.
#include "instance.h"
#include "run.h"

namespace fp8attn {

// CTAs run one after another, so those of few tokens may have several pages each.
constexpr long PATIENCE = 20000;

bool run(const AppendParams& p, int ctas) {
  using T = std::conditional_t<Variant::half, __half, __nv_bfloat16>;
  return for_each_step(p, ctas, [](const AppendParams& step, int its_ctas) {
           return cta::run(append<Instance, Variant::int8, T>, step, its_ctas, APPENDERS<Instance::config>, 1, PATIENCE) ? cudaSuccess : cudaErrorUnknown;
         }) == cudaSuccess;
}

}  // namespace fp8attn

// Returns whether the kernels ended.
extern "C" bool append(const fp8attn::AppendParams* params, int bytes, int ctas) {
  if (bytes != sizeof(*params) || params->int8 != fp8attn::Variant::int8 || params->half != fp8attn::Variant::half) abort();
  return fp8attn::run(*params, ctas);
}
