// The portable kernel, sm_80 and later: cp.async, mma.sync, and the features that the config enables.
//
// A CTA attends with one tile of queries to one block of keys after another. Each warp has part of the rows, and all
// keys of a block or a part of them. The config says where e4m3 is converted to half: in shared memory, once per CTA;
// in registers, before mma.sync; or nowhere, if mma.sync multiplies e4m3.
#pragma once

#include <type_traits>

#include "combine.h"
#include "config.h"
#include "params.h"
#include "ptx/cp_async.h"
#include "ptx/mbarrier.h"
#include "tile/tile_scales.h"
#include "tile/fused.h"
#include "tile/mask.h"
#include "tile/output.h"
#include "tile/schedule.h"
#include "tile/shared_tile.h"
#include "tile/unfused.h"

namespace fp8attn {

template <PortableConfig C>
struct PortableShape {
  static constexpr int rows = C.warps / C.splits * C.warp_rows;
  static constexpr int threads = 32 * (C.warps + C.producers);
  static constexpr int loaders = C.producers > 0 ? 32 * C.producers : threads;
  // Stages in flight are bytes. The tiles of K and V that warps multiply are halves or bytes.
  static constexpr bool halves = C.operands == Operands::shared;
  static constexpr int half_slots = halves ? C.producers > 0 ? 2 : 1 : 0;
  static constexpr int slots = halves ? half_slots : C.stages;
  static constexpr int q_bytes = C.operands == Operands::native || C.int8 ? 1 : 2;
};

// The tile, and pointers to its keys and values. Kept in shared memory and read again, because registers are scarce.
struct Source {
  Tile tile;
  int split;  // index of the range of the tile's keys
  const uint8_t *k, *v;
  const float* k_scale;

  __device__ Source(const Params& p, const Schedule& schedule, int position)
      : tile(schedule.at(position / p.key_splits)),
        split(position % p.key_splits),
        k(p.k + tile.batch * p.k_strides[0] + tile.kv_head * p.k_strides[1]),
        v(p.v + (int64_t(tile.batch) * p.kv_heads + tile.kv_head) * p.value_dim * p.v_pitch),
        k_scale(p.k_scale + tile.batch * p.k_scale_strides[0] + tile.kv_head * p.k_scale_strides[1]) {}

  // The destination of the output. Each split has a partial output with all batches, so the batch index is
  // split * batches + batch.
  __device__ Tile place(const Params& p) const { return {tile.batch + split * p.batches, tile.head, tile.kv_head, tile.first_row}; }
};

template <PortableConfig C>
struct PortableStorage {
  using S = PortableShape<C>;
  using KeyBytes = SharedTile<C.keys, C.head_dim, C.swizzle>;
  using ValueBytes = SharedTile<C.value_dim, C.keys, C.swizzle>;
  using KeyHalves = SharedTile<S::halves ? C.keys : 0, 2 * C.head_dim, C.swizzle>;
  using ValueHalves = SharedTile<S::halves ? C.value_dim : 0, 2 * C.keys, C.swizzle>;
  // operands of the products
  using Queries = SharedTile<S::rows, S::q_bytes * C.head_dim, C.swizzle>;
  using Keys = std::conditional_t<S::halves, KeyHalves, KeyBytes>;
  using Values = std::conditional_t<S::halves, ValueHalves, ValueBytes>;

  Queries q;
  KeyBytes k[C.stages];
  ValueBytes v[C.stages];
  KeyHalves k_half[S::halves ? S::half_slots : 1];
  ValueHalves v_half[S::halves ? S::half_slots : 1];
  SharedTile<C.fused ? 0 : S::rows, 4 * C.keys, false> s;
  SharedTile<C.fused ? 0 : S::rows, 2 * C.keys, false> p;
  float m[C.fused ? 4 : S::rows], l[C.fused ? 4 : S::rows], alpha[C.fused ? 4 : S::rows];
  TileScales<C.value_dim, S::rows, S::threads> scales;
  uint64_t full[S::slots], empty[S::slots];
  Source source;
};

// 16 bytes: the first `count` are loaded, the rest is zero. `aligned`: `from` is a multiple of 16.
__device__ inline uint4 load_chunk(const uint8_t* from, int count, bool aligned) {
  if (aligned && count == 16) return *reinterpret_cast<const uint4*>(from);
  uint64_t halves[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll 1
    for (int i = 8 * half; i < min(count, 8 * half + 8); ++i) halves[half] |= uint64_t(from[i]) << 8 * (i % 8);
  }
  return {uint32_t(halves[0]), uint32_t(halves[0] >> 32), uint32_t(halves[1]), uint32_t(halves[1] >> 32)};
}

// Loads the queries of a tile. Rows and channels that don't exist are zero.
template <PortableConfig C>
__device__ void load_queries(const Params& p, PortableStorage<C>& shared, const Tile& tile) {
  using Codes = SharedTile<PortableShape<C>::rows, C.head_dim, C.swizzle>;
  const uint8_t* q = p.q + tile.batch * p.q_strides[0] + tile.head * p.q_strides[1];
  for_chunks<Codes, PortableShape<C>::threads>(threadIdx.x, [&](int row, int chunk) {
    const int count = tile.first_row + row < p.q_length ? max(min(p.head_dim - 16 * chunk, 16), 0) : 0;
    const uint4 codes = load_chunk(q + (tile.first_row + row) * p.q_strides[2] + 16 * chunk, count, p.q_aligned);
    if constexpr (PortableShape<C>::q_bytes == 1)
      *reinterpret_cast<uint4*>(shared.q.at(row, chunk)) = codes;
    else
      store_halves(shared.q, row, chunk, codes);
  });
}

// The chunks of a tile that a thread copies: the same chunk of every pass-th row.
template <int THREADS, typename Tile>
struct ThreadChunks {
  static constexpr int pass = THREADS / Tile::chunks;
  // with a multiple of 8, all rows of a thread have the same swizzle
  static_assert(THREADS % Tile::chunks == 0 && pass % 8 == 0);
  static constexpr bool even = Tile::rows % pass == 0;

  int row, chunk;  // of the thread's first chunk

  __device__ explicit ThreadChunks(int thread) : row(thread / Tile::chunks), chunk(thread % Tile::chunks) {}

  // Starts the copies of the thread's chunks. `from`: the first chunk. `distance`: from one row to the next. `count`:
  // bytes of a chunk that exist. Rows from `rows` on are zero.
  __device__ void load_ahead(Tile& tile, const uint8_t* from, int64_t distance, int count, int rows, bool aligned) const {
    uint8_t* to = tile.at(row, chunk);
    if (aligned && count % 16 == 0) {  // count is 0 or 16: a copy needs a predicate, but no arithmetic
#pragma unroll
      for (int i = 0; i < Tile::rows; i += pass, from += pass * distance) {
        if (even || row + i < Tile::rows) ptx::cp_async_16(to + i * Tile::pitch, from, count > 0 && row + i < rows);
      }
    } else if (aligned) {
      // Head dims are multiples of 8, so half of a chunk exists. It takes two copies, because one of 16 bytes would
      // access memory that doesn't exist.
      for (int i = 0; i < Tile::rows && (even || row + i < Tile::rows); i += pass, from += pass * distance) {
        ptx::cp_async_8(to + i * Tile::pitch, from, row + i < rows);
        ptx::cp_async_8(to + i * Tile::pitch + 8, from, false);
      }
    } else {
      for (int i = 0; i < Tile::rows && (even || row + i < Tile::rows); i += pass, from += pass * distance)
        *reinterpret_cast<uint4*>(to + i * Tile::pitch) = load_chunk(from, row + i < rows ? count : 0, false);
    }
  }
};

// Starts a thread's copies of K and V to a stage, one block after another. Keys beyond the end are zero; for V this is
// its padding.
template <PortableConfig C>
struct Loader {
  using Storage = PortableStorage<C>;
  using Keys = ThreadChunks<PortableShape<C>::loaders, typename Storage::KeyBytes>;
  using Values = ThreadChunks<PortableShape<C>::loaders, typename Storage::ValueBytes>;

  const uint8_t *k, *v;  // the thread's first chunks of the next block
  int start;             // the first key of the next block
  Keys keys;
  Values values;

  __device__ Loader(const Params& p, const Source& source, int thread, int first_key = 0) : start(first_key), keys(thread), values(thread) {
    k = source.k + (start + keys.row) * p.k_strides[2] + (16 * keys.chunk < p.head_dim ? 16 * keys.chunk : 0);
    v = source.v + start + values.row * p.v_pitch + 16 * values.chunk;
  }

  __device__ void next(const Params& p, Storage& shared, int stage) {
    if constexpr (!KEEPS_ADDRESSES<C>) {
      int thread = threadIdx.x - (C.producers > 0 ? 32 * C.warps : 0);
      asm volatile("" : "+r"(thread));  // else addresses are computed before the loop over blocks, and spilled
      *this = Loader(p, shared.source, thread, start);
    }
    keys.load_ahead(shared.k[stage], k, p.k_strides[2], max(min(p.head_dim - 16 * keys.chunk, 16), 0), p.kv_length - start, p.k_aligned);
    const bool padding = start + 16 * values.chunk < p.v_pitch;
    values.load_ahead(shared.v[stage], padding ? v : v - 16 * values.chunk, p.v_pitch, padding ? 16 : 0, p.value_dim, true);
    k += C.keys * p.k_strides[2];
    v += C.keys;
    start += C.keys;
  }
};

// Converts the chunks of a stage that this thread has copied to halves.
template <PortableConfig C>
__device__ void dequantize(PortableStorage<C>& shared, int thread, int stage, int slot) {
  using Storage = PortableStorage<C>;
  constexpr int loaders = PortableShape<C>::loaders;
  for_chunks<typename Storage::KeyBytes, loaders>(thread, [&](int key, int chunk) {
    store_halves(shared.k_half[slot], key, chunk, *reinterpret_cast<const uint4*>(shared.k[stage].at(key, chunk)));
  });
  for_chunks<typename Storage::ValueBytes, loaders>(thread, [&](int channel, int chunk) {
    store_halves(shared.v_half[slot], channel, chunk, *reinterpret_cast<const uint4*>(shared.v[stage].at(channel, chunk)));
  });
}

// The blocks first ... end - 1 of a tile and a range of keys; there may be none. All keys of the blocks edge ...
// whole - 1 are visible to every row.
template <PortableConfig C>
struct Blocks {
  int first, end, whole, edge = 0;

  __device__ Blocks(const Params& p, const Source& source) {
    const Visible visible(p);
    const int share = ((p.kv_length + C.keys - 1) / C.keys + p.key_splits - 1) / p.key_splits;
    first = share * source.split;
    end = min((visible.end(source.tile.first_row + PortableShape<C>::rows - 1) + C.keys - 1) / C.keys, first + share);
    whole = visible.end(source.tile.first_row) / C.keys;
    if constexpr (C.window) {
      first = max(first, visible.begin(source.tile.first_row) / C.keys);
      edge = (visible.begin(source.tile.first_row + PortableShape<C>::rows - 1) + C.keys - 1) / C.keys;
    }
  }

  __device__ bool is_whole(int n) const {
    if constexpr (C.window) return edge <= n && n < whole;
    return n < whole;
  }
};

// Starts the copies of the first blocks of K and V to the first stages.
template <PortableConfig C>
__device__ void load_ahead(const Params& p, PortableStorage<C>& shared, const Blocks<C>& blocks, Loader<C>& loader) {
#pragma unroll
  for (int n = 0; n < C.stages - 1; ++n) {
    if (blocks.first + n < blocks.end) loader.next(p, shared, n);
    ptx::cp_async_commit();
  }
}

// All warps load, convert and compute.
template <PortableConfig C, typename Attention>
__device__ void attend_together(const Params& p, PortableStorage<C>& shared, const Blocks<C>& blocks, Loader<C>& loader, Attention& attention) {
  constexpr int ahead = C.stages - 1;
  int stage = 0;
  for (int n = blocks.first; n < blocks.end; ++n) {
    if constexpr (ahead > 0) ptx::cp_async_wait_but<ahead - 1>();
    __syncthreads();  // all warps have read the previous block
    if (n + ahead < blocks.end) loader.next(p, shared, stage == 0 ? ahead : stage - 1);
    ptx::cp_async_commit();
    if constexpr (ahead == 0) ptx::cp_async_wait_but<0>();
    if constexpr (PortableShape<C>::halves) dequantize<C>(shared, threadIdx.x, stage, 0);
    if constexpr (PortableShape<C>::halves || ahead == 0) __syncthreads();
    if constexpr (PortableShape<C>::halves)
      attention.attend(p, shared, shared.k_half[0], shared.v_half[0], n * C.keys, blocks.is_whole(n));
    else
      attention.attend(p, shared, shared.k[stage], shared.v[stage], n * C.keys, blocks.is_whole(n));
    stage = stage == C.stages - 1 ? 0 : stage + 1;
  }
  if (blocks.first >= blocks.end) {  // without blocks, nothing has waited for the copies of the tile's scales
    ptx::cp_async_wait();
    __syncthreads();
  }
}

// Starts the copies of the next block to a stage, once all warps have released the stage.
template <PortableConfig C>
__device__ void load_when_empty(const Params& p, PortableStorage<C>& shared, Loader<C>& loader, const Ring<PortableShape<C>::slots>& ring) {
  ptx::mbarrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
  loader.next(p, shared, ring.stage);
  if (p.k_aligned) {
    ptx::cp_async_arrive(&shared.full[ring.stage]);
  } else {
    ptx::cp_async_wait();
    ptx::mbarrier_arrive(&shared.full[ring.stage]);
  }
}

// Producer warps: copy blocks to shared memory, and convert them to halves if consumers multiply halves.
template <PortableConfig C>
__device__ void produce(const Params& p, PortableStorage<C>& shared, const Blocks<C>& blocks, Ring<PortableShape<C>::slots>& ring) {
  const int thread = threadIdx.x - 32 * C.warps;
  Loader<C> loader(p, shared.source, thread, blocks.first * C.keys);
  if constexpr (PortableShape<C>::halves) {
    constexpr int ahead = C.stages - 1;
    load_ahead<C>(p, shared, blocks, loader);
    int stage = 0;
    for (int n = blocks.first; n < blocks.end; ++n, ring.advance()) {
      if (n + ahead < blocks.end) loader.next(p, shared, stage == 0 ? ahead : stage - 1);
      ptx::cp_async_commit();
      ptx::cp_async_wait_but<ahead>();
      ptx::mbarrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
      dequantize<C>(shared, thread, stage, ring.stage);
      ptx::mbarrier_arrive(&shared.full[ring.stage]);
      stage = stage == C.stages - 1 ? 0 : stage + 1;
    }
  } else {
    for (int n = blocks.first; n < blocks.end; ++n, ring.advance()) load_when_empty<C>(p, shared, loader, ring);
  }
}

// Consumer warps: attend to all blocks. before(n) is called before block n.
template <PortableConfig C, typename Attention, typename F>
__device__ void consume(const Params& p, PortableStorage<C>& shared, const Blocks<C>& blocks, Ring<PortableShape<C>::slots>& ring,
                        Attention& attention, F&& before) {
  for (int n = blocks.first; n < blocks.end; ++n, ring.advance()) {
    const int slot = ring.stage;
    before(n);
    ptx::mbarrier_wait(&shared.full[slot], ring.phase);
    if constexpr (PortableShape<C>::halves)
      attention.attend(p, shared, shared.k_half[slot], shared.v_half[slot], n * C.keys, blocks.is_whole(n));
    else
      attention.attend(p, shared, shared.k[slot], shared.v[slot], n * C.keys, blocks.is_whole(n));
    ptx::mbarrier_arrive(&shared.empty[slot]);
  }
}

// Instance::config is the PortableConfig. The template parameter of a kernel cannot be the config itself: nvcc writes a
// broken host stub for it.
template <class Instance>
__global__ void __launch_bounds__(PortableShape<Instance::config>::threads, Instance::config.ctas) portable_forward(const __grid_constant__ Params p) {
  constexpr PortableConfig C = Instance::config;
  using S = PortableShape<C>;
  using Attention = std::conditional_t<C.fused, Fused<C>, Unfused<C>>;
  extern __shared__ __align__(128) uint8_t bytes[];
  PortableStorage<C>& shared = *reinterpret_cast<PortableStorage<C>*>(bytes);
  const Schedule schedule(p, S::rows);
  const Visible visible(p);

  if constexpr (C.producers > 0 || C.drift) {
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < S::slots; ++slot) {
        ptx::mbarrier_init(&shared.full[slot], S::loaders);
        // every lane arrives: racecheck does not understand that one lane may arrive for its warp
        ptx::mbarrier_init(&shared.empty[slot], 32 * C.warps);
      }
    }
  }
  if (threadIdx.x == 0) shared.source = Source(p, schedule, blockIdx.x);
  __syncthreads();
  Ring<S::slots> ring, filling;
  for (int round = 0; shared.source.tile.exists(); ++round) {
    const Tile& tile = shared.source.tile;
    const Blocks<C> blocks(p, shared.source);
    shared.scales.load(p, visible, tile, tile.first_row);
    // a stage is filled again two blocks after it was read, so that warps may be one block apart
    constexpr int ahead = C.stages - 2;
    Loader<C> loader(p, shared.source, threadIdx.x, blocks.first * C.keys);
    const auto load_next = [&](int block) {
      if (block >= blocks.end) return;
      load_when_empty<C>(p, shared, loader, filling);
      filling.advance();
    };
    if constexpr (C.drift) {
      for (int n = 0; n < ahead; ++n) load_next(blocks.first + n);
    } else if constexpr (C.producers == 0) {
      load_ahead<C>(p, shared, blocks, loader);
    }
    load_queries<C>(p, shared, tile);
    if constexpr (C.producers > 0) {
      ptx::cp_async_wait();
      __syncthreads();
      if (threadIdx.x >= 32 * C.warps) {
        produce<C>(p, shared, blocks, ring);
      } else {
        Attention attention(shared);
        consume<C>(p, shared, blocks, ring, attention, [](int) {});
        attention.store(p, shared, shared.source.place(p));
      }
    } else if constexpr (C.drift) {
      ptx::cp_async_wait();
      __syncthreads();
      Attention attention(shared);
      consume<C>(p, shared, blocks, ring, attention, [&](int n) { load_next(n + ahead); });
      attention.store(p, shared, shared.source.place(p));
    } else {
      Attention attention(shared);
      attend_together<C>(p, shared, blocks, loader, attention);
      attention.store(p, shared, shared.source.place(p));
    }
    if constexpr (!C.persistent) return;
    __syncthreads();
    if (threadIdx.x == 0) shared.source = Source(p, schedule, schedule.after(round));
    __syncthreads();
  }
}

// Launches `ctas` CTAs: one for each tile and range of its keys, unless the instance is persistent.
template <class Instance>
cudaError_t launch(const Params& p, int ctas, cudaStream_t stream) {
  constexpr int bytes = sizeof(PortableStorage<Instance::config>);
  const cudaError_t error = cudaFuncSetAttribute(portable_forward<Instance>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  portable_forward<Instance><<<ctas, PortableShape<Instance::config>::threads, bytes, stream>>>(p.key_splits > 1 ? parts_of(p) : p);
  const cudaError_t launched = cudaGetLastError();
  return launched == cudaSuccess && p.key_splits > 1 ? combine(p, stream) : launched;
}

}  // namespace fp8attn
