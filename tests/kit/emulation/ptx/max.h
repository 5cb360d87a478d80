// The larger of two numbers, or NaN if one of them is NaN.
#pragma once

#include "cta.h"

namespace fp8attn::ptx {

inline float max_nan(float a, float b) { return a != a || a > b ? a : b; }

}  // namespace fp8attn::ptx
