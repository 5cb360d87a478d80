// The mean that fp8attn/cuda/tile/quantize.h subtracts from each channel of V.
#include "tile/quantize.h"

extern "C" void shifts(const float* mean, const float* low, const float* high, float* shift, int channels) {
  for (int c = 0; c < channels; ++c) shift[c] = fp8attn::removable(fp8attn::coarse(mean[c], low[c], high[c]));
}
