// Runs a kernel, CTA after CTA: the scheduler of the threads' fibers. Included once.
#pragma once

#include <ucontext.h>

#include <random>

#include "params.h"

namespace fp8attn {
alignas(1024) uint8_t bytes[1 << 18];  // shared memory
}

namespace cta {

Thread* current;
Index block, grid;
int threads;

namespace {

constexpr size_t STACK = 1 << 17;
constexpr long PATIENCE = 1 << 18;  // rounds without an end: a deadlock

struct Meeting {
  int arrived = 0, round = 0;
  void* arguments[32];
};

std::vector<ucontext_t> contexts;
std::vector<Thread> all;
std::vector<Meeting> warps;
Meeting barriers[16];
ucontext_t scheduler;
std::vector<char> stacks;
std::mt19937 random_order(1);
void (*kernel)(const fp8attn::Params);
const fp8attn::Params* params;

void leave() { swapcontext(&contexts[current->index], &scheduler); }

void enter() {
  kernel(*params);
  current->done = true;
  leave();
}

struct Wait {
  const Meeting* meeting = nullptr;
  int round = 0;

  bool over() const { return meeting == nullptr || meeting->round != round; }
};

std::vector<Wait> waits;

void wait_for(Meeting& meeting, int round) {
  waits[current->index] = {&meeting, round};
  leave();
}

// Returns whether all threads came to an end.
bool run_block() {
  memset(fp8attn::bytes, 0xFF, sizeof(fp8attn::bytes));
  contexts.assign(threads, {});
  all.assign(threads, {});
  warps.assign(threads / 32, {});
  waits.assign(threads, {});
  std::fill_n(barriers, 16, Meeting{});
  stacks.resize(STACK * threads);
  std::vector<int> order;
  for (int i = 0; i < threads; ++i) {
    all[i].index = i;
    if (i % 32 == 0) order.push_back(i / 32);
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = stacks.data() + STACK * i;
    contexts[i].uc_stack.ss_size = STACK;
    makecontext(&contexts[i], enter, 0);
  }
  long patience = PATIENCE;
  for (int left = threads; left > 0 && patience > 0; --patience) {
    std::shuffle(order.begin(), order.end(), random_order);
    for (int warp : order) {
      for (int turns = 1 << random_order() % 11; turns > 0; --turns) {  // a block takes a few hundred
        for (int i = 32 * warp; i < 32 * warp + 32; ++i) {
          if (all[i].done || !waits[i].over()) continue;
          current = &all[i];
          swapcontext(&scheduler, &contexts[i]);
          left -= all[i].done;
        }
      }
    }
  }
  return patience > 0;
}

// CTA after CTA. Returns whether all came to an end.
bool run(void (*of)(const fp8attn::Params), const fp8attn::Params& p, int ctas, int size) {
  kernel = of;
  params = &p;
  threads = size;
  grid.x = ctas;
  for (block.x = 0; block.x < ctas; ++block.x) {
    if (!run_block()) return false;
  }
  return true;
}

}  // namespace

void yield() { leave(); }

void barrier(int id, int count) {
  Meeting& meeting = barriers[id];
  const int round = meeting.round;
  if (++meeting.arrived < count) return wait_for(meeting, round);
  meeting.arrived = 0;
  ++meeting.round;
}

void together(void* argument, void (*f)(void**)) {
  Meeting& meeting = warps[current->index / 32];
  const int round = meeting.round;
  meeting.arguments[current->index % 32] = argument;
  if (++meeting.arrived < 32) return wait_for(meeting, round);
  f(meeting.arguments);
  meeting.arrived = 0;
  ++meeting.round;
}

}  // namespace cta
