// How a kernel runs: its one template parameter. Rendered from fp8attn/cuda/configs.py.
#pragma once

namespace fp8attn {

struct HopperConfig {
  int head_dim;   // of Q and K in shared memory: 64, 96, 128, 192 or 256
  int value_dim;  // of V in shared memory: 64, 96, 128, 192 or 256
  int consumers;  // warpgroups of 64 query rows
  int stages;     // of K and V in shared memory
  int registers;  // of a consumer's thread
  bool overlap;   // next block's scores are issued behind this block's P * V
  int exact;      // of every eight groups of 16 keys, those whose exponentials are exact; the others' e4m3 codes are written directly
  bool general;   // boolean masks, means of queries, scales per key, negative softmax scales; without, none of them
  bool int8;      // Q and K are int8, not e4m3
  bool fuse_q_quant;    // Q is bfloat16 or half, and becomes e4m3 or int8 here, every row with a scale of its own
  bool masked;    // boolean masks
  bool added;     // masks that are added to scores; of general instances
};

struct FusedSmallConfig {
  int head_dim;   // of Q, K and V: 64 or 128
  int cluster;    // CTAs that share keys and values
  int consumers;  // warpgroups of a CTA; a cluster has one for every 16 channels of K and of V
  int exact;      // as above
};

struct QuantizeConfig {
  int token_chunks;  // of 512 tokens, at most
  int ctas;    // of an SM, at least: what registers must leave room for
  bool int8;   // K becomes int8, not e4m3
};

// Where e4m3 becomes half: in shared memory, once for a CTA; in registers, on the way to the tensor core; nowhere.
enum class Operands : int { shared, registers, native };

struct PortableConfig {
  int head_dim;   // of Q and K in shared memory: 64, 128 or 256
  int value_dim;  // of V in shared memory: 64, 128 or 256
  int warps;      // that attend
  int warp_rows;  // query rows of each: 16 or 32
  int splits;     // warps that share rows, each with a part of every block's keys
  int keys;       // of a block: 32 to 256; of a warp's part of it, at most 128
  int stages;     // of bytes of K and V in flight; 1 waits for each
  int ctas;       // of an SM, at least: what registers must leave room for
  bool tensor_qk;
  bool tensor_pv;
  bool fused;  // scores and P stay in registers
  bool swizzle;
  int producers;  // warps that load and convert, and nothing else
  bool persistent;
  bool fast_exp;
  Operands operands;
  bool e4m3_p;     // P is rounded to e4m3, also where it is multiplied as half
  bool general;    // masks, means of queries, scales per key, negative softmax scales; without, none of them
  bool drift;      // warps wait for stages, not for one another
  bool int8;       // Q and K are int8, not e4m3
  bool half_sums;  // a block's P * V is summed in half precision
};

}  // namespace fp8attn
