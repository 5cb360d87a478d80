// What the host tells a forward kernel. Plain data, the same on both sides; no torch.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fp8attn {

constexpr int OUTPUT_ROWS = 16, OUTPUT_BYTES = 128;  // of a box of the output

constexpr int SCALE_BLOCK = 128;  // rows under one scale of k, where it isn't one of all or of each
constexpr int BIAS_ALIGNMENT = 4;  // keys that rows of `bias` are rounded up to a multiple of
constexpr uint8_t INT8_NAN = 0x80;  // in every byte of an int8 row that isn't finite, and of no other

enum class OutType : int { bf16, f16, f32 };

// Strides are in elements. B batch, Hq and Hkv heads, Sq and Sk lengths, D and Dv head dims.
struct Params {
  // of instances with TMA: boxes out of (B, H, S, D) twice and (B * Hkv * Dv, S_padded), zero outside; into `out`, nothing outside; and out of a mask,
  // if mask_in_boxes
  CUtensorMap q_map, k_map, v_map, out_map, mask_map;

  const uint8_t* q;  // (B, Hq, Sq, D); of instances that quantize it, bfloat16 or half
  const uint8_t* k;  // (B, Hkv, Sk, D)
  const uint8_t* v;  // (B, Hkv, Dv, S_padded), contiguous

  const float* q_scale;  // (B, Hq, ceil(Sq / q_group)); null where Q is quantized here
  const float* k_scale;  // (B, Hkv, ceil(Sk / k_group)); of int8, negative where a key under it isn't finite
  const float* v_scale;  // (B, Hkv, Dv)
  const float* v_mean;   // (B, Hkv, Dv), contiguous; or null
  const void* mask;      // (B, Hq, Sq, Sk), bytes that are 0 where hidden, or what mask_type says, added; or null
  void* out;             // (B, Hq, Sq, Dv)
  float* lse;            // (B, Hq, Sq), contiguous; or null
  int* counter;          // of tiles that CTAs took after their first, 0 at launch; or null, then they take turns

  int64_t q_scale_strides[3], k_scale_strides[3], v_scale_strides[3], mask_strides[4], out_strides[3];

  int64_t q_strides[3], k_strides[3], v_pitch;

  int batches, q_heads, kv_heads, q_length, kv_length, head_dim, value_dim;
  int q_group, k_group;  // rows under one scale; 0: all of a head's
  int causal_offset;     // row i sees keys 0 ... i + causal_offset, and kv_length of them at most
  int heads_side_by_side;
  float score_scale;  // softmax scale times log2 e
  OutType out_type;
  int mask_type;  // 0: bytes; else OutType + 1
  bool q_aligned, k_aligned;  // whether rows start at multiples of 16 bytes
  bool mask_in_boxes;         // whether mask_map is one; else consumers load what a mask adds

  int key_splits;   // CTAs that share a tile, each with a range of its keys; of the portable kernel
  float* parts;     // (key_splits, B, Hq, Sq, Dv), contiguous: their outputs; or null
  float* part_rows;  // (2, key_splits, B, Hq, Sq), contiguous: their rows' maxima and sums of exponentials relative to them, in base 2; or null

  bool half;  // what is quantized here, or bfloat16

  // Of instances that quantize all: k and v are bfloat16 or half, too, v (B, Hkv, Sk, Dv).
  int64_t v_strides[3];
  float* k_mean;         // (B, Hkv, D), contiguous, which they write; or null
  float inverse_length;  // 1 / Sk
  int splits;            // clusters that share the queries of a key/value head

  // Of general instances: (B, Hq, ceil(Sq / 64), Sk rounded up), contiguous, what the mean of 64 rows adds to scores over the softmax scale; or null.
  // Behind all else, so that the code of other instances stays as it is.
  const float* bias;

  // Of the Hopper kernel: CTAs that share the tiles behind the last full round of a call that isn't causal, or 0: each is one CTA's. Then `parts` are
  // a Partial for each consumer of each of these CTAs, and each of its warps has a word here, 0 at launch.
  int stream_k_ctas;
  int* partials_ready;

  // Of instances that quantize Q, where the grid before still quantizes K and V: (B, Hkv), its CTAs that are done with a head, and how many must be;
  // or null.
  const int* ready;
  int ready_ctas;

  // Of the Hopper kernel's instances for masks: what is made of it before they run (tile/kv_blocks.h), and of how many of its batches, heads,
  // groups of 64 rows and rows of a group: 1 where its stride is 0.
  uint32_t* mask_bits;
  uint8_t* block_mask;
  int mask_batches, mask_heads, mask_groups, mask_rows;
};

// What the host tells the kernel that quantizes K and V.
struct QuantizeParams {
  const void* k;  // (B, H, S, D) of bfloat16 or half, rows at multiples of 16 bytes
  const void* v;  // the same

  uint8_t* k_data;  // (B, H, S, D), rows at multiples of 8 bytes
  float* k_scale;   // (B, H, ceil(S / 128)), contiguous, as are all below
  float* k_mean;    // (B, H, D)
  uint8_t* v_data;  // (B, H, D, padded)
  float* v_scale;   // (B, H, D)
  float* v_mean;    // (B, H, D)

  int64_t k_strides[3], v_strides[3], k_data_strides[3], padded;

  int heads, length, head_dim;
  float inverse_length, inverse_sample;  // 1 / S, and 1 over the tokens that K's mean is made of
  bool half;

  int* ready;  // (B, H), 0 at launch: CTAs that are done with a head; or null
};

}  // namespace fp8attn
