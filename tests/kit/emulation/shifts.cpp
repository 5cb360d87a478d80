// What fp8attn/cuda/tile/quantize.h takes from channels of V, for channels one after another.
#include "tile/quantize.h"

extern "C" void shifts(const float* mean, const float* low, const float* high, float* shift, int channels) {
  for (int c = 0; c < channels; ++c) shift[c] = fp8attn::removable(fp8attn::coarse(mean[c], low[c], high[c]));
}
