// The K/V quantizer. instance.h names the instance. Variant::int8: keys become int8, else e4m3; half:
// tensors are halves, else bfloat16.
#include "instance.h"
#include "run.h"

namespace fp8attn {

template <class Instance, bool INT8, typename T>
bool run_clusters(const QuantizeParams& p) {
  if constexpr (Instance::config.packed && !Instance::config.paged) {
    const int cluster = p.cluster_chunks * p.head_dim / CHANNELS;
    return cluster == 0 || cta::run(quantize_kv<Instance, INT8, T>, p, p.sequences * p.heads * cluster, THREADS, cluster, 100);
  }
  return true;
}

// It takes about 40 rounds.
template <class Instance, bool INT8, typename T>
bool run(const QuantizeParams& p, int ctas) {
  const int slices = p.head_dim / CHANNELS, token_chunks = (p.length + TOKEN_CHUNK - 1) / TOKEN_CHUNK;
  if constexpr (Instance::config.token_chunks == 1 || Instance::config.packed) {
    constexpr bool packed = Instance::config.packed;
    const int of_heads = packed ? p.sequences * p.heads * slices : ctas / token_chunks;
    // behind clusters, and of a cache in pages, few CTAs have all items; it takes so many rounds for each
    const bool few = p.cluster_chunks > 0 || Instance::config.paged;
    const auto grid = [&](int items) { return few ? std::min(items, 5) : items; };
    const auto rounds = [&](int items) { return few ? 100 * (items / 5 + 1) : 100; };
    const int writers = ctas / slices * writers_of(slices), of_measure = ctas + (p.step == QuantizeStep::all) * of_heads;
    return (p.step == QuantizeStep::write || cta::run(measure_kv<Instance, T>, p, grid(of_measure), THREADS, 1, rounds(of_measure))) &&
           run_clusters<Instance, INT8, T>(p) &&
           (p.step != QuantizeStep::all || cta::run(finish_kv<packed, Instance::config.paged, T>, p, grid(of_heads), CHANNELS + 32, 1, rounds(of_heads))) &&
           (p.step == QuantizeStep::measure || cta::run(write_kv<Instance, INT8, T>, p, grid(writers), THREADS, 1, rounds(writers)));
  } else {
    return cta::run(quantize_kv<Instance, INT8, T>, p, ctas, THREADS, slices * token_chunks, 100);
  }
}

}  // namespace fp8attn

// Returns whether the kernels ended.
extern "C" bool quantize(const fp8attn::QuantizeParams* params, int bytes, int ctas) {
  using namespace fp8attn;
  if (bytes != sizeof(*params) || params->int8 != Variant::int8 || params->half != Variant::half) abort();
  return run<Instance, Variant::int8, std::conditional_t<Variant::half, __half, __nv_bfloat16>>(*params, ctas);
}
