// movmatrix by its definition.
#pragma once

#include "cta.h"

namespace fp8attn::ptx {

inline uint32_t transposed(uint32_t two) {
  struct Lane {
    uint32_t two, moved;
  } mine{two, 0};
  cta::together(&mine, [](void** all) {
    const auto lane = [&](int i) -> Lane& { return *static_cast<Lane*>(all[i]); };
    const auto element = [&](int row, int column) { return lane(4 * row + column / 2).two >> column % 2 * 16 & 0xFFFF; };
    for (int l = 0; l < 32; ++l) lane(l).moved = element(l % 4 * 2, l / 4) | element(l % 4 * 2 + 1, l / 4) << 16;
  });
  return mine.moved;
}

}  // namespace fp8attn::ptx
