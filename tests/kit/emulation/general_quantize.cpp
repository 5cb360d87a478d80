// The general quantizer: its launches, one after another. Variant::type: of the tensors;
// int8: queries and keys become int8, else e4m3.
#include "instance.h"
#include "run.h"

namespace fp8attn {

// A CTA takes a few rounds for each step that its threads wait for.
constexpr int PATIENCE = 1000;
constexpr int SLOTS = 3;  // CTAs of rows, which have several blocks each

template <class Instance, typename T>
bool run(const GeneralQuantizeParams& p, int ctas) {
  const GeneralGrid grid(p);
  if (grid.kv_heads > 0 && (!cta::run(general_measure<Instance, T>, p, grid.measuring_ctas(), MEASURERS, 1, PATIENCE) ||
                            !cta::run(general_finish<Instance>, p, grid.finishing_ctas(), MEASURERS, 1, PATIENCE)))
    return false;
  if constexpr (sizeof(T) == 2) {
    if (are_staged(p)) {
      if (grid.kv_heads > 0 && !cta::run(general_write_values<T>, p, grid.value_writing_ctas(), WRITERS, 1, PATIENCE)) return false;
      return with_part(p, [&]<int PART>(std::integral_constant<int, PART>) {
        return cta::run(general_write_rows<PART, Variant::int8, T>, p, std::min(grid.staged_blocks(p), SLOTS), RowUnits<PART>(p.head_dim).threads(), 1, PATIENCE);
      });
    }
  }
  return cta::run(general_write<Instance, Variant::int8, T>, p, ctas, WRITERS, 1, PATIENCE);
}

}  // namespace fp8attn

// Returns whether the kernels ended.
extern "C" bool quantize(const fp8attn::GeneralQuantizeParams* params, int bytes, int ctas) {
  using namespace fp8attn;
  using T = std::conditional_t<Variant::type == int(OutType::bf16), __nv_bfloat16, std::conditional_t<Variant::type == int(OutType::f16), __half, float>>;
  if (bytes != sizeof(*params) || int(params->type) != Variant::type || params->int8 != Variant::int8) abort();
  return run<Instance, T>(*params, ctas);
}
