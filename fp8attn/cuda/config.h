// Configs of the kernels. A config is the one template parameter of a kernel. The instances are rendered from the
// Python dataclasses of the same names (configs.py, fused_small.py, quantize.py, portable.py), whose fields are in this
// order.
#pragma once

namespace fp8attn {

struct HopperConfig {
  int head_dim;   // head dim of Q and K in shared memory: 64, 96, 128, 192 or 256
  int value_dim;  // head dim of V in shared memory: 64, 96, 128, 192 or 256
  int consumers;  // consumer warpgroups, 64 query rows each
  int stages;     // stages of K and V in shared memory
  int registers;  // registers of a consumer thread
  bool overlap;   // the next block's Q * K^T is issued behind this block's P * V
  int exact;      // groups of 16 keys with exact exponentials, out of every eight; the rest get direct e4m3 codes
  bool general;   // supports boolean masks, means of queries, scales per key, and negative softmax scales
  bool int8;      // Q and K are int8, not e4m3
  bool fuse_q_quant;    // Q is bfloat16 or half; the kernel quantizes it to e4m3 or int8, one scale per row
  bool masked;    // supports boolean masks
  bool added;     // supports additive masks; only with `general`
};

struct FusedSmallConfig {
  int head_dim;   // head dim of Q, K and V: 64
  int cluster;    // CTAs of a cluster, which has one head of K and V
  int consumers;  // warpgroups of a CTA; a cluster has one for every 16 channels of K and one for every 16 of V
  int exact;      // as in HopperConfig
};

struct QuantizeConfig {
  int token_chunks;  // most chunks of 512 tokens in a head
  int ctas;    // least CTAs per SM; limits the registers
  bool int8;   // K becomes int8, not e4m3
};

// Where e4m3 is converted to half. shared: in shared memory, once per CTA. registers: in registers, before mma.sync.
// native: nowhere, because mma.sync multiplies e4m3.
enum class Operands : int { shared, registers, native };

struct PortableConfig {
  int head_dim;   // head dim of Q and K in shared memory: 64, 128 or 256
  int value_dim;  // head dim of V in shared memory: 64, 128 or 256
  int warps;      // consumer warps
  int warp_rows;  // query rows of a warp: 16 or 32
  int splits;     // warps with the same rows, each with another part of every block's keys
  int keys;       // keys of a block: 32 to 256; a warp has at most 128 of them
  int stages;     // stages of K and V bytes in flight; 1: each copy is waited for
  int ctas;       // least CTAs per SM; limits the registers
  bool tensor_qk;
  bool tensor_pv;
  bool fused;  // scores and P stay in registers
  bool swizzle;
  int producers;  // warps that only load and convert
  bool persistent;
  bool fast_exp;
  Operands operands;
  bool e4m3_p;     // P is rounded to e4m3, also where it is multiplied as half
  bool general;    // supports masks, means of queries, scales per key, and negative softmax scales
  bool drift;      // warps wait for stages, not for each other
  bool int8;       // Q and K are int8, not e4m3
  bool half_sums;  // P * V of a block is accumulated in half precision
};

}  // namespace fp8attn
