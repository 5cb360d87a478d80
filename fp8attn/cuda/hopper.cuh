// The Hopper kernel, sm_90a: TMA, wgmma in e4m3 and int8, warp specialisation, persistent.
//
// One producer thread streams queries, keys and values into shared memory. Each consumer warpgroup attends with 64
// query rows. P stays in registers from accumulator to operand, because V's keys are stored in the order that makes the
// two register layouts the same. V has 8 more channels than the caller knows of, all ones: the tensor core sums the
// rows of P.
#pragma once

#include "block_mask.h"
#include "hopper_mainloop.h"
#include "hopper_producer.h"
#include "ptx/uniform.h"

namespace fp8attn {

// Instance::config is the HopperConfig. A HopperConfig can't be a template parameter of the kernel itself, because nvcc
// then writes a broken stub.
template <class Instance, typename T>
__global__ void __launch_bounds__(Shape<Instance::config>::threads, 1) hopper_forward(const __grid_constant__ Params p) {
  constexpr HopperConfig C = Instance::config;
  extern __shared__ __align__(1024) uint8_t bytes[];
  SharedStorage<C>& shared = *reinterpret_cast<SharedStorage<C>*>(bytes);
  const ScheduleOf<C> schedule(p, Shape<C>::tile_rows, C.added && p.mask_batches == 1);
  const int warpgroup = ptx::uniform(threadIdx.x / 128);

  for (int stage = 0; stage < C.stages; ++stage) write_ones(&shared.v[stage][C.value_dim * KEYS], Shape<C>::threads);
  if (Shape<C>::start_by_product && threadIdx.x < 32) reinterpret_cast<uint32_t*>(shared.side.ones)[threadIdx.x] = ~0u;
  if (C.varlen && threadIdx.x == 0) ptx::wait_for_grids_before();  // one of which writes the table of tiles
  if (threadIdx.x == 0) {
    if constexpr (Shape<C>::stream_k) shared.side.work_tiles.find(schedule);
    write_next_work_tile<C>(shared, schedule, -1);
    for (int c = 0; c < C.consumers; ++c) {
      ptx::mbarrier_init(&shared.q_full[c], 1);
      ptx::mbarrier_init(&shared.q_empty[c], 4);
    }
    shared.added.init();
    if constexpr (Shape<C>::mean_by_products) {
      for (uint64_t& barrier : shared.mean.full) ptx::mbarrier_init(&barrier, 1);
      for (uint64_t& barrier : shared.mean.next_tile) ptx::mbarrier_init(&barrier, 1);
    }
    for (int stage = 0; stage < C.stages; ++stage) {
      ptx::mbarrier_init(&shared.k_full[stage], Shape<C>::skips_blocks ? 1 + C.consumers + (p.k_group == 1 ? 32 : 0) : 1);
      ptx::mbarrier_init(&shared.v_full[stage], 1);
      ptx::mbarrier_init(&shared.k_empty[stage], (Shape<C>::skips_blocks ? 128 : 4) * C.consumers);
      ptx::mbarrier_init(&shared.v_empty[stage], 4 * C.consumers);
    }
    ptx::fence_barrier_init();
  }
  ptx::fence_proxy_async();
  __syncthreads();
  // With `ready`, the grid before this one is the quantizer. It has waited for all earlier grids, and it reports in
  // `ready` which heads it has written.
  if (!C.fuse_q_quant || p.ready == nullptr) ptx::wait_for_grids_before();
  ptx::launch_dependents();

  if (warpgroup == 0) {
    ptx::registers_decrease<Shape<C>::producer_registers>();
    const int warp = ptx::uniform(threadIdx.x / 32);  // else the producer's thread spills
    if (warp == 1) {
      if constexpr (Shape<C>::skips_blocks) load_key_metadata<C>(p, shared);
      if constexpr (Shape<C>::mean_by_products) turn_means_back<C, T>(p, shared);
    } else if (threadIdx.x < (Shape<C>::skips_blocks ? 32 : 1)) {
      produce<C>(p, shared, schedule);
    }
  } else {
    ptx::registers_increase<C.registers>();
    consume<C, T>(p, shared, warpgroup - 1);
  }
}

// At most one CTA an SM: `ctas` of them. A programmatic dependent of what runs before it.
template <class Instance>
cudaError_t launch(const Params& p, int ctas, cudaStream_t stream) {
  constexpr HopperConfig C = Instance::config;
  static_assert(Shape<C>::partials_ready == Instance::partial_bytes);
  if constexpr (Shape<C>::skips_blocks) {
    const cudaError_t error = p.mask == nullptr ? cudaSuccess : build_block_mask(p, stream);
    if (error != cudaSuccess) return error;
  }
  constexpr int bytes = sizeof(SharedStorage<C>);
  using Half = std::conditional_t<C.fuse_q_quant, __half, __nv_bfloat16>;
  const auto kernel = p.half ? hopper_forward<Instance, Half> : hopper_forward<Instance, __nv_bfloat16>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = ctas;
  config.blockDim = Shape<C>::threads;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace fp8attn
