// The general quantizer's kernels for half precision at multiples of 16 bytes, which wait in shared memory until they
// are quantized: `general_write_values` for V, `general_write_rows` for Q and K.
#pragma once

#include <algorithm>

#include "general_grid.h"
#include "launch.h"
#include "ptx/cp_async.h"
#include "ptx/grid.h"
#include "tile/copies.h"
#include "tile/staged_rows.h"

namespace fp8attn {

constexpr int RUN_GROUPS = RUN / GROUP;

// Runs of a warp in shared memory: a word of each lane for each token. Once a group of tokens is read, its codes are
// there: 16 bytes of each channel.
struct StagedRuns {
  uint32_t words[RUN][32];

  // The codes of a group of the warp's channel, at a place where four groups have different banks.
  __device__ uint4& codes(int group, int channel) { return reinterpret_cast<uint4*>(words[group * GROUP])[(channel + 2 * group) % 64]; }
};
static_assert(RUN_GROUPS == COPIED_GROUPS && sizeof(StagedRuns) == RUN_GROUPS * 2 * 64 * sizeof(uint4));

// Writes the codes of a warp's runs, which are being copied. CAREFUL: some tokens don't exist or aren't finite.
template <bool CAREFUL, typename T>
__device__ void write_staged_runs(const GeneralQuantizeParams& p, const GeneralGrid& grid, const ValueRun& run, StagedRuns& staged) {
  const int lane = threadIdx.x % 32;
  const float2 mean = run.exists ? run.mean(p) : float2{}, factor = run.exists ? run.factor(p) : float2{};
  const __half2 gain = run.gain();
  Feedback feedback;
#pragma unroll 1
  for (int group = 0; group < grid.run / GROUP; ++group) {
    wait_for_copies(group);
    __syncwarp();
    const auto number = [&](int i) -> float2 {
      const float2 y = Pair<T>::floats(staged.words[group * GROUP + i][lane]);
      const float2 x = {(y.x - mean.x) * factor.x, (y.y - mean.y) * factor.y};
      if (!CAREFUL) return x;
      const bool exists = group * GROUP + i < run.left;
      return {exists && is_finite(y.x) ? x.x : 0.0f, exists && is_finite(y.y) ? x.y : 0.0f};
    };
    uint4 of_channel[2];
    encode_group(feedback, gain, number, of_channel);
    __syncwarp();  // the group has been read
#pragma unroll
    for (int c = 0; c < 2; ++c) staged.codes(group, 2 * lane + c) = of_channel[c];
  }
  __syncwarp();
  uint64_t to = run.exists ? reinterpret_cast<uint64_t>(run.to(p)) : 0;
  const int group = lane % RUN_GROUPS;
#pragma unroll
  for (int first = 0; first < 64; first += 8) {
    const int channel = first + lane / RUN_GROUPS;
    uint8_t* const of_run = reinterpret_cast<uint8_t*>(__shfl_sync(~0u, to, channel / 2));
    if (of_run != nullptr && group * GROUP < grid.run) *reinterpret_cast<uint4*>(of_run + channel % 2 * p.padded + group * GROUP) = staged.codes(group, channel);
  }
}

// The grid: GeneralGrid::value_ctas for each head of V. Whole runs are in flight at a time, if tokens start at
// multiples of 16 bytes.
template <typename T>
__global__ void __launch_bounds__(WRITERS, 3) general_write_values(const __grid_constant__ GeneralQuantizeParams p) {
  extern __shared__ __align__(128) uint8_t bytes[];
  StagedRuns& staged = reinterpret_cast<StagedRuns*>(bytes)[threadIdx.x / 32];
  const GeneralGrid grid(p);
  const int head = grid.kv_heads - 1 - blockIdx.x / grid.value_ctas, lane = threadIdx.x % 32;
  const uint32_t item = uint32_t(blockIdx.x % grid.value_ctas) * WRITERS + threadIdx.x;
  ptx::wait_for_grids_before();
  ptx::launch_dependents();
  if (!p.v_aligned) return write_values<false, T>(p, grid, head, item);
  // four adjacent lanes have a chunk of eight channels, of which each lane copies some tokens
  const ValueRun copied(p, grid, head, item - lane + lane % 8 * 4), run(p, grid, head, item);
  const T* from = copied.from<T>(p, grid) + lane / 8 * p.v_strides[2];
#pragma unroll 1
  for (int group = 0; group < RUN_GROUPS; ++group) {
    if (copied.exists && group * GROUP < grid.run) {
#pragma unroll
      for (int i = 0; i < GROUP; i += 4, from += 4 * p.v_strides[2]) {
        const int token = group * GROUP + i + lane / 8;
        ptx::cp_async_16(&staged.words[token][lane % 8 * 4], from, token < copied.left);
      }
    }
    ptx::cp_async_commit();
  }
  bool careful = run.exists && grid.run > run.left;
  if (run.exists && !careful) {
    const uint32_t* const nonfinite = run.block.nonfinite(p, grid, run.token) + run.channel / MEASURED_CHANNELS * (sizeof(MeasuredChunk) / 4);
    for (int i = 0; i < grid.run; i += 32) careful |= nonfinite[i / 32] != 0;
  }
  if (__any_sync(~0u, careful))
    write_staged_runs<true, T>(p, grid, run, staged);
  else
    write_staged_runs<false, T>(p, grid, run, staged);
}

constexpr int STAGES = 2, MOST_GROUPS = RowUnits<CHUNK>::most_groups;
constexpr int WORD_SLICES = 256 / MEASURED_CHANNELS;  // slices of V, at most
static_assert(BLOCK_WORDS * WORD_SLICES == 32);

// Of `general_write_rows`. Rows of STAGES blocks follow.
struct StagedStorage {
  RowBlock blocks[STAGES + 1];  // that the CTA has next
  // largest magnitudes of the rows' units of a group, if each row has a scale; else those of warps, all in the first
  float largest[MOST_GROUPS][SCALE_BLOCK];
  alignas(16) float mean[STAGES][256];
  float nonfinite[STAGES][BLOCK_WORDS][WORD_SLICES];  // bits: tokens of V, of each slice
  uint32_t hidden[STAGES][BLOCK_WORDS];               // a bit for each row: all of its codes are NaN
};
static_assert(sizeof(StagedStorage) % 16 == 0);

// The blocks of rows of a call: those of K, then those of Q. Each CTA takes every gridDim-th.
struct StagedBlocks {
  const GeneralQuantizeParams& p;
  const GeneralGrid grid;

  __device__ explicit StagedBlocks(const GeneralQuantizeParams& params) : p(params), grid(params) {}

  // Block `item`.
  __device__ RowBlock at(int item, int bytes_of_element) const {
    const int of_queries = item - grid.kv_heads * grid.k_blocks;
    if (item >= grid.staged_blocks(p)) return {.count = -1};
    if (of_queries >= 0) return query_block(p, grid, of_queries, bytes_of_element);
    // heads of the same tokens of packed sequences lie side by side
    const int head = grid.packed ? item % grid.kv_heads : item / grid.k_blocks, block = grid.packed ? item / grid.kv_heads : item % grid.k_blocks;
    return key_block(p, grid, head, block, bytes_of_element);
  }
};

// PART: p.part. With K and V it runs beside the grid before, which has seen to it that everything is there. While a
// block is quantized, the rows of the next one arrive.
template <int PART, bool INT8, typename T>
__global__ void __launch_bounds__(RowUnits<PART>::most_threads) general_write_rows(const __grid_constant__ GeneralQuantizeParams p) {
  using Units = RowUnits<PART>;
  extern __shared__ __align__(128) uint8_t bytes[];
  auto& shared = *reinterpret_cast<StagedStorage*>(bytes);
  const Units units(p.head_dim);
  const StagedRows<Units::chunks> rows(p.head_dim, units.threads());
  const auto tile_of = [&](int round) { return bytes + sizeof(StagedStorage) + round % STAGES * rows.bytes_of(p.head_dim); };
  const auto block_of = [&](int round) -> RowBlock& { return shared.blocks[round % (STAGES + 1)]; };
  if (p.v == nullptr) ptx::wait_for_grids_before();
  ptx::launch_dependents();
  // Begins to copy what a block is quantized from.
  const auto load = [&](int round) {
    const RowBlock& block = block_of(round);
    if (block.count <= 0) return;
    const int stage = round % STAGES, slice = threadIdx.x % WORD_SLICES, word = threadIdx.x / WORD_SLICES;
    rows.load(tile_of(round), block.from, block.stride, block.count);
    if (block.mean != nullptr && threadIdx.x < p.head_dim / 4) ptx::cp_async_16(&shared.mean[stage][4 * threadIdx.x], block.mean + 4 * threadIdx.x);
    if (!block.is_key || threadIdx.x >= 32) return;
    const bool exists = slice * MEASURED_CHANNELS < p.value_dim;
    ptx::cp_async(&shared.nonfinite[stage][word][slice], reinterpret_cast<const float*>(block.nonfinite + (exists ? slice * (sizeof(MeasuredChunk) / 4) + word : 0)), exists);
  };
  if (threadIdx.x < STAGES) block_of(threadIdx.x) = StagedBlocks(p).at(blockIdx.x + threadIdx.x * gridDim.x, sizeof(T));
  if (threadIdx.x < BLOCK_WORDS) shared.hidden[0][threadIdx.x] = 0;
  __syncthreads();
  load(0);
  for (int round = 0; block_of(round).count >= 0; ++round) {
    const RowBlock& block = block_of(round);
    uint8_t* const tile = tile_of(round);
    const int stage = round % STAGES, row = units.row();
    uint32_t(&hidden)[BLOCK_WORDS] = shared.hidden[stage];
    ptx::cp_async_wait();
    __syncthreads();  // also: nobody reads the tile before any more
    load(round + 1);
    if (threadIdx.x == 0) block_of(round + STAGES) = StagedBlocks(p).at(blockIdx.x + (round + STAGES) * gridDim.x, sizeof(T));
    if (threadIdx.x < BLOCK_WORDS) shared.hidden[(round + 1) % STAGES][threadIdx.x] = 0;
    if (block.count == 0) continue;
    if (block.is_key && threadIdx.x < 32) {
      const uint32_t tokens = __float_as_uint(shared.nonfinite[stage][threadIdx.x / WORD_SLICES][threadIdx.x % WORD_SLICES]);
      if (tokens != 0) atomicOr(&hidden[threadIdx.x / WORD_SLICES], tokens);
    }

    const bool exists = row < block.count;
    float y[Units::count][Units::size], largest = 0.0f;
    bool nonfinite = false;
#pragma unroll
    for (int i = 0; i < Units::count; ++i) {
      if (!units.has(i)) continue;
      const int channel = units.unit(i) * Units::size;
      load_unit<PART, T>(y[i], reinterpret_cast<const uint4*>(tile + row * rows.pitch + 2 * channel));
      if (block.mean != nullptr) {
#pragma unroll
        for (int c = 0; c < Units::size; c += 4) centre(reinterpret_cast<float(&)[4]>(y[i][c]), *reinterpret_cast<const float4*>(&shared.mean[stage][channel + c]));
      }
      largest = fmaxf(largest, largest_finite(y[i]));
      if constexpr (INT8) nonfinite |= has_nan(y[i]);
    }
    if (!exists) largest = 0.0f;
    if (INT8 && exists && nonfinite) atomicOr(&hidden[row / 32], 1u << row % 32);
    if (block.by_token) {
      shared.largest[units.group()][row] = largest;
    } else {
      const uint32_t of_warp = __reduce_max_sync(~0u, __float_as_uint(largest));
      if (threadIdx.x % 32 == 0) shared.largest[0][threadIdx.x / 32] = __uint_as_float(of_warp);
    }
    __syncthreads();  // the rows have been read, too

    if (block.by_token) {
      for (int i = 0; i < units.groups; ++i) largest = fmaxf(largest, shared.largest[i][row]);
    } else {
      const int lane = threadIdx.x % 32;
      largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(lane < units.threads() / 32 ? shared.largest[0][lane] : 0.0f)));
    }
    const float scale = row_scale_of<INT8>(largest), inverse = __frcp_rn(scale), kept = largest > 0.0f ? scale * block.unit : 1.0f;
    const bool is_hidden = hidden[row / 32] >> row % 32 & 1;
#pragma unroll
    for (int i = 0; i < Units::count; ++i) {
      if (!units.has(i)) continue;
#pragma unroll
      for (int c = 0; c < Units::size; c += CHUNK) {
        uint2 codes = {codes_of_unit<PART, INT8>(&y[i][c], inverse), codes_of_unit<PART, INT8>(&y[i][c + 4], inverse)};
        if (is_hidden) codes = {NAN_CODES<INT8>, NAN_CODES<INT8>};
        *reinterpret_cast<uint2*>(tile + row * rows.pitch + units.unit(i) * Units::size + c) = codes;
      }
    }
    if (block.by_token) {
      if (units.group() == 0 && exists) block.scale[row] = INT8 && block.is_key && is_hidden ? NAN : kept;
    } else if (threadIdx.x == 0) {
      bool marked = false;
      for (int i = 0; i < BLOCK_WORDS; ++i) marked |= INT8 && block.is_key && hidden[i] != 0;
      *block.scale = marked ? -kept : kept;
    }
    __syncthreads();
    rows.store_codes(tile, block.to, block.to_stride, block.count);
  }
  if (p.v != nullptr) ptx::wait_for_grids_before();
}

// Whether rows of Q and K have a launch of their own.
inline bool are_staged(const GeneralQuantizeParams& p) {
  const auto are_near = [](const int64_t(&strides)[3]) { return strides[2] >= 0 && strides[2] < MOST_STRIDE; };
  return p.type != OutType::f32 && p.part <= LARGEST_PART && (p.q == nullptr || (p.q_aligned && are_near(p.q_strides) && are_near(p.q_data_strides))) &&
         (p.k == nullptr || (p.k_aligned && are_near(p.k_strides) && are_near(p.k_data_strides)));
}

// Dynamic shared memory of `general_write_rows`.
template <int PART>
int staged_bytes(const GeneralQuantizeParams& p) {
  return sizeof(StagedStorage) + STAGES * StagedRows<RowUnits<PART>::chunks>::bytes_of(p.head_dim);
}

// CTAs of `general_write_rows`, all of which can run at once; 0 if the device has too little shared memory.
template <int PART>
int resident_ctas(const GeneralQuantizeParams& p) {
  int device = 0, multiprocessors = 0, shared = 0, of_cta = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  cudaDeviceGetAttribute(&of_cta, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const int bytes = staged_bytes<PART>(p);
  if (bytes > of_cta) return 0;
  const int by_registers = RowUnits<PART>::most_threads / RowUnits<PART>(p.head_dim).threads();
  const int by_memory = shared / (bytes + 1024);  // the system takes 1024
  return std::min(GeneralGrid(p).staged_blocks(p), multiprocessors * std::max(std::min(by_registers, by_memory), 1));
}

// Calls f with p.part as a constant. `are_staged` must be true.
template <typename F>
auto with_part(const GeneralQuantizeParams& p, F&& f) {
  switch (p.part) {
    case 0:
      return f(std::integral_constant<int, 0>());
    case 8:
      return f(std::integral_constant<int, 8>());
    case 16:
      return f(std::integral_constant<int, 16>());
    case 32:
      return f(std::integral_constant<int, 32>());
    default:
      return f(std::integral_constant<int, LARGEST_PART>());
  }
}

template <typename T>
cudaError_t launch_rows(const GeneralQuantizeParams& p, int ctas, cudaStream_t stream) {
  return with_part(p, [&]<int PART>(std::integral_constant<int, PART>) {
    const auto kernel = p.int8 ? general_write_rows<PART, true, T> : general_write_rows<PART, false, T>;
    return launch_grid_with_shared_memory(kernel, p, ctas, RowUnits<PART>(p.head_dim).threads(), staged_bytes<PART>(p), stream);
  });
}

}  // namespace fp8attn
