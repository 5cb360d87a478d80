// The portable kernel. instance.h names the instance.
#include "combine.cuh"
#include "instance.h"
#include "portable.cuh"
#include "run.h"

// `params`: Params from its first pointer on, without the tensor maps. Returns whether the kernel ended.
extern "C" bool forward(const void* params, int bytes, int ctas) {
  fp8attn::Params p = {};
  constexpr int size = offsetof(fp8attn::Params, next_shard_scales) + sizeof(p.next_shard_scales) - offsetof(fp8attn::Params, q);
  if (bytes != (size + 7) / 8 * 8) abort();
  memcpy(&p.q, params, bytes);
  using Shape = fp8attn::PortableShape<fp8attn::Instance::config>;
  if (!cta::run(fp8attn::portable_forward<fp8attn::Instance>, p.key_splits > 1 ? fp8attn::parts_of(p) : p, ctas, Shape::threads)) return false;
  const int64_t rows = int64_t(p.batches) * p.q_heads * p.q_length;
  return p.key_splits == 1 || cta::run(fp8attn::combine_rows, p, (rows + fp8attn::COMBINING_WARPS - 1) / fp8attn::COMBINING_WARPS, 32 * fp8attn::COMBINING_WARPS);
}
