// How a kernel runs: its one template parameter. Rendered from fp8attn/cuda/configs.py.
#pragma once

namespace fp8attn {

struct HopperConfig {
  int head_dim;   // of Q and K in shared memory: 64, 128, 192 or 256
  int value_dim;  // of V in shared memory: 64, 128, 192 or 256
  int consumers;  // warpgroups of 64 query rows
  int stages;     // of K and V in shared memory
  int registers;  // of a consumer's thread
  bool overlap;   // next block's scores are issued behind this block's P * V
  int exact;      // of every four groups of 16 keys, those whose exponentials are exact; the others' e4m3 codes are written directly
  bool general;   // masks, scales per key, negative softmax scales; without, none of them
};

}  // namespace fp8attn
