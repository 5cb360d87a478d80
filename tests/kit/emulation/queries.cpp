// Queries of fp8attn/cuda/tile/quantize.h: one tile of one warpgroup.
#include "run.h"
#include "tile/quantize.h"

namespace fp8attn {

float scales[ROWS];

// Reads p.q with its row stride and length, from row p.causal_offset on. Codes of all rows of the tile go to p.out, one
// row after another.
template <typename T, int DIM, bool INT8>
void quantize_tile(const Params p) {
  Queries<DIM, INT8> queries;
  queries.load(reinterpret_cast<const uint16_t*>(p.q), p.q_strides[2], p.causal_offset, p.q_length);
  queries.template rotate<T>();
  queries.quantize(scales, [&](int row, int column, uint4 codes) { memcpy(static_cast<uint8_t*>(p.out) + row * DIM + column, &codes, 16); });
}

template <typename T, bool INT8>
auto kernel_of(int dim) {
  return dim == 64 ? quantize_tile<T, 64, INT8> : dim == 128 ? quantize_tile<T, 128, INT8> : quantize_tile<T, 256, INT8>;
}

template <bool INT8>
auto kernel_of(int dim, bool half) {
  return half ? kernel_of<__half, INT8>(dim) : kernel_of<__nv_bfloat16, INT8>(dim);
}

}  // namespace fp8attn

extern "C" bool queries(const void* q, int64_t stride, int first, int length, int dim, bool half, bool int8, float* scale, void* codes) {
  fp8attn::Params p = {};
  p.q = static_cast<const uint8_t*>(q), p.q_strides[2] = stride, p.causal_offset = first, p.q_length = length, p.out = codes;
  if (!cta::run(int8 ? fp8attn::kernel_of<true>(dim, half) : fp8attn::kernel_of<false>(dim, half), p, 1, 128)) return false;
  memcpy(scale, fp8attn::scales, sizeof(fp8attn::scales));
  return true;
}
