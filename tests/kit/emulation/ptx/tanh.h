#pragma once

#include <cmath>

namespace fp8attn::ptx {

inline float tanh_approx(float x) { return std::tanh(x); }

}  // namespace fp8attn::ptx
