// TMA by its definition. Copies happen at some later time. Until then the destination holds NaN.
#pragma once

#include "../tensor_map_on_cpu.h"
#include "mbarrier.h"

namespace fp8attn::ptx {

struct Place {
  int at[4];  // coordinates of a box in its tensor, innermost dimension first
};

// Calls f(global address, offset in shared memory, number of bytes inside the tensor) for every 16-byte chunk of the
// box, row by row.
template <typename F>
void for_chunks(const TensorMapOnCpu& map, uint8_t* box, Place place, F&& f) {
  const int64_t width = map.box[0].size;
  int64_t rows = 1;
  for (uint64_t i = 1; i < map.rank; ++i) rows *= map.box[i].size;
  for (int64_t row = 0; row < rows; ++row) {
    uint8_t* from = map.data;
    bool exists = true;
    int64_t rest = row;
    for (uint64_t i = 1; i < map.rank; ++i) {
      const int64_t at = place.at[i] + rest % map.box[i].size;
      rest /= map.box[i].size;
      exists &= at >= 0 && at < int64_t(map.sizes[i]);
      from += at * int64_t(map.strides[i - 1]);
    }
    for (int64_t column = 0; column < width; column += 16) {
      const int64_t at = place.at[0] + column, address = box - bytes + row * width + column;
      // CU_TENSOR_MAP_SWIZZLE_32B is 1, _128B 3
      const int64_t swizzled = address ^ (address >> 7 & ((1 << map.swizzle) - 1)) << 4;
      f(from + at, swizzled, exists && at >= 0 ? int(std::clamp<int64_t>(map.sizes[0] - at, 0, 16)) : 0);
    }
  }
}

inline int64_t box_bytes(const TensorMapOnCpu& map) {
  int64_t count = 1;
  for (uint64_t i = 0; i < map.rank; ++i) count *= map.box[i].size;
  return count;
}

inline TensorMapOnCpu on_cpu(const CUtensorMap& map) {
  TensorMapOnCpu found;
  memcpy(&found, &map, sizeof(found));
  return found;
}

inline void tma_prefetch(const CUtensorMap&) {}
inline void tma_load_ahead(const CUtensorMap&, int, int) {}
inline void tma_load_ahead(const CUtensorMap&, int, int, int, int) {}

inline void load_box(void* to, const CUtensorMap& its_map, uint64_t* barrier, Place place) {
  const TensorMapOnCpu map = on_cpu(its_map);
  uint8_t* box = static_cast<uint8_t*>(to);
  if ((box - bytes) % 128 != 0 || place.at[0] % 16 != 0) abort();
  hide_from_all(box, box_bytes(map));
  cta::later([=] {
    for_chunks(map, box, place, [](const uint8_t* from, int64_t chunk, int count) {
      uint8_t brought[16] = {};
      memcpy(brought, from, count);
      write_by_engine(bytes + chunk, brought, 16);
    });
    mbarrier_complete(barrier, box_bytes(map));
  });
}

inline void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int x, int y) { load_box(to, map, barrier, {x, y}); }

inline void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int x, int y, int z, int w) { load_box(to, map, barrier, {x, y, z, w}); }

inline void bulk_load(void* to, const void* from, uint32_t count, uint64_t* barrier) {
  if (uintptr_t(to) % 16 != 0 || uintptr_t(from) % 16 != 0 || count % 16 != 0) abort();
  hide_from_all(to, count);
  cta::later([=] {
    write_by_engine(to, from, count);
    mbarrier_complete(barrier, count);
  });
}

inline void tma_store(const CUtensorMap& its_map, const void* from, int x, int y, int z, int w) {
  uint8_t* box = const_cast<uint8_t*>(static_cast<const uint8_t*>(from));
  if ((box - bytes) % 128 != 0 || x % 16 != 0) abort();
  cta::current->stores.open.push_back([=, map = on_cpu(its_map)] {
    for_chunks(map, box, {x, y, z, w}, [](uint8_t* to, int64_t chunk, int count) { memcpy(to, seen_by_engines + chunk, count); });
  });
}

inline void bulk_store(void* to, const void* from, uint32_t count) {
  if (uintptr_t(to) % 16 != 0 || uintptr_t(from) % 16 != 0 || count % 16 != 0) abort();
  const int64_t at = static_cast<const uint8_t*>(from) - bytes;
  cta::current->stores.open.push_back([=] { memcpy(to, seen_by_engines + at, count); });
}

inline void store_but(int pending) {
  auto& groups = cta::current->stores.committed;
  for (; int(groups.size()) > pending; groups.erase(groups.begin())) {
    for (const cta::Deed& store : groups.front()) store();
  }
}

inline void tma_store_commit() {
  cta::current->stores.commit();
  if (cta::at_once()) store_but(0);
}

template <int PENDING>
inline void tma_store_wait() {
  store_but(PENDING);
}

}  // namespace fp8attn::ptx
