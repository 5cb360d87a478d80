// A tensor map that a CPU can read: the arguments of cuTensorMapEncodeTiled, for boxes of bytes.
#pragma once

#include <cuda.h>

#include <cstdint>

struct TensorMapOnCpu {
  uint8_t* data;
  uint64_t type, rank, swizzle, sizes[4];  // innermost dimension first, as below
  struct {
    uint32_t step, size;
  } box[4];
  uint64_t strides[3], unused;  // without the innermost, which is 1
};
static_assert(sizeof(TensorMapOnCpu) == sizeof(CUtensorMap));
