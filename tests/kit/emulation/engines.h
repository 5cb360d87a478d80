// What the engines of a CTA have in flight: operations of its threads that happen later. For run.cpp and engines.cpp.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "ptx/wgmma.h"

namespace cta {

using Deed = std::function<void()>;

struct Copy {
  void* to;
  const void* from;
  int bytes, count;  // the rest is zero
};

struct Started : fp8attn::ptx::Product {
  std::vector<uint32_t> before;  // accumulators to add to, unless a product in flight writes them
};

// Asynchronous operations in groups, which complete in order.
template <typename T>
struct Groups {
  std::vector<T> open;
  std::vector<std::vector<T>> committed;

  void commit() {
    committed.push_back(std::move(open));
    open.clear();
  }

  bool idle() const { return open.empty() && committed.empty(); }

  template <typename F>
  void for_all(F&& f) const {
    for (const auto& group : committed) std::for_each(group.begin(), group.end(), f);
    std::for_each(open.begin(), open.end(), f);
  }
};

struct Running : Thread {
  int cluster_round;
  bool done;
  Groups<Copy> copies;
  Groups<Started> products;
  Groups<Deed> stores;
};

inline Running& running() { return static_cast<Running&>(*current); }

// Runs `deed` at some later time, as the copy engine does.
void later(Deed deed);

// Whether an operation that may happen now or later happens now. Random.
bool happens_now();

}  // namespace cta
