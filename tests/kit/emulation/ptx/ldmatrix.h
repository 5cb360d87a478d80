// ldmatrix by its definition.
#pragma once

#include "mbarrier.h"

namespace fp8attn::ptx {

inline void ldmatrix(uint32_t* matrices, const void* row) {
  struct Lane {
    uint32_t* matrices;
    const uint8_t* row;
  } mine{matrices, static_cast<const uint8_t*>(row)};
  if (uintptr_t(row) % 16 != 0) abort();
  cta::together(&mine, [](void** all) {
    const auto lane = [&](int i) -> Lane& { return *static_cast<Lane*>(all[i]); };
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 4; ++i) memcpy(lane(l).matrices + i, lane(8 * i + l / 4).row + 4 * (l % 4), 4);
    }
  });
}

inline void ldmatrix_transposed(uint32_t* matrices, const void* row) {
  struct Lane {
    uint32_t* matrices;
    const uint8_t* row;
  } mine{matrices, static_cast<const uint8_t*>(row)};
  if (uintptr_t(row) % 16 != 0) abort();
  cta::together(&mine, [](void** all) {
    const auto lane = [&](int i) -> Lane& { return *static_cast<Lane*>(all[i]); };
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 2; ++j) memcpy(reinterpret_cast<uint8_t*>(lane(l).matrices + i) + 2 * j, lane(8 * i + l % 4 * 2 + j).row + 2 * (l / 4), 2);
      }
    }
  });
}

}  // namespace fp8attn::ptx
