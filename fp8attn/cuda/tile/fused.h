// Attention of one warp. Scores and P stay in registers.
#pragma once

#include <type_traits>

#include "config.h"
#include "../params.h"
#include "mask.h"
#include "online_softmax.h"
#include "output.h"
#include "nonfinite.h"
#include "products.h"
#include "schedule.h"
#include "score_mod.h"
#include "shared_tile.h"

namespace fp8attn {

// Whether addresses stay in registers from block to block. Registers don't suffice for an output of 256 columns, for
// the second accumulators of native products, or for the conversions before sm_89.
#if __CUDA_ARCH__ >= 890
template <PortableConfig C>
constexpr bool KEEPS_ADDRESSES = C.value_dim < 256 && C.operands != Operands::native;
#else
template <PortableConfig>
constexpr bool KEEPS_ADDRESSES = false;
#endif

constexpr float HALF_MAX = 65504.0f;

// Binary logarithm of the largest P: PortableConfig.p_offset.
constexpr int largest_p(bool half_sums, int keys) {
  int offset = P_OFFSET;
  while (half_sums && E4M3_MAX * keys * (1 << offset) > HALF_MAX) --offset;
  return offset;
}

template <PortableConfig C>
struct Fused {
  static constexpr int tiles = C.warp_rows / 16;
  static constexpr int row_warps = C.warps / C.splits;
  static constexpr int keys = C.keys / C.splits;  // keys of a block that the warp has
  static constexpr int steps = keys / 32;
  static constexpr int offset = largest_p(C.half_sums, keys);  // binary logarithm of the largest P

  int first;      // the warp's first row in the tile
  int first_key;  // the warp's first key in a block
  int q_lane, k_lane, v_lane;  // offsets of the lane's first operands in the tiles
  OnlineSoftmax<C.fast_exp, offset> softmax[tiles];
  float o[tiles][C.value_dim / 2] = {};

  template <typename Storage>
  __device__ explicit Fused(const Storage&) : first(threadIdx.x / 32 % row_warps * C.warp_rows), first_key(threadIdx.x / 32 / row_warps * keys) {
    using Keys = typename Storage::Keys;
    using Values = typename Storage::Values;
    q_lane = Storage::Queries::moved(lane_of_rows<typename Storage::Queries>(), first, 0);
    k_lane = Keys::moved(lane_of_columns<C.operands, Keys>(), first_key, 0);
    v_lane = Values::moved(lane_of_columns<C.operands, Values>(), 0, first_key / 16 * (C.operands == Operands::shared ? 2 : 1));
    // else the compiler computes them again for every block
    if constexpr (KEEPS_ADDRESSES<C>) asm volatile("" : "+r"(q_lane), "+r"(k_lane), "+r"(v_lane));
  }

  // Attends to the block of keys that starts at `start`. `whole`: all of its keys are visible to every row.
  template <typename Storage, typename K, typename V>
  __device__ void attend(const Params& p, Storage& shared, const K& k, const V& v, int start, bool whole) {
    const bool by_key = C.general && p.k_group == 1;
    const Tile& tile = shared.source.tile;
    const float* k_scale = shared.source.k_scale;
    const int key = min(start + first_key, p.kv_length - 1);  // K has no scale beyond its last block
    const float block_scale = by_key ? 1.0f : k_scale[p.k_group == 0 ? 0 : key / SCALE_BLOCK * p.k_scale_strides[2]];
    const bool has_nonfinite_key = C.int8 && block_scale < 0.0f;
    const float key_factor = p.score_scale * (C.int8 ? fabsf(block_scale) : block_scale);
    float s[tiles][keys / 2] = {}, factor[tiles][2], alpha[tiles][2];
    if constexpr (C.int8) {
      static_assert(128 * 127 * C.head_dim < 1 << 22);
      int32_t sums[tiles][keys / 2];
#pragma unroll
      for (auto& of_tile : sums)
#pragma unroll
        for (int32_t& sum : of_tile) sum = ZERO_BITS;
      scores(sums, shared.q, k);
#pragma unroll
      for (int t = 0; t < tiles; ++t)
#pragma unroll
        for (int i = 0; i < keys / 2; ++i) s[t][i] = __int_as_float(sums[t][i]) - ZERO;
    } else {
      scores(s, shared.q, k);
    }
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      const Fragment f = Fragment::of_warp(first + 16 * t);
#pragma unroll
      for (int r = 0; r < 2; ++r) factor[t][r] = score_factor(shared.scales.row_scale[f.row + 8 * r] * key_factor, C.general && !(p.score_scale > 0));
      const bool calm = !C.general && __all_sync(~0u, fmaxf(factor[t][0], factor[t][1]) < LARGEST_SCORE / (LARGEST_PRODUCT<C.int8> * C.head_dim));
      if (has_nonfinite_key) nan_nonfinite_keys(p, tile, start + first_key, s[t], f);
      if (by_key) scale_by_key(p, tile, start + first_key, s[t], f);
      if (!calm && !C.softcap) scale_by_row(factor[t], s[t]);
      if constexpr (C.softcap) {
        const int row = tile.first_row + f.row;
        const float2 shift = {mean_score(p, tile, row), mean_score(p, tile, row + 8)};
        cap_scores(s[t], factor[t], shift, p.softcap);
        scale_by_row(factor[t], s[t]);
      }
      if constexpr (C.general) {
        if (p.bias != nullptr) add_bias(s[t], p, tile.batch, tile.head, tile.first_row + first + 16 * t, start + first_key, f);
        if (p.mask != nullptr) add_mask(s[t], p, tile.batch, tile.head, tile.first_row, start + first_key, f);
      }
      if (!whole) hide(s[t], shared.scales.row_end, start + first_key, f);
      if constexpr (C.window) {
        if (!whole) hide_before(s[t], [&](int row) { return Visible(p).begin(tile.first_row + row); }, start + first_key, f);
      }
      softmax[t].template advance<C.general || C.softcap>(s[t], factor[t], alpha[t]);
    }
    // no branches from here on, so that the compiler can interleave exponentials with products
    values(s, factor, alpha, v);
  }

  // Normalises and stores the output, and the LSE or the partial results of its rows. `tile` is the destination; if
  // CTAs split the keys, its batch also selects the partial output.
  template <typename Storage>
  __device__ void store(const Params& p, Storage& shared, const Tile& tile) {
    if constexpr (C.splits > 1) {
      gather(shared);
      if (first_key > 0) return;
    }
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      softmax[t].finish();
      const Fragment f = Fragment::of_warp(first + 16 * t);
      if constexpr (C.int8) nan_nonfinite_rows(p, shared.source.tile, tile.first_row, f, softmax[t].l);
      Output output(p, tile, tile.first_row, f, softmax[t].l);
      if constexpr (C.window) {
        if (p.sinks != nullptr) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float sink = p.sinks[tile.head] - (C.softcap ? 0.0f : mean_score(p, tile, tile.first_row + f.row + 8 * r));
            const SinkRow sums = SinkRow::add<offset>(softmax[t].m[r], softmax[t].l[r], sink);
            output.inverse[r] = sums.normalise, output.there[r] = sums.weight;
          }
        }
      }
      output.store<0, C.value_dim>(o[t], shared.scales);
      if (f.column != 0) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = tile.first_row + f.row + 8 * r;
        constexpr bool has_mean = C.window && !C.softcap;  // a soft cap's scores have it already
        if (row < p.q_length) store_row<offset, has_mean>(p, tile, row, softmax[t].m[r], softmax[t].l[r], has_mean ? mean_score(p, tile, row) : 0.0f);
      }
    }
  }

 private:
  // Combines the results of warps that have the same rows, in log2(splits) steps, through the shared memory of K and V.
  // The warp with the first keys gets the result.
  template <typename Storage>
  __device__ void gather(Storage& shared) {
    constexpr int threads = 32 * row_warps, per_tile = C.value_dim / 2 + 4;
    static_assert(sizeof(shared.k) + sizeof(shared.v) >= sizeof(float) * (C.splits / 2) * threads * tiles * per_tile);
    float* exchange = reinterpret_cast<float*>(&shared.k);
    const int part = first_key / keys, thread = threadIdx.x % threads;
    const auto place = [&](int from, int t, int i) -> float& { return exchange[((from * tiles + t) * per_tile + i) * threads + thread]; };
    ptx::cp_async_wait();
    for (int half = C.splits / 2; half > 0; half /= 2) {
      __syncthreads();  // all warps have read what is overwritten here
      if (part >= half && part < 2 * half) {
#pragma unroll
        for (int t = 0; t < tiles; ++t) {
#pragma unroll
          for (int r = 0; r < 2; ++r) place(part - half, t, r) = softmax[t].m[r], place(part - half, t, 2 + r) = softmax[t].l[r];
#pragma unroll
          for (int i = 0; i < C.value_dim / 2; ++i) place(part - half, t, 4 + i) = o[t][i];
        }
      }
      __syncthreads();
      if (part < half) {
#pragma unroll
        for (int t = 0; t < tiles; ++t) {
          float mine[2], theirs[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) merge_rows(softmax[t].m[r], softmax[t].l[r], place(part, t, r), place(part, t, 2 + r), mine[r], theirs[r]);
#pragma unroll
          for (int i = 0; i < C.value_dim / 2; ++i) o[t][i] = fmaf(o[t][i], mine[i / 2 % 2], theirs[i / 2 % 2] * place(part, t, 4 + i));
        }
      }
    }
  }

  // Q * K^T. int8 is multiplied without conversion.
  template <typename Q, typename K, typename Score>
  __device__ void scores(Score (&s)[tiles][keys / 2], const Q& q, const K& k) {
    constexpr Operands rows = C.int8 ? Operands::native : C.operands;
#pragma unroll
    for (int step = 0; step < C.head_dim / 32; ++step) {
      uint32_t a[tiles][A_WORDS<rows>];
#pragma unroll
      for (int t = 0; t < tiles; ++t) load_rows<rows>(a[t], q, q_lane, 16 * t, step);
#pragma unroll
      for (int key = 0; key < keys; key += 16) {
        uint32_t b[2][B_WORDS<rows>];
        load_columns<rows>(b, k, k_lane, key, step);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int t = 0; t < tiles; ++t) multiply<rows>(&s[t][key / 2 + 4 * j], a[t], b[j]);
        }
      }
    }
  }

  // Computes P of 32 keys, as A operands.
  __device__ void probabilities(uint32_t (&p)[tiles][A_WORDS<C.operands>], float (&s)[tiles][keys / 2], const float (&factor)[tiles][2], int step) {
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      softmax[t].exponentiate(s[t] + 16 * step, factor[t]);
      softmax[t].exponentiate(s[t] + 16 * step + 8, factor[t]);
      operand_of<C.operands, C.e4m3_p>(p[t], s[t] + 16 * step);
    }
  }

  // O = O * alpha + P * V.
  template <typename V>
  __device__ void values(float (&s)[tiles][keys / 2], const float (&factor)[tiles][2], const float (&alpha)[tiles][2], const V& v) {
    uint32_t b[2][B_WORDS<C.operands>];
    if constexpr (C.operands == Operands::native) {
      // Two-level accumulation: accumulators of e4m3 products keep 13 bits, or 11 in half precision. So each key block
      // has fresh accumulators, which the multiply-add that rescales O adds to it.
      uint32_t p[steps][tiles][A_WORDS<C.operands>];
#pragma unroll
      for (int step = 0; step < steps; ++step) probabilities(p[step], s, factor, step);
#pragma unroll
      for (int channel = 0; channel < C.value_dim; channel += 16) {
        std::conditional_t<C.half_sums, HalfSums, FloatSums> fresh[tiles][2];
#pragma unroll
        for (int step = 0; step < steps; ++step) {
          load_columns<C.operands>(b, v, v_lane, channel, step);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int t = 0; t < tiles; ++t) multiply<C.operands>(fresh[t][j].words, p[step][t], b[j]);
          }
        }
#pragma unroll
        for (int t = 0; t < tiles; ++t) {
#pragma unroll
          for (int i = 0; i < 8; ++i) o[t][channel / 2 + i] = fmaf(o[t][channel / 2 + i], alpha[t][i / 2 % 2], fresh[t][i / 4].at(i % 4));
        }
      }
    } else {
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int i = 0; i < C.value_dim / 2; ++i) o[t][i] *= alpha[t][i / 2 % 2];
      }
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        uint32_t p[tiles][A_WORDS<C.operands>];
        probabilities(p, s, factor, step);
#pragma unroll
        for (int channel = 0; channel < C.value_dim; channel += 16) {
          load_columns<C.operands>(b, v, v_lane, channel, step);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int t = 0; t < tiles; ++t) multiply<C.operands>(&o[t][channel / 2 + 4 * j], p[t], b[j]);
          }
        }
      }
    }
  }
};

}  // namespace fp8attn
