// Attention of one warp, 16 rows, in steps that exchange data through shared memory: scores, softmax, values. For the
// first rungs of the ladder.
#pragma once

#include <mma.h>

#include <type_traits>

#include "config.h"
#include "../params.h"
#include "mask.h"
#include "online_softmax.h"
#include "output.h"
#include "schedule.h"
#include "shared_tile.h"

namespace fp8attn {

// Eight halves as floats.
struct Eight {
  float x[8];

  __device__ explicit Eight(const uint8_t* chunk) {
    const uint4 words = *reinterpret_cast<const uint4*>(chunk);
    const __half2* pairs = reinterpret_cast<const __half2*>(&words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(pairs[i]);
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  }

  __device__ float dot(const Eight& other, float sum) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(x[i], other.x[i], sum);
    return sum;
  }
};

template <PortableConfig C>
struct Unfused {
  using Sum = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float>;
  static constexpr int keys = C.keys / 32, channels = C.value_dim / 32;  // per lane

  int first;  // the warp's first row in the tile
  // without tensor cores, [row][i] is channel lane + 32 i
  std::conditional_t<C.tensor_pv, Sum[C.value_dim / 16], float[16][channels]> o;

  template <typename Storage>
  __device__ explicit Unfused(Storage& shared) : first(threadIdx.x / 32 * 16) {
    if constexpr (C.tensor_pv) {
#pragma unroll
      for (Sum& columns : o) nvcuda::wmma::fill_fragment(columns, 0.0f);
    } else {
#pragma unroll
      for (auto& row : o) {
#pragma unroll
        for (float& x : row) x = 0.0f;
      }
    }
    if (lane() >= 16) return;
    shared.m[first + lane()] = NOTHING;
    shared.l[first + lane()] = 0.0f;
  }

  template <typename Storage, typename K, typename V>
  __device__ void attend(const Params& p, Storage& shared, const K& k, const V& v, int start, bool whole) {
    if constexpr (C.tensor_qk)
      tensor_scores(shared, k);
    else
      scalar_scores(shared, k);
    __syncwarp();
    if constexpr (C.tensor_qk)
      softmax_of_rows(p, shared, start, whole);
    else
      softmax(p, shared, start);
    __syncwarp();
    if constexpr (C.tensor_pv)
      tensor_values(shared, v);
    else
      scalar_values(shared, v);
    __syncwarp();
  }

  template <typename Storage>
  __device__ void store(const Params& p, Storage& shared, const Tile& tile) {
    if constexpr (C.tensor_pv) {
      // the layout of a wmma fragment is unspecified, so fragments go through the shared memory of the scores
      constexpr int columns = C.keys < C.value_dim ? C.keys : C.value_dim;
#pragma unroll
      for (int from = 0; from < C.value_dim; from += columns) {
        __syncwarp();
#pragma unroll
        for (int x = 0; x < columns; x += 16)
          nvcuda::wmma::store_matrix_sync(shared.s.template row<float>(first) + x, o[(from + x) / 16], shared.s.pitch / 4, nvcuda::wmma::mem_row_major);
        __syncwarp();
        store_columns<columns / 32>(p, shared, tile, from, [&](int r, int c) { return shared.s.template row<float>(first + r)[lane() + 32 * c]; });
      }
    } else {
      store_columns<channels>(p, shared, tile, 0, [&](int r, int c) { return o[r][c]; });
    }
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }

  // Normalises and stores COUNT * 32 columns, from column `from` on. sum(r, c): row r, column from + lane + 32 c.
  template <int COUNT, typename Storage, typename F>
  __device__ void store_columns(const Params& p, const Storage& shared, const Tile& tile, int from, F&& sum) const {
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const int row = tile.first_row + first + r;
      if (row >= p.q_length) return;
      const float l = shared.l[first + r];
      const int64_t index = tile.batch * p.out_strides[0] + tile.head * p.out_strides[1] + row * p.out_strides[2];
#pragma unroll
      for (int c = 0; c < COUNT; ++c) {
        const int x = from + lane() + 32 * c;
        if (x >= p.value_dim) continue;
        const float value = l == 0.0f ? 0.0f : fmaf(sum(r, c) / l, shared.scales.channel_scale[x], shared.scales.channel_mean[x]);
        store_element(p, index + x, value);
      }
      if (lane() == 0) store_row<int(P_OFFSET)>(p, tile, row, shared.m[first + r], l);
    }
  }

  // Q * K^T by multiply-adds. A lane has the keys lane, lane + 32, ...
  template <typename Storage, typename K>
  __device__ void scalar_scores(Storage& shared, const K& k) {
    float s[16][keys] = {};
    for (int chunk = 0; chunk < C.head_dim / 8; ++chunk) {
#pragma unroll
      for (int j = 0; j < keys; ++j) {
        const Eight key(k.at(lane() + 32 * j, chunk));
#pragma unroll
        for (int r = 0; r < 16; ++r) s[r][j] = Eight(shared.q.at(first + r, chunk)).dot(key, s[r][j]);
      }
    }
#pragma unroll
    for (int r = 0; r < 16; ++r) {
#pragma unroll
      for (int j = 0; j < keys; ++j) shared.s.template row<float>(first + r)[lane() + 32 * j] = s[r][j];
    }
  }

  // Q * K^T by nvcuda::wmma. CUDA C++ Programming Guide, "Warp Matrix Functions".
  template <typename Storage, typename K>
  __device__ void tensor_scores(Storage& shared, K& k) {
    using namespace nvcuda;
    constexpr int pitch = K::pitch / 2;
    Sum s[C.keys / 16];
#pragma unroll
    for (Sum& columns : s) wmma::fill_fragment(columns, 0.0f);
#pragma unroll
    for (int d = 0; d < C.head_dim; d += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> a;
      wmma::load_matrix_sync(a, reinterpret_cast<const __half*>(shared.q.at(first, d / 8)), pitch);
#pragma unroll
      for (int key = 0; key < C.keys; key += 16) {
        wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::col_major> b;
        wmma::load_matrix_sync(b, reinterpret_cast<const __half*>(k.at(key, d / 8)), pitch);
        wmma::mma_sync(s[key / 16], a, b, s[key / 16]);
      }
    }
#pragma unroll
    for (int key = 0; key < C.keys; key += 16)
      wmma::store_matrix_sync(shared.s.template row<float>(first) + key, s[key / 16], shared.s.pitch / 4, wmma::mem_row_major);
  }

  // Turns scores into P. alpha is the factor that rescales earlier sums. Two lanes have a row, each one contiguous half
  // of its keys: one shuffle gives a maximum or a sum of all 16 rows, and the chunks of eight rows are in different
  // banks.
  template <typename Storage>
  __device__ void softmax_of_rows(const Params& p, Storage& shared, int start, bool whole) {
    constexpr int mine = C.keys / 2;
    const bool by_key = p.k_group == 1;
    const Tile& tile = shared.source.tile;
    const float* k_scale = shared.source.k_scale;
    const float key_factor = p.score_scale * (by_key ? 1.0f : k_scale[p.k_group == 0 ? 0 : start / SCALE_BLOCK * p.k_scale_strides[2]]);
    const int row = first + lane() % 16, begin = lane() / 16 * mine, keys_seen = shared.scales.row_end[row] - start - begin;
    const float factor = score_factor(shared.scales.row_scale[row] * key_factor, !(p.score_scale > 0));
    const float4* s = reinterpret_cast<const float4*>(shared.s.template row<float>(row) + begin);
    float x[mine];
#pragma unroll
    for (int j = 0; j < mine; j += 4) {
      const float4 four = s[j / 4];
      x[j] = four.x * factor, x[j + 1] = four.y * factor, x[j + 2] = four.z * factor, x[j + 3] = four.w * factor;
    }
    if (by_key || p.bias != nullptr || p.mask != nullptr) {
#pragma unroll
      for (int j = 0; j < mine; ++j) {
        const int key = start + begin + j;
        if (j >= keys_seen) continue;
        if (by_key) x[j] *= k_scale[key * p.k_scale_strides[2]];
        if (p.bias != nullptr && tile.first_row + row < p.q_length) x[j] = biased(x[j], p, tile, tile.first_row + row, key);
        if (p.mask != nullptr && tile.first_row + row < p.q_length) x[j] = masked(x[j], p, tile, tile.first_row + row, key);
      }
    }
    if (!whole) {
#pragma unroll
      for (int j = 0; j < mine; ++j) {
        if (j >= keys_seen) x[j] = -INFINITE;
      }
    }
    float largest = x[0];
#pragma unroll
    for (int j = 1; j < mine; ++j) largest = fmaxf(largest, x[j]);
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 16));
    const float m_old = shared.m[row], m_new = fmaxf(largest, lowest(m_old)), alpha = ptx::exp2_approx(m_old - m_new);
    float sum = 0.0f;
    uint4* to = reinterpret_cast<uint4*>(shared.p.template row<uint16_t>(row) + begin);
#pragma unroll
    for (int j = 0; j < mine; j += 8) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[j + i] = probability<C.fast_exp>(__fsub_rn(x[j + i], m_new), 1.0f, 0.0f);
        sum += x[j + i];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* four = x + j + 4 * i;
        if constexpr (C.e4m3_p)
          ptx::halves_of_e4m3(ptx::e4m3x4(four[0], four[1], four[2], four[3]), words[2 * i], words[2 * i + 1]);
        else
          words[2 * i] = ptx::half2(four[0], four[1]), words[2 * i + 1] = ptx::half2(four[2], four[3]);
      }
      to[j / 8] = {words[0], words[1], words[2], words[3]};
    }
    sum += __shfl_xor_sync(~0u, sum, 16);
    __syncwarp();  // all lanes have read the old maximum
    if (lane() < 16) {
      shared.m[row] = m_new;
      shared.l[row] = fmaf(shared.l[row], alpha, sum);
      shared.alpha[row] = alpha;
    }
  }

  // Turns scores into P. alpha is the factor that rescales earlier sums.
  template <typename Storage>
  __device__ void softmax(const Params& p, Storage& shared, int start) {
    const bool by_key = p.k_group == 1;
    const Tile& tile = shared.source.tile;
    const float* k_scale = shared.source.k_scale;
    const float key_factor = p.score_scale * (by_key ? 1.0f : k_scale[p.k_group == 0 ? 0 : start / SCALE_BLOCK * p.k_scale_strides[2]]);
    for (int r = 0; r < 16; ++r) {
      const int row = first + r, end = shared.scales.row_end[row];
      const float factor = score_factor(shared.scales.row_scale[row] * key_factor, !(p.score_scale > 0));
      float x[keys], largest = -INFINITE, sum = 0.0f;
#pragma unroll
      for (int j = 0; j < keys; ++j) {
        const int key = start + lane() + 32 * j;
        x[j] = shared.s.template row<float>(row)[lane() + 32 * j] * factor;
        if (key >= end)
          x[j] = -INFINITE;
        else if (by_key)
          x[j] *= k_scale[key * p.k_scale_strides[2]];
        if (p.bias != nullptr && key < end && tile.first_row + row < p.q_length) x[j] = biased(x[j], p, tile, tile.first_row + row, key);
        if (p.mask != nullptr && key < end && tile.first_row + row < p.q_length) x[j] = masked(x[j], p, tile, tile.first_row + row, key);
        largest = fmaxf(largest, x[j]);
      }
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
      const float m_old = shared.m[row], m_new = fmaxf(largest, lowest(m_old)), alpha = ptx::exp2_approx(m_old - m_new);
#pragma unroll
      for (int j = 0; j < keys; ++j) {
        x[j] = probability<C.fast_exp>(__fsub_rn(x[j], m_new), 1.0f, 0.0f);
        sum += x[j];
        uint32_t half, unused;
        if constexpr (C.e4m3_p)
          ptx::halves_of_e4m3(ptx::e4m3x4(x[j], 0.0f, 0.0f, 0.0f), half, unused);
        else
          half = ptx::half2(x[j], 0.0f);
        shared.p.template row<uint16_t>(row)[lane() + 32 * j] = half;
      }
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
      __syncwarp();  // all lanes have read the old maximum
      if (lane() == 0) {
        shared.m[row] = m_new;
        shared.l[row] = fmaf(shared.l[row], alpha, sum);
        shared.alpha[row] = alpha;
      }
    }
  }

  // O = O * alpha + P * V by multiply-adds.
  template <typename Storage, typename V>
  __device__ void scalar_values(Storage& shared, const V& v) {
#pragma unroll
    for (int r = 0; r < 16; ++r) {
#pragma unroll
      for (int c = 0; c < channels; ++c) o[r][c] *= shared.alpha[first + r];
    }
    for (int chunk = 0; chunk < C.keys / 8; ++chunk) {
#pragma unroll
      for (int c = 0; c < channels; ++c) {
        const Eight channel(v.at(lane() + 32 * c, chunk));
#pragma unroll
        for (int r = 0; r < 16; ++r) o[r][c] = Eight(shared.p.at(first + r, chunk)).dot(channel, o[r][c]);
      }
    }
  }

  // O = O * alpha + P * V by nvcuda::wmma. alpha is loaded as an accumulator fragment, so that it has the same layout
  // as O.
  template <typename Storage, typename V>
  __device__ void tensor_values(Storage& shared, V& v) {
    using namespace nvcuda;
    Sum alpha;
    wmma::load_matrix_sync(alpha, shared.alpha + first, 0, wmma::mem_col_major);
#pragma unroll
    for (Sum& columns : o) {
#pragma unroll
      for (int i = 0; i < alpha.num_elements; ++i) columns.x[i] *= alpha.x[i];
    }
#pragma unroll
    for (int key = 0; key < C.keys; key += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::row_major> a;
      wmma::load_matrix_sync(a, reinterpret_cast<const __half*>(shared.p.at(first, key / 8)), shared.p.pitch / 2);
#pragma unroll
      for (int channel = 0; channel < C.value_dim; channel += 16) {
        wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::col_major> b;
        wmma::load_matrix_sync(b, reinterpret_cast<const __half*>(v.at(channel, key / 8)), V::pitch / 2);
        wmma::mma_sync(o[channel / 16], a, b, o[channel / 16]);
      }
    }
  }
};

}  // namespace fp8attn
