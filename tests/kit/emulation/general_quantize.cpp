// The general quantizer: its launches, one after another.
#include "instance.h"
#include "run.h"

namespace fp8attn {

// A CTA takes a few rounds for each step that its threads wait for.
constexpr int PATIENCE = 1000;
constexpr int SLOTS = 3;  // CTAs of rows, which have several blocks each

template <typename T>
bool run(const GeneralQuantizeParams& p, int ctas) {
  const GeneralGrid grid(p);
  if (grid.kv_heads > 0 && (!cta::run(general_measure<Instance, T>, p, grid.measuring_ctas(), MEASURERS, 1, PATIENCE) ||
                            !cta::run(general_finish<Instance>, p, grid.finishing_ctas(), MEASURERS, 1, PATIENCE)))
    return false;
  if constexpr (sizeof(T) == 2) {
    if (are_staged(p)) {
      if (grid.kv_heads > 0 && !cta::run(general_write_values<T>, p, grid.value_writing_ctas(), WRITERS, 1, PATIENCE)) return false;
      return with_part(p, [&]<int PART>(std::integral_constant<int, PART>) {
        return cta::run(p.int8 ? general_write_rows<PART, true, T> : general_write_rows<PART, false, T>, p, std::min(grid.staged_blocks(p), SLOTS), RowUnits<PART>(p.head_dim).threads(), 1, PATIENCE);
      });
    }
  }
  return cta::run(p.int8 ? general_write<Instance, true, T> : general_write<Instance, false, T>, p, ctas, WRITERS, 1, PATIENCE);
}

}  // namespace fp8attn

// Returns whether the kernels ended.
extern "C" bool quantize(const fp8attn::GeneralQuantizeParams* params, int bytes, int ctas) {
  using fp8attn::OutType;
  if (bytes != sizeof(*params)) abort();
  return params->type == OutType::bf16  ? fp8attn::run<__nv_bfloat16>(*params, ctas)
         : params->type == OutType::f16 ? fp8attn::run<__half>(*params, ctas)
                                        : fp8attn::run<float>(*params, ctas);
}
