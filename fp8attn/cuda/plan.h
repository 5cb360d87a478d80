// Plans: the launches of a call, recorded once and repeated with other tensors.
//
// To record a call, its Python code runs with tensors that have addresses but no memory. Launches are kept, not made.
// An address tells which tensor it belongs to, so that `Plan::run` can put another tensor's address in its place.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "params.h"
#include "tensor_map.h"
#include "torch_abi.h"

namespace fp8attn {

inline void check(cudaError_t error) { STD_TORCH_CHECK(error == cudaSuccess, "the CUDA kernel wasn't launched: ", cudaGetErrorString(error)); }

// Inside, a device is the current one. A thread that has made no CUDA call gets a context, which the driver's functions
// need.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) {
    check(cudaGetDevice(&before_));
    check(cudaSetDevice(device));
    device_ = device;
  }
  ~DeviceGuard() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0, device_ = 0;
};

template <class P>
using Launcher = cudaError_t (*)(const P&, int, cudaStream_t);

// Where parameters have addresses, in bytes from their beginning. A tensor map describes the tensor at `address`.
struct Addresses {
  struct Map {
    size_t map, address;
  };
  std::vector<size_t> pointers;
  std::vector<Map> maps;

  // Those of a part of the parameters, too, which begins `at` bytes from their beginning.
  Addresses with(const Addresses& of_part, size_t at) const {
    Addresses all = *this;
    for (const size_t pointer : of_part.pointers) all.pointers.push_back(at + pointer);
    for (const Map& m : of_part.maps) all.maps.push_back({at + m.map, at + m.address});
    return all;
  }
};

#define AT(field) offsetof(Params, field)
inline const Addresses& addresses(const Params&) {
  static const auto& found = *new Addresses{
      {AT(q), AT(k), AT(v), AT(q_scale), AT(k_scale), AT(v_scale), AT(v_mean), AT(mask), AT(out), AT(lse), AT(counter), AT(parts), AT(part_rows), AT(lse_mean), AT(bias),
       AT(partials_ready), AT(ready), AT(mask_bits), AT(block_mask), AT(sinks), AT(mean_scores), AT(tile_table)},
      {{AT(q_map), AT(q)}, {AT(k_map), AT(k)}, {AT(v_map), AT(v)}, {AT(out_map), AT(out)}, {AT(mask_map), AT(mask)}}};
  return found;
}
#undef AT

#define AT(field) offsetof(QuantizeParams, field)
inline const Addresses& addresses(const QuantizeParams&) {
  static const auto& found = *new Addresses{
      {AT(k), AT(v), AT(k_data), AT(k_scale), AT(k_mean), AT(v_data), AT(v_scale), AT(v_mean), AT(ready), AT(chunk_stats), AT(v_sums), AT(v_extremes), AT(cu_seqlens), AT(seqused), AT(page_table), AT(firsts),
       AT(ends)},
      {}};
  return found;
}
#undef AT

#define AT(field) offsetof(GeneralQuantizeParams, field)
inline const Addresses& addresses(const GeneralQuantizeParams&) {
  static const auto& found = *new Addresses{
      {AT(q), AT(k), AT(v), AT(q_data), AT(q_scale), AT(k_data), AT(k_scale), AT(k_mean), AT(v_data), AT(v_scale), AT(v_mean), AT(measured),
       AT(packed.cu_seqlens), AT(packed.seqused)},
      {}};
  return found;
}
#undef AT

#define AT(field) offsetof(UnsmoothLseParams, field)
inline const Addresses& addresses(const UnsmoothLseParams&) {
  static const auto& found = *new Addresses{{AT(q), AT(k_mean), AT(lse), AT(out)}, {}};
  return found;
}
#undef AT

#define AT(field) offsetof(DecodeParams, field)
inline const Addresses& addresses(const DecodeParams&) {
  static const auto& found = *new Addresses{
      {AT(k), AT(v), AT(recent_k), AT(recent_v), AT(q), AT(k_scale), AT(v_page_scale), AT(k_mean), AT(v_mean), AT(v_scale), AT(page_table), AT(lengths), AT(counts),
       AT(sequences), AT(cu_seqlens), AT(out), AT(lse), AT(parts), AT(part_rows), AT(tickets), AT(group_tickets), AT(sinks)},
      {{AT(k_map), AT(k)}, {AT(v_map), AT(v)}, {AT(recent_k_map), AT(recent_k)}, {AT(recent_v_map), AT(recent_v)}}};
  return found;
}
#undef AT

#define AT(field) offsetof(PrefillParams, field)
inline const Addresses& addresses(const PrefillParams&) {
  static const Addresses own = {
      {AT(v_page_scale), AT(page_table), AT(lengths), AT(counts), AT(sequences), AT(recent_k), AT(recent_v), AT(new_k), AT(new_v)},
      {{AT(new_k_map), AT(new_k)}, {AT(new_v_map), AT(new_v)}}};
  static const auto& found = *new Addresses(own.with(addresses(Params()), AT(call)));
  return found;
}
#undef AT

#define AT(field) offsetof(AppendParams, field)
inline const Addresses& addresses(const AppendParams&) {
  static const auto& found = *new Addresses{
      {AT(k), AT(v), AT(k_pages), AT(v_pages), AT(k_scale), AT(v_page_scale), AT(k_mean), AT(v_mean), AT(v_scale), AT(recent_k), AT(recent_v), AT(page_table), AT(lengths),
       AT(counts), AT(sequences), AT(cu_seqlens)},
      {}};
  return found;
}
#undef AT

// Allocation i of a recording owns the addresses from (i + 1) * SLOT behind its anchor on.
constexpr uint64_t SLOT = uint64_t(1) << 40;

// Parameters have, at byte `at`, the address of byte `offset` of an allocation.
struct Reference {
  size_t at, slot;
  uint64_t offset;
};

// The addresses at which the allocations begin in one run of a plan.
using Bases = std::vector<uint8_t*>;

inline void patch(void* parameters, const std::vector<Reference>& references, const Bases& bases) {
  for (const Reference& r : references) {
    const uint8_t* address = bases[r.slot] + r.offset;
    std::memcpy(static_cast<uint8_t*>(parameters) + r.at, &address, sizeof(address));
  }
}

struct Step {
  std::vector<Reference> references;

  virtual ~Step() = default;
  virtual void run(const Bases& bases, cudaStream_t stream) const = 0;
};

// A launch of one of the CUDA kernels.
template <class P>
struct InstanceStep : Step {
  P params;
  Launcher<P> launcher;
  int ctas;
  std::vector<Addresses::Map> maps;

  void run(const Bases& bases, cudaStream_t stream) const override {
    P p = params;
    patch(&p, references, bases);
    auto* bytes = reinterpret_cast<uint8_t*>(&p);
    for (const Addresses::Map& m : maps) {
      void* address;
      std::memcpy(&address, bytes + m.address, sizeof(address));
      STD_TORCH_CHECK(replace_address(*reinterpret_cast<CUtensorMap*>(bytes + m.map), address), "no tensor map for this address");
    }
    check(launcher(p, ctas, stream));
  }
};

// A launch of a kernel of the driver, with each parameter in a word of 8 bytes.
struct FunctionStep : Step {
  CUfunction function;
  std::vector<unsigned> shape;  // grid (x, y, z), threads, bytes of shared memory
  bool dependent;               // starts before the previous kernel has ended
  std::vector<uint64_t> words;

  void run(const Bases& bases, cudaStream_t stream) const override {
    std::vector<uint64_t> values = words;
    patch(values.data(), references, bases);
    std::vector<void*> parameters(values.size());
    for (size_t i = 0; i < values.size(); ++i) parameters[i] = &values[i];
    CUlaunchAttribute attribute = {};
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config = {};
    config.gridDimX = shape[0];
    config.gridDimY = shape[1];
    config.gridDimZ = shape[2];
    config.blockDimX = shape[3];
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shape[4];
    config.hStream = stream;
    config.attrs = &attribute;
    config.numAttrs = dependent;
    static const auto launch = driver_function<decltype(&cuLaunchKernelEx)>("cuLaunchKernelEx");
    const CUresult error = launch == nullptr ? CUDA_ERROR_NOT_FOUND : launch(&config, function, parameters.data(), nullptr);
    STD_TORCH_CHECK(error == CUDA_SUCCESS, "the Triton kernel wasn't launched: CUDA driver error ", int(error));
  }
};

// An output: what it is made by, and its allocation.
struct Output {
  std::vector<int64_t> sizes, strides;
  ScalarType dtype;
  size_t slot;
};

// The launches of a call. Its allocations are its inputs, its outputs, and parts of one workspace. The workspace begins
// with `zeros` bytes that are 0 before the first launch. Launches may write to inputs: those of a KV cache.
struct Plan {
  std::vector<std::unique_ptr<const Step>> steps;
  std::vector<Output> outputs;
  std::vector<std::pair<size_t, int64_t>> rooms;  // allocation, offset in the workspace
  int64_t workspace = 0, zeros = 0;
  size_t slots = 0;

  // On the inputs' device, which is the current one.
  std::vector<Tensor> run(const std::vector<Tensor>& inputs) const {
    const Device device = inputs.at(0).device();
    Bases bases(slots);
    for (size_t i = 0; i < inputs.size(); ++i) {
      auto* data = static_cast<uint8_t*>(const_cast<void*>(inputs[i].const_data_ptr()));
      bases[i] = data - reinterpret_cast<uintptr_t>(data) % 16;
    }
    std::vector<Tensor> made;
    made.reserve(outputs.size());
    for (const Output& o : outputs) {
      made.push_back(empty_strided(o.sizes, o.strides, o.dtype, device));
      bases[o.slot] = static_cast<uint8_t*>(made.back().mutable_data_ptr());
    }
    const std::optional<Tensor> room = workspace > 0 ? std::optional(memory(workspace, device)) : std::nullopt;
    uint8_t* const begin = room ? static_cast<uint8_t*>(room->mutable_data_ptr()) : nullptr;
    for (const auto& [slot, offset] : rooms) bases[slot] = begin + offset;
    const cudaStream_t stream = current_stream(device.index());
    if (zeros > 0) check(cudaMemsetAsync(begin, 0, zeros, stream));
    for (const auto& step : steps) step->run(bases, stream);
    return made;
  }
};

// A call that is being recorded.
class Recording {
 public:
  explicit Recording(Device device) : anchor_(memory(1, device)) {}

  // Without memory. Address: `remainder` bytes behind a multiple of SLOT, counted from the anchor.
  Tensor tensor(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, ScalarType dtype, int64_t remainder, bool zero) {
    int64_t elements = 1;
    for (size_t i = 0; i < sizes.size(); ++i) elements = sizes[i] == 0 || elements == 0 ? 0 : elements + (sizes[i] - 1) * strides[i];
    allocations_.push_back({elements * int64_t(element_size(dtype)) + remainder, zero});
    if (allocations_.back().bytes >= int64_t(SLOT)) fail("a tensor is too large");
    STD_TORCH_CHECK(remainder % int64_t(element_size(dtype)) == 0, "a tensor doesn't begin at a multiple of its elements' size");
    return behind(anchor_, (allocations_.size() * SLOT + remainder) / element_size(dtype), sizes, strides, dtype);
  }

  // How far a tensor is behind the anchor.
  uint64_t distance(const Tensor& x) const { return distance(reinterpret_cast<uintptr_t>(x.const_data_ptr())); }

  template <class P>
  void add(int64_t launcher, const P& p, int64_t ctas) {
    auto step = std::make_unique<InstanceStep<P>>();
    step->params = p;
    step->launcher = reinterpret_cast<Launcher<P>>(launcher);
    step->ctas = ctas;
    const auto* bytes = reinterpret_cast<const uint8_t*>(&p);
    for (size_t at : addresses(p).pointers) {
      uint64_t address;
      std::memcpy(&address, bytes + at, sizeof(address));
      refer(*step, at, address);
    }
    const CUtensorMap none = {};
    for (const Addresses::Map& m : addresses(p).maps)
      if (std::memcmp(bytes + m.map, &none, sizeof(none)) != 0) step->maps.push_back(m);
    steps_.push_back(std::move(step));
  }

  // `pointers`: which of the words are addresses.
  void add(int64_t function, const std::vector<int64_t>& shape, bool dependent, const std::vector<int64_t>& words, const std::vector<int64_t>& pointers) {
    auto step = std::make_unique<FunctionStep>();
    step->function = reinterpret_cast<CUfunction>(function);
    step->shape.assign(shape.begin(), shape.end());
    step->dependent = dependent;
    step->words.assign(words.begin(), words.end());
    for (int64_t i : pointers) refer(*step, i * sizeof(uint64_t), words[i]);
    steps_.push_back(std::move(step));
  }

  // The plan with these outputs, whose inputs are the first `inputs` allocations; null if there can't be one.
  std::shared_ptr<const Plan> finish(size_t inputs, const std::vector<Tensor>& outputs) {
    auto plan = std::make_shared<Plan>();
    std::vector<bool> placed(allocations_.size());
    std::fill_n(placed.begin(), inputs, true);
    for (const Tensor& x : outputs) {
      const size_t slot = distance(x) / SLOT - 1;
      if (distance(x) % SLOT != 0 || slot >= allocations_.size() || placed[slot]) return nullptr;
      placed[slot] = true;
      plan->outputs.push_back({x.sizes().vec(), x.strides().vec(), x.scalar_type(), slot});
    }
    for (const bool zero : {true, false}) {
      for (size_t slot = 0; slot < allocations_.size(); ++slot) {
        if (placed[slot] || allocations_[slot].zero != zero || allocations_[slot].bytes == 0) continue;
        plan->rooms.emplace_back(slot, plan->workspace);
        plan->workspace += (allocations_[slot].bytes + 255) / 256 * 256;
      }
      if (zero) plan->zeros = plan->workspace;
    }
    for (const Output& o : plan->outputs)
      if (allocations_[o.slot].zero) return nullptr;
    plan->steps = std::move(steps_);
    plan->slots = allocations_.size();
    return failure_.empty() ? plan : nullptr;
  }

 private:
  struct Allocation {
    int64_t bytes;
    bool zero;
  };

  void fail(const char* why) { failure_ = why; }

  void refer(Step& step, size_t at, uint64_t address) {
    if (address == 0) return;
    const uint64_t offset = distance(address) % SLOT;
    const size_t slot = distance(address) / SLOT - 1;  // of an address that isn't a recorded tensor's: behind all
    if (slot >= allocations_.size() || int64_t(offset) > allocations_[slot].bytes) return fail("an address belongs to no tensor of the recording");
    step.references.push_back({at, slot, offset});
  }

  uint64_t distance(uint64_t address) const { return address - reinterpret_cast<uintptr_t>(anchor_.const_data_ptr()); }

  Tensor anchor_;  // torch makes CUDA tensors only where memory of the device is
  std::vector<Allocation> allocations_;
  std::vector<std::unique_ptr<const Step>> steps_;
  std::string failure_;
};

// This thread's recording, or null.
inline thread_local std::unique_ptr<Recording> recording;

// All that a launch follows from but the tensors' addresses.
using Facts = std::vector<int64_t>;

struct HashOfFacts {
  size_t operator()(const Facts& facts) const {
    uint64_t hash = 14695981039346656037u;  // FNV-1a, of words
    for (int64_t fact : facts) hash = (hash ^ uint64_t(fact)) * 1099511628211u;
    return hash ^ hash >> 32;
  }
};

// Of calls that were made before. Threads share it.
class Plans {
 public:
  void add(Facts&& facts, std::shared_ptr<const Plan> plan) {
    const std::lock_guard lock(mutex_);
    if (plans_.size() >= MOST) plans_.clear();
    plans_[std::move(facts)] = std::move(plan);
  }

  std::shared_ptr<const Plan> find(const Facts& facts) {
    const std::lock_guard lock(mutex_);
    const auto found = plans_.find(facts);
    return found == plans_.end() ? nullptr : found->second;
  }

 private:
  static constexpr size_t MOST = 4096;
  std::mutex mutex_;
  std::unordered_map<Facts, std::shared_ptr<const Plan>, HashOfFacts> plans_;
};

inline Plans& plans() {
  static auto& all = *new Plans;  // never destroyed: threads may outlive main
  return all;
}

}  // namespace fp8attn
