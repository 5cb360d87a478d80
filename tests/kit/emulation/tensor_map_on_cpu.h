// A tensor map that a CPU can read: what cuTensorMapEncodeTiled is told of boxes of bytes.
#pragma once

#include <cuda.h>

#include <cstdint>

struct TensorMapOnCpu {
  uint8_t* data;
  uint64_t type, rank, swizzle, sizes[4];  // from the innermost dimension out, as below
  struct {
    uint32_t step, size;
  } box[4];
  uint64_t strides[3], unused;  // the innermost, 1, left out
};
static_assert(sizeof(TensorMapOnCpu) == sizeof(CUtensorMap));
