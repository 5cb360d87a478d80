// The copy engine. PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.tensor".
#pragma once

#include <cuda.h>

#include "mbarrier.h"

namespace fp8attn::ptx {

__device__ inline void tma_prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

__device__ inline void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
               "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(barrier)), "r"(x), "r"(y)
               : "memory");
}

__device__ inline void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
               "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

}  // namespace fp8attn::ptx
