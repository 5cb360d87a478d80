// TMA by its definition. Copies happen at some later time. Until then the destination holds NaN.
#pragma once

#include "../tensor_map_on_cpu.h"
#include "mbarrier.h"

namespace fp8attn::ptx {

struct Place {
  int at[4];  // coordinates of a box in its tensor, innermost dimension first
};

void load_box(void* to, const CUtensorMap& its_map, uint64_t* barrier, Place place);

inline void tma_prefetch(const CUtensorMap&) {}
inline void tma_load_ahead(const CUtensorMap&, int, int) {}
inline void tma_load_ahead(const CUtensorMap&, int, int, int, int) {}

inline void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int x, int y) { load_box(to, map, barrier, {x, y}); }

inline void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int x, int y, int z, int w) { load_box(to, map, barrier, {x, y, z, w}); }

void bulk_load(void* to, const void* from, uint32_t count, uint64_t* barrier);
void tma_store(const CUtensorMap& its_map, const void* from, int x, int y, int z, int w);
void bulk_store(void* to, const void* from, uint32_t count);
void tma_store_commit();
void store_but(int pending);

template <int PENDING>
inline void tma_store_wait() {
  store_but(PENDING);
}

}  // namespace fp8attn::ptx
