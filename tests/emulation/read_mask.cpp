// What the Hopper kernel knows of a mask before it runs.
#include "read_mask.cuh"
#include "run.h"

namespace fp8attn {

template <typename T>
bool run(const Params& p, int64_t blocks) {
  return cta::run(read_blocks<T>, p, (blocks + READERS - 1) / READERS, 32 * READERS);
}

}  // namespace fp8attn

// Returns whether it came to an end.
extern "C" bool read_mask(const void* params, int bytes, int64_t blocks) {
  using namespace fp8attn;
  Params p = {};
  memcpy(&p.q, params, bytes);
  switch (p.mask_type) {
    case 0:
      return run<uint8_t>(p, blocks);
    case 1 + int(OutType::bf16):
      return run<__nv_bfloat16>(p, blocks);
    case 1 + int(OutType::f16):
      return run<__half>(p, blocks);
    default:
      return run<float>(p, blocks);
  }
}
