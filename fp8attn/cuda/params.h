// Kernel parameters. Plain data, the same on host and device; no torch types.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fp8attn {

constexpr int OUTPUT_ROWS = 16, OUTPUT_BYTES = 128;  // rows and bytes per row of a TMA box of the output

enum class OutType : int { bf16, f16, f32 };

// Strides are in elements. B batch, Hq and Hkv heads, Sq and Sk lengths, D and Dv head dims.
struct Params {
  // Tensor maps, of instances with TMA. q_map and k_map: (B, H, S, D). v_map: (B * Hkv * Dv, S_padded). Loads outside a
  // tensor give zeros, stores outside `out` are dropped. mask_map is valid if mask_in_boxes.
  CUtensorMap q_map, k_map, v_map, out_map, mask_map;

  const uint8_t* q;  // (B, Hq, Sq, D); bfloat16 or half for instances that quantize Q
  const uint8_t* k;  // (B, Hkv, Sk, D)
  const uint8_t* v;  // (B, Hkv, Dv, S_padded), contiguous

  const float* q_scale;  // (B, Hq, ceil(Sq / q_group)); null if the kernel quantizes Q
  const float* k_scale;  // (B, Hkv, ceil(Sk / k_group)); int8: negative if a key under it is not finite
  const float* v_scale;  // (B, Hkv, Dv)
  const float* v_mean;   // (B, Hkv, Dv), contiguous; or null
  const void* mask;      // (B, Hq, Sq, Sk): bytes, 0 for masked-out keys, or additive numbers of mask_type; or null
  void* out;             // (B, Hq, Sq, Dv)
  float* lse;            // (B, Hq, Sq), contiguous; or null
  int* counter;          // number of tiles taken beyond each CTA's first, 0 at launch; null: static schedule

  int64_t q_scale_strides[3], k_scale_strides[3], v_scale_strides[3], mask_strides[4], out_strides[3];

  int64_t q_strides[3], k_strides[3], v_pitch;

  int batches, q_heads, kv_heads, q_length, kv_length, head_dim, value_dim;
  int q_group, k_group;  // rows under one scale; 0: all rows of a head
  int causal_offset;     // row i attends to no key after i + causal_offset, and to kv_length keys at most
  int heads_in_l2;
  float score_scale;  // softmax scale times log2 e
  OutType out_type;
  int mask_type;  // 0: boolean bytes; else OutType + 1 of an additive mask
  bool q_aligned, k_aligned;  // whether rows start at multiples of 16 bytes
  bool mask_in_boxes;         // whether mask_map is valid; else consumers load additive masks from global memory

  // Portable kernel, and prefill of a KV cache: key_splits CTAs split a tile, each with a range of its keys.
  int key_splits;
  float* parts;      // (key_splits, B, Hq, Sq, Dv), contiguous: partial outputs; or null
  float* part_rows;  // (2, key_splits, B, Hq, Sq), contiguous: row maxima, sums of 2^(score - maximum); or null

  bool half;  // tensors that the kernel quantizes are half, else bfloat16

  // Fused small kernel, which quantizes Q, K and V: k and v are bfloat16 or half too, and v is (B, Hkv, Sk, Dv).
  int64_t v_strides[3];
  // Instances of the Hopper kernel that quantize Q: (B, Hkv, D), contiguous, K's mean, rotated, or
  // null. What it adds to scores is added to the LSE, and matters to sinks and a soft cap.
  const float* lse_mean;
  float inverse_length;  // 1 / Sk
  int splits;            // clusters per key/value head, each with a part of its queries

  // General instances: (B, Hq, ceil(Sq / 64), Sk rounded up), contiguous, or null. What the mean of 64 queries adds to
  // their scores, divided by the softmax scale. It comes after the fields above, so that the code of instances without
  // it stays the same.
  const float* bias;

  // Hopper kernel, stream-K: the number of ranges into which the tiles after the last full round are split, of a call
  // that is not causal; 0: no tile is split. More than CTAs only if there is a counter and a full round. `parts` has
  // one Partial per consumer for each range, and partials_ready one flag per warp of these consumers, 0 at launch.
  int stream_k_ranges;
  int* partials_ready;

  // Instances that quantize Q, overlapped with the grid that quantizes K and V: (B, Hkv), the number of its CTAs that
  // have completed a head, and the number that must have; or null.
  const int* ready;
  int ready_ctas;

  // Hopper kernel, instances with a mask: the outputs of build_block_mask (tile/kv_blocks.h), and how many batches,
  // heads, groups of 64 rows and rows of a group they have: 1 where the mask's stride is 0.
  uint32_t* mask_bits;
  uint8_t* block_mask;
  int mask_batches, mask_heads, mask_groups, mask_rows;

  // Instances with windows: row i attends to no key before i + first_offset.
  int first_offset;

  // The same: (Hq,), one more logit of each row, which has no value; or null. mean_scores: (B, Hq, Sq), contiguous,
  // what K's mean adds to the scores of each row of quantized queries; or null. Then the LSE includes it. Instances
  // with a soft cap: scores become softcap * tanh(score / softcap).
  float softcap;
  const float* sinks;
  const float* mean_scores;

  // Instances for packed sequences, of which there is one batch: the table of tiles, rows of TILE_PITCH numbers. The
  // first row is the header (TableHeader), whose `taken` is the counter, the others are tiles (TileField). first_offset
  // and causal_offset are then the window: how many keys before and after the aligned one; -1 is unlimited. K's and V's
  // pages, and the scales and means of each sequence, are laid out as fp8attn.recipe.Quantized says.
  const int* tile_table;

  float inverse_softcap;  // 1 / softcap

  // Hopper kernel, calls of one batch without a mask: keys and values may lie in shards of shard_blocks blocks, which K
  // and k_scale have as batches. shard_rows: rows of v_map from one shard to the next. next_shard_scales: elements of
  // k_scale from where a next block of a shard would have its scale to that of the next shard's first block.
  int shard_blocks, shard_rows;
  int64_t next_shard_scales;
};

// What a launch of the quantizer of K and V does: all; or, of a part of a sequence whose statistics others have a part
// of, one of the two.
enum class QuantizeStep : int { all, measure, write };

// Parameters of the kernel that quantizes K and V. `measure` reads V, `write` reads what is made of all parts: k_mean,
// v_scale and v_mean.
struct QuantizeParams {
  const void* k;  // (B, H, S, D) of bfloat16 or half; rows start at multiples of 16 bytes
  const void* v;  // as k

  uint8_t* k_data;  // (B, H, S, D); rows start at multiples of 8 bytes
  float* k_scale;   // (B, H, ceil(S / 128)), contiguous, as all tensors below
  float* k_mean;    // (B, H, D)
  uint8_t* v_data;  // (B, H, D, padded)
  float* v_scale;   // (B, H, D)
  float* v_mean;    // (B, H, D)

  int64_t k_strides[3], v_strides[3], k_data_strides[3], padded;

  int heads, length, head_dim;
  float inverse_length, inverse_sample;  // 1 / S, and 1 / the number of tokens sampled for K's mean
  bool half;
  bool int8;  // K becomes int8, not e4m3

  int* ready;   // (B, H): number of CTAs that have completed a head; or null
  int cleared;  // words before `ready` that are set to 0, as `ready` itself is
  // (B, H, token chunks, slices) of ChunkStats, which one kernel writes and the next reads; null if one kernel does all
  void* chunk_stats;
  float *v_sums, *v_extremes;  // of `measure`: (B, H, token chunks, D) and (B, H, token chunks, 2, D), of finite elements
  QuantizeStep step;

  // Packed instances. One batch of `length` tokens is made of sequences, (N) of them, as in recipe.Packed. Their means
  // and scales of V are (N, H, D), and K's scales (H, pages). chunk_stats has a place for every token chunk and head,
  // (places, H, slices), some of which stay empty (layout.first_unit).
  const int *cu_seqlens, *seqused;  // (N + 1), and (N) or null
  int sequences;
  int units;           // slices of the token chunks of all places and heads
  int cluster_chunks;  // token chunks of the sequences that clusters quantize; the others take three kernels

  // Instances of pages. K and V are (pages, H, slots, D). Sequences are packed in the results only: of each, the tokens
  // from `firsts` on are quantized. Those from `ends` on aren't there, nor those whose page has no number below
  // `pages`. All before `ends` have a place in page_table.
  const int *page_table, *firsts, *ends;  // (N, most pages of a sequence), (N), (N)
  int64_t table_stride;
  int pages, page, page_log;  // page: slots of one; page_log: its binary logarithm, or -1
};

// Where packed sequences lie, as recipe.Packed says.
struct PackedParams {
  const int *cu_seqlens, *seqused;  // (N + 1), and (N) or null
  int sequences, length;            // N, and the tokens of all
};

// Parameters of the kernels that quantize any Q, K and V. Either `q` or `k` and `v` may be null, with their outputs.
//
// If packed.cu_seqlens isn't null, one batch of K and V is made of sequences. Their means and scales of V are
// (N, Hkv, D), and K's scales of blocks (Hkv, pages). Q is the same as ever.
struct GeneralQuantizeParams {
  const void* q;  // (B, Hq, Sq, D) of `type`
  const void* k;  // (B, Hkv, Sk, D)
  const void* v;  // (B, Hkv, Sk, Dv)

  uint8_t* q_data;  // as q; rows start at multiples of 8 bytes
  float* q_scale;   // (B, Hq, ceil(Sq / q_group)), contiguous, as all tensors below but k_data
  uint8_t* k_data;  // as k; rows start at multiples of 8 bytes
  float* k_scale;   // (B, Hkv, ceil(Sk / k_group))
  float* k_mean;    // (B, Hkv, D); or null: no mean is subtracted
  uint8_t* v_data;  // (B, Hkv, Dv, padded)
  float* v_scale;   // (B, Hkv, Dv)
  float* v_mean;    // (B, Hkv, Dv); or null
  // (B, Hkv, token chunks, channel slices) of MeasuredChunk, which one kernel writes and the next read. Of packed
  // sequences (pages) of PackedUnit, and behind them (places of token chunks, Hkv, channel slices) of MeasuredChunk
  void* measured;

  int64_t q_strides[3], k_strides[3], v_strides[3], q_data_strides[3], k_data_strides[3], padded;

  int batches, q_heads, kv_heads, q_length, kv_length, head_dim, value_dim;
  int q_group, k_group;  // rows under one scale: 1 or SCALE_BLOCK
  int part;              // channels that are rotated together; 0: none
  float inverse_part;
  float inverse_length, inverse_sample;  // 1 / Sk, and 1 / the number of tokens sampled for K's mean
  OutType type;                          // of q, k and v
  bool int8;                             // Q and K become int8, not e4m3
  bool q_aligned, k_aligned, v_aligned;  // whether rows start at multiples of 16 bytes
  PackedParams packed;
};

// Parameters of the kernel that adds to the LSE what the mean of K adds to scores.
struct UnsmoothLseParams {
  const void* q;        // (B, Hq, Sq, D) of `type`
  const float* k_mean;  // (B, Hkv, D), contiguous, rotated
  const float* lse;     // (B, Hq, Sq), contiguous, as `out`
  float* out;

  int64_t q_strides[3];

  int q_heads, kv_heads, q_length, head_dim;
  int part;  // channels that are rotated together; 0: none
  float softmax_scale;
  OutType type;
  bool q_aligned;  // whether rows start at multiples of 16 bytes
};

// Parameters of the decode kernels. One attends to a KV cache: pages.Storage and pages.PagedBatch. N sequences, P
// pages, of 128 keys each. The other one attends to that of another engine, paged_tensors.PagedTensors, of which it
// takes the maps of k and v, their bytes as (P, page, Hkv, D), the scales, and what is at the end.
struct DecodeParams {
  // Bytes of the pages, (P * Hkv * 128, D) and (P * Hkv * D, 128), and of the tokens in half precision, (N * Hkv *
  // RECENT, 2 D).
  CUtensorMap k_map, v_map, recent_k_map, recent_v_map;
  const void *k, *v, *recent_k, *recent_v;  // what they describe

  const void* q;  // (B, Hq, Sq, D) of bfloat16 or half, or packed (T, Hq, D); rows start at multiples of 16 bytes

  const float* k_scale;       // (P, Hkv), contiguous, as all tensors below but the page table
  const float* v_page_scale;  // (P, Hkv)
  const float* k_mean;        // (N, Hkv, D), rotated
  const float* v_mean;        // (N, Hkv, D)
  const float* v_scale;       // (N, Hkv, D)
  const int* page_table;      // (B, table_width)
  const int* lengths;         // (B)
  const int* counts;          // (B); or null: q_length
  const int* sequences;       // (B); or null: 0 ... B - 1
  const int* cu_seqlens;      // (B + 1), of packed queries; or null
  void* out;                  // (B, Hq, Sq, D), or (T, Hq, D)
  float* lse;                 // (B, Hq, Sq), or (Hq, T)
  float* parts;               // (places, rows of a tile, D): partial outputs; 2 * ctas places, or as many as there are fixed parts at most
  float* part_rows;           // (places, rows of a tile, 2): their row maxima, and sums of 2^(score - maximum)
  int* tickets;               // (at least B, Hkv, tickets_of_head), zeros between launches: how many parts are stored, 10 bits a row tile
  int* group_tickets;         // (2 * ctas), zeros at launch: how many parts of a group are stored, by the place of the first one; or null

  // Over rows of the batch, heads and queries. Packed queries count from the first row's on: theirs over rows are 0.
  int64_t q_strides[3], table_stride;
  int out_strides[3], lse_strides[2];  // those of the output in rows of D

  int batches, q_heads, kv_heads, q_length, table_width, every_page, every_sequence;  // q_length: the most of a row
  int tokens;  // T, of packed queries
  int group;  // query heads of a key/value head
  uint32_t group_inverse;  // 2^32 - 1 over that, rounded down
  int ctas, part_height, tickets_of_head;  // of the grid; rows of a tile in parts
  // If all rows of the batch have as many blocks: how many tiles as many CTAs have. One of the two is 1.
  int tiles_of_group, ctas_of_group, ctas_of_group_inverse;  // the latter: 2^16 over that, rounded up
  int part;               // channels that are rotated together; 0: none
  float inverse_part, score_scale;  // the latter: softmax scale times log2 e
  OutType out_type;
  bool half;  // q and the tokens in half precision are half, else bfloat16
  bool leaves_longer;  // rows of more queries than q_length are another kernel's; else they are NaN
  int part_log;        // log2 of the blocks of a part of a tile at least, if parts are fixed; or -1

  const float* sinks;  // (Hq); or null
  int left, right;     // a query at position i sees keys i - left ... i + right; -1: all. A KV cache is causal, whatever right is
  float softcap;       // 0: none

  // Of the cache of another engine.
  int64_t k_scale_strides[4], v_scale_strides[4];  // over rows of the batch, pages, slots and heads
  int page, copied_tokens;                         // slots of a page; tokens of a box of the maps, a power of two
  int capacity;                                    // tokens that a row of the page table has pages for
};

// Parameters of the prefill kernel, which attends to a KV cache with many queries: pages.Storage, pages.PagedBatch and
// new tokens. Of `call` it takes the tensor maps of q in bytes (boxes of a unit of rows x 128 bytes), of the pages as
// DecodeParams has them, and of the output; q, k_scale (P, Hkv), v_scale, v_mean and lse_mean, which is K's mean, (N,
// Hkv, D); the soft cap and sinks; the results, the counter, the table of tiles of packed queries, and numbers. Where
// keys are split, `out` has the outputs of all splits, (key_splits, B, Hq, Sq, D) or (key_splits, T, Hq, D), and
// `part_rows`, (key_splits, 2, rows of a split's output), their largest scores and sums.
struct PrefillParams {
  Params call;
  CUtensorMap new_k_map, new_v_map;  // of the new tokens, in bytes: boxes of 64 tokens x 128 bytes

  const float* v_page_scale;                                  // (P, Hkv)
  const int *page_table, *lengths, *counts, *sequences;       // as DecodeParams has them
  const void *recent_k, *recent_v;                            // (N, Hkv, RECENT, D), contiguous
  const void *new_k, *new_v;                                  // (B, Hkv, Sq, D); or null: the queries' tokens are among the recent ones
  int64_t new_k_strides[3], new_v_strides[3], table_stride;
  int table_width, every_page, every_sequence;
  int left;  // a query at position i attends to no key before i - left
  int most;  // packed queries that a row may have
  int unit_log;  // log2 of the rows of a unit of a tile: 4 to 6
};

// What a launch of the append kernel does. `few`: all of a call; the others follow each other.
enum class AppendStep : int { few, statistics, pages, tokens };

// Parameters of the kernel that appends tokens to a KV cache: pages.Storage, pages.PagedBatch and new tokens.
struct AppendParams {
  const void *k, *v;                 // (B, Hkv, S, D) and (B, Hkv, S, Dv), bfloat16 or half; packed: (1, Hkv, T, D), with stride 0 of rows
  uint8_t *k_pages, *v_pages;        // (P, Hkv, 128, D) and (P, Hkv, Dv, 128), contiguous, as all tensors below but the page table
  float *k_scale, *v_page_scale;     // (P, Hkv)
  float *k_mean, *v_mean, *v_scale;  // (N, Hkv, D) and (N, Hkv, Dv)
  void *recent_k, *recent_v;         // (N, Hkv, RECENT, D) and (N, Hkv, RECENT, Dv)
  const int *page_table, *lengths, *counts, *sequences;  // as DecodeParams has them
  const int* cu_seqlens;             // (B + 1); or null: tokens aren't packed

  int64_t k_strides[3], v_strides[3], table_stride;

  int rows, kv_heads, length;  // B, Hkv, S or T
  int most_pages;              // that may become complete of a row; of packed tokens, places of pages of all rows
  int table_width, every_page, every_sequence, head_dim, value_dim;
  int part;  // channels that are rotated together; 0: none
  float inverse_part;
  AppendStep step;     // `few`, or `pages` for all of the others
  int most;            // pages.Stage, as the next two
  bool pages, tokens;
  bool smooth_k, smooth_v, half, int8;
};

}  // namespace fp8attn
