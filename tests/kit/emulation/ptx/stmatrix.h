// stmatrix by its definition.
#pragma once

#include "mbarrier.h"

namespace fp8attn::ptx {

inline void stmatrix(void* row, const uint32_t (&matrices)[4]) {
  struct Lane {
    const uint32_t* matrices;
    uint8_t* row;
  } mine{matrices, static_cast<uint8_t*>(row)};
  if (uintptr_t(row) % 16 != 0) abort();
  cta::together(&mine, [](void** all) {
    const auto lane = [&](int i) -> Lane& { return *static_cast<Lane*>(all[i]); };
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 4; ++i) memcpy(lane(8 * i + l / 4).row + 4 * (l % 4), lane(l).matrices + i, 4);
    }
  });
}

}  // namespace fp8attn::ptx
