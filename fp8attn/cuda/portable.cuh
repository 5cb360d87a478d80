// The portable kernel, sm_80 and later: cp.async, mma.sync, and what of the ladder its config switches on.
//
// A CTA attends with a tile of queries, each warp with rows of its own, to one block of keys after the other. e4m3 becomes half where
// the config says: in shared memory, once for the CTA; in registers, on the way to the tensor core; or, where that multiplies e4m3, nowhere.
#pragma once

#include <type_traits>

#include "config.h"
#include "params.h"
#include "ptx/cp_async.h"
#include "ptx/mbarrier.h"
#include "tile/facts.h"
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
  // tiles of K and V that a warp multiplies with are halves or bytes, and what is in flight is bytes
  static constexpr bool halves = C.operands == Operands::shared;
  static constexpr int half_slots = halves ? C.producers > 0 ? 2 : 1 : 0;
  static constexpr int slots = halves ? half_slots : C.stages;
};

// The tile and where its keys and values come from: in shared memory and read there again, since registers are scarce.
struct Source {
  Tile tile;
  const uint8_t *k, *v;
  const float* k_scale;

  __device__ Source(const Params& p, const Tile& its_tile)
      : tile(its_tile),
        k(p.k + tile.batch * p.k_strides[0] + tile.kv_head * p.k_strides[1]),
        v(p.v + (int64_t(tile.batch) * p.kv_heads + tile.kv_head) * p.value_dim * p.v_pitch),
        k_scale(p.k_scale + tile.batch * p.k_scale_strides[0] + tile.kv_head * p.k_scale_strides[1]) {}
};

template <PortableConfig C>
struct PortableStorage {
  using S = PortableShape<C>;

  SharedTile<S::rows, C.operands == Operands::native ? C.head_dim : 2 * C.head_dim, C.swizzle> q;
  SharedTile<C.keys, C.head_dim, C.swizzle> k[C.stages];
  SharedTile<C.value_dim, C.keys, C.swizzle> v[C.stages];
  SharedTile<S::halves ? C.keys : 0, 2 * C.head_dim, C.swizzle> k_half[S::halves ? S::half_slots : 1];
  SharedTile<S::halves ? C.value_dim : 0, 2 * C.keys, C.swizzle> v_half[S::halves ? S::half_slots : 1];
  SharedTile<C.fused ? 0 : S::rows, 4 * C.keys, false> s;
  SharedTile<C.fused ? 0 : S::rows, 2 * C.keys, false> p;
  float m[C.fused ? 4 : S::rows], l[C.fused ? 4 : S::rows], alpha[C.fused ? 4 : S::rows];
  TileFacts<C.value_dim, S::rows, S::threads> facts;
  uint64_t full[S::slots], empty[S::slots];
  Source source;
};

// Sixteen bytes, the first `count` of them from anywhere.
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

// Queries of a tile; zeros outside.
template <PortableConfig C>
__device__ void load_queries(const Params& p, PortableStorage<C>& shared, const Tile& tile) {
  using Codes = SharedTile<PortableShape<C>::rows, C.head_dim, C.swizzle>;
  const uint8_t* q = p.q + tile.batch * p.q_strides[0] + tile.head * p.q_strides[1];
  for_chunks<Codes, PortableShape<C>::threads>(threadIdx.x, [&](int row, int chunk) {
    const int count = tile.first_row + row < p.q_length ? max(min(p.head_dim - 16 * chunk, 16), 0) : 0;
    const uint4 codes = load_chunk(q + (tile.first_row + row) * p.q_strides[2] + 16 * chunk, count, p.q_aligned);
    if constexpr (C.operands == Operands::native)
      *reinterpret_cast<uint4*>(shared.q.at(row, chunk)) = codes;
    else
      store_halves(shared.q, row, chunk, codes);
  });
}

// A block of `tile`'s rows on its way: row i is `distance` bytes behind row i - 1, has `width` bytes, and exists if i < rows.
template <int THREADS, typename Tile>
__device__ void load_rows_ahead(Tile& tile, const uint8_t* from, int64_t distance, int width, int rows, bool aligned, int thread) {
  constexpr int pass = THREADS / Tile::chunks;
  static_assert(THREADS % Tile::chunks == 0 && pass % 8 == 0);  // a chunk is then moved alike in all of a thread's rows
  constexpr bool even = Tile::rows % pass == 0;
  const int row = thread / Tile::chunks, chunk = thread % Tile::chunks;
  const int count = max(min(width - 16 * chunk, 16), 0), offset = Tile::offset(row, chunk);
  from += row * distance + (count > 0 ? 16 * chunk : 0);
  if (aligned) {
#pragma unroll
    for (int i = 0; i < Tile::rows; i += pass) {
      if (even || row + i < Tile::rows) ptx::cp_async_16(tile.bytes + offset + i * Tile::pitch, from + i * distance, row + i < rows ? count : 0);
    }
  } else {
    for (int i = 0; i < Tile::rows && (even || row + i < Tile::rows); i += pass)
      *reinterpret_cast<uint4*>(tile.bytes + offset + i * Tile::pitch) = load_chunk(from + i * distance, row + i < rows ? count : 0, false);
  }
}

// One block of K and V on its way to a stage. Keys past the end are zero, V's by its padding.
template <PortableConfig C>
__device__ void load_block(const Params& p, PortableStorage<C>& shared, int thread, int block, int stage) {
  constexpr int loaders = PortableShape<C>::loaders;
  asm volatile("" : "+r"(thread));  // or all addresses are made before the loop over blocks, and spilled
  const int start = block * C.keys;
  load_rows_ahead<loaders>(shared.k[stage], shared.source.k + start * p.k_strides[2], p.k_strides[2], p.head_dim, p.kv_length - start, p.k_aligned, thread);
  load_rows_ahead<loaders>(shared.v[stage], shared.source.v + start, p.v_pitch, p.v_pitch - start, p.value_dim, true, thread);
}

// What this thread has copied of a stage becomes halves.
template <PortableConfig C>
__device__ void dequantize(PortableStorage<C>& shared, int thread, int stage, int slot) {
  using Storage = PortableStorage<C>;
  constexpr int loaders = PortableShape<C>::loaders;
  for_chunks<std::remove_reference_t<decltype(Storage::k[0])>, loaders>(thread, [&](int key, int chunk) {
    store_halves(shared.k_half[slot], key, chunk, *reinterpret_cast<const uint4*>(shared.k[stage].at(key, chunk)));
  });
  for_chunks<std::remove_reference_t<decltype(Storage::v[0])>, loaders>(thread, [&](int channel, int chunk) {
    store_halves(shared.v_half[slot], channel, chunk, *reinterpret_cast<const uint4*>(shared.v[stage].at(channel, chunk)));
  });
}

// Blocks of a tile: all, and those that every row sees whole. One even if no row sees a key, so that there is something to hide.
template <PortableConfig C>
struct Blocks {
  int all, whole;

  __device__ Blocks(const Params& p, const Tile& tile) {
    const Visible visible(p);
    all = max((visible.end(tile.first_row + PortableShape<C>::rows - 1) + C.keys - 1) / C.keys, 1);
    whole = visible.end(tile.first_row) / C.keys;
  }
};

// The first blocks of K and V on their way to the first stages.
template <PortableConfig C>
__device__ void load_ahead(const Params& p, PortableStorage<C>& shared, const Blocks<C>& blocks, int thread) {
#pragma unroll
  for (int n = 0; n < C.stages - 1; ++n) {
    if (n < blocks.all) load_block<C>(p, shared, thread, n, n);
    ptx::cp_async_commit();
  }
}

// All warps load, convert and compute.
template <PortableConfig C, typename Attention>
__device__ void attend_together(const Params& p, PortableStorage<C>& shared, const Blocks<C>& blocks, Attention& attention) {
  constexpr int ahead = C.stages - 1;
  int stage = 0;
  for (int n = 0; n < blocks.all; ++n) {
    if constexpr (ahead > 0) ptx::cp_async_wait_but<ahead - 1>();
    __syncthreads();  // the last block has been read
    if (n + ahead < blocks.all) load_block<C>(p, shared, threadIdx.x, n + ahead, stage == 0 ? ahead : stage - 1);
    ptx::cp_async_commit();
    if constexpr (ahead == 0) ptx::cp_async_wait_but<0>();
    if constexpr (PortableShape<C>::halves) dequantize<C>(shared, threadIdx.x, stage, 0);
    if constexpr (PortableShape<C>::halves || ahead == 0) __syncthreads();
    if constexpr (PortableShape<C>::halves)
      attention.attend(p, shared, shared.k_half[0], shared.v_half[0], n * C.keys, n < blocks.whole);
    else
      attention.attend(p, shared, shared.k[stage], shared.v[stage], n * C.keys, n < blocks.whole);
    stage = stage == C.stages - 1 ? 0 : stage + 1;
  }
}

// Producer warps: blocks on their way, as halves if the consumers want those.
template <PortableConfig C>
__device__ void produce(const Params& p, PortableStorage<C>& shared, const Blocks<C>& blocks, Ring<PortableShape<C>::slots>& ring) {
  const int thread = threadIdx.x - 32 * C.warps;
  if constexpr (PortableShape<C>::halves) {
    constexpr int ahead = C.stages - 1;
    load_ahead<C>(p, shared, blocks, thread);
    int stage = 0;
    for (int n = 0; n < blocks.all; ++n, ring.advance()) {
      if (n + ahead < blocks.all) load_block<C>(p, shared, thread, n + ahead, stage == 0 ? ahead : stage - 1);
      ptx::cp_async_commit();
      ptx::cp_async_wait_but<ahead>();
      ptx::mbarrier_wait(&shared.empty[ring.stage()], ring.phase() ^ 1);
      dequantize<C>(shared, thread, stage, ring.stage());
      ptx::mbarrier_arrive(&shared.full[ring.stage()]);
      stage = stage == C.stages - 1 ? 0 : stage + 1;
    }
  } else {
    for (int n = 0; n < blocks.all; ++n, ring.advance()) {
      ptx::mbarrier_wait(&shared.empty[ring.stage()], ring.phase() ^ 1);
      load_block<C>(p, shared, thread, n, ring.stage());
      if (p.k_aligned) {
        ptx::cp_async_arrive(&shared.full[ring.stage()]);
      } else {
        ptx::cp_async_wait();
        ptx::mbarrier_arrive(&shared.full[ring.stage()]);
      }
    }
  }
}

template <PortableConfig C, typename Attention>
__device__ void consume(const Params& p, PortableStorage<C>& shared, const Blocks<C>& blocks, Ring<PortableShape<C>::slots>& ring,
                        Attention& attention) {
  for (int n = 0; n < blocks.all; ++n, ring.advance()) {
    const int slot = ring.stage();
    ptx::mbarrier_wait(&shared.full[slot], ring.phase());
    if constexpr (PortableShape<C>::halves)
      attention.attend(p, shared, shared.k_half[slot], shared.v_half[slot], n * C.keys, n < blocks.whole);
    else
      attention.attend(p, shared, shared.k[slot], shared.v[slot], n * C.keys, n < blocks.whole);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&shared.empty[slot]);
  }
}

// Instance::config is the PortableConfig; a kernel's own template parameter can't be one, for which nvcc writes a broken stub.
template <class Instance>
__global__ void __launch_bounds__(PortableShape<Instance::config>::threads, Instance::config.ctas) portable_forward(const __grid_constant__ Params p) {
  constexpr PortableConfig C = Instance::config;
  using S = PortableShape<C>;
  using Attention = std::conditional_t<C.fused, Fused<C>, Unfused<C>>;
  extern __shared__ __align__(128) uint8_t bytes[];
  PortableStorage<C>& shared = *reinterpret_cast<PortableStorage<C>*>(bytes);
  const Schedule schedule(p, S::rows);
  const Visible visible(p);

  if constexpr (C.producers > 0) {
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < S::slots; ++slot) {
        ptx::mbarrier_init(&shared.full[slot], 32 * C.producers);
        ptx::mbarrier_init(&shared.empty[slot], C.warps);
      }
    }
  }
  if (threadIdx.x == 0) shared.source = Source(p, schedule.at(blockIdx.x));
  __syncthreads();
  Ring<S::slots> ring;
  for (int round = 0; shared.source.tile.exists(); ++round) {
    const Tile& tile = shared.source.tile;
    const Blocks<C> blocks(p, tile);
    shared.facts.load(p, visible, tile, tile.first_row);
    if constexpr (C.producers == 0) load_ahead<C>(p, shared, blocks, threadIdx.x);
    load_queries<C>(p, shared, tile);
    if constexpr (C.producers > 0) {
      ptx::cp_async_wait();
      __syncthreads();
      if (threadIdx.x >= 32 * C.warps) {
        produce<C>(p, shared, blocks, ring);
      } else {
        Attention attention(shared);
        consume<C>(p, shared, blocks, ring, attention);
        attention.store(p, shared, tile);
      }
    } else {
      Attention attention(shared);
      attend_together<C>(p, shared, blocks, attention);
      attention.store(p, shared, tile);
    }
    if constexpr (!C.persistent) return;
    __syncthreads();
    if (threadIdx.x == 0) shared.source = Source(p, schedule.at(schedule.after(round)));
    __syncthreads();
  }
}

// `ctas` CTAs, which is one for each tile unless the instance is persistent.
template <class Instance>
cudaError_t launch(const Params& p, int ctas, cudaStream_t stream) {
  constexpr int bytes = sizeof(PortableStorage<Instance::config>);
  const cudaError_t error = cudaFuncSetAttribute(portable_forward<Instance>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  portable_forward<Instance><<<ctas, PortableShape<Instance::config>::threads, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace fp8attn
