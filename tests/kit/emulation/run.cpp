// The scheduler of the threads' fibers, compiled once for all kernels.
#include "run.h"

#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <random>

#include "engines.h"

namespace fp8attn {
alignas(1024) uint8_t bytes[16 * cta::SHARED], seen_by_engines[16 * cta::SHARED];  // of all CTAs of a cluster
}

namespace cta {

Thread* current;
Index block, grid;
int threads, cluster;

namespace {

constexpr size_t STACK = 1 << 17;

struct Meeting {
  int arrived = 0, round = 0, passed = 0;
  void* arguments[32];
};

// The control flow of a thread. It starts by setcontext. From then on it is left and entered by longjmp, which needs no
// system call.
struct Fiber {
  ucontext_t context;
  jmp_buf place;
  bool begun = false;
};

std::vector<Fiber> fibers;
std::vector<Running> all;
std::vector<Meeting> warps;
Meeting barriers[16][16], whole_cluster;
jmp_buf scheduler;
std::unique_ptr<char[]> stacks;
std::mt19937 random_order(1);
const Kernel* kernel;

int number() { return current->rank * threads + current->index; }

void leave() {
  if (_setjmp(fibers[number()].place) == 0) _longjmp(scheduler, 1);
}

// Lets a thread run until it leaves.
void enter(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}

// Whether a thread ended with wgmma or TMA stores in flight, which would outlive its CTA.
bool left_something;

void run_thread() {
  kernel->run(*kernel);
  running().done = true;
  left_something |= !running().products.idle() || !running().stores.idle();
  leave();
}

// Per warpgroup, the hashes of the call paths by which its warps reached meet_in_warpgroup; per warp, how often it
// reached it.
std::vector<std::vector<size_t>> ways;
std::vector<size_t> met;
bool went_another_way;

bool warp_rests;

std::vector<Deed> in_flight, of_the_grid_before;

// Runs some of the copies in flight, in random order.
void copy_some() {
  std::shuffle(in_flight.begin(), in_flight.end(), random_order);
  for (int count = random_order() % (in_flight.size() + 1); count > 0; --count) {
    const Deed deed = std::move(in_flight.back());
    in_flight.pop_back();
    deed();
  }
}

struct Wait {
  const Meeting* meeting = nullptr;
  int round = 0;
  const uint64_t* barrier = nullptr;
  uint32_t parity = 0;

  bool over() const {
    if (barrier != nullptr) return fp8attn::ptx::barrier_at(const_cast<uint64_t*>(barrier)).parity != parity;
    return meeting == nullptr || meeting->round != round;
  }
};

std::vector<Wait> waits;

void wait_for(Meeting& meeting, int round) {
  waits[number()] = {&meeting, round};
  leave();
}

// Returns whether all threads ended, with nothing in flight.
bool run_cluster(long patience) {
  const int count = cluster * threads;
  static const uint8_t fills[] = {0x7F, 0xFF, 0x4F};
  static int turn;
  memset(fp8attn::bytes, may_hold_large_numbers ? fills[turn++ % 3] : 0xFF, cluster * SHARED);
  memset(fp8attn::seen_by_engines, 0xFF, cluster * SHARED);
  fibers.assign(count, {});
  all.assign(count, {});
  warps.assign(count / 32, {});
  waits.assign(count, {});
  std::fill_n(&barriers[0][0], 16 * 16, Meeting{});
  whole_cluster = {};
  left_something = went_another_way = false;
  ways.assign((count + 127) / 128, {});
  met.assign((count + 31) / 32, 0);
  in_flight.clear();
  std::vector<int> order;
  for (int i = 0; i < count; ++i) {
    all[i].index = i % threads, all[i].rank = i / threads;
    if (i % 32 == 0) order.push_back(i / 32);
    ucontext_t& context = fibers[i].context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks.get() + STACK * i;
    context.uc_stack.ss_size = STACK;
    makecontext(&context, run_thread, 0);
  }
  std::vector<int> start(cluster);  // the round in which each CTA starts
  for (int& round : start) round = cluster > 1 ? random_order() % 20 : 0;
  int round = 0;
  for (int left = count; left > 0 && patience > 0; --patience, ++round) {
    std::shuffle(order.begin(), order.end(), random_order);
    if (!of_the_grid_before.empty() && random_order() % 16 == 0) {
      of_the_grid_before.back()();
      of_the_grid_before.pop_back();
    }
    for (int warp : order) {
      if (!in_flight.empty()) copy_some();
      if (round < start[warp * 32 / threads]) continue;
      bool runs = true;
      warp_rests = false;
      // a key block takes a few hundred turns
      for (int turns = 1 << random_order() % 11; turns > 0 && runs && !warp_rests; --turns) {
        runs = false;
        for (int i = 32 * warp; i < 32 * warp + 32; ++i) {
          if (all[i].done || !waits[i].over()) continue;
          runs = true;
          waits[i] = {};
          current = &all[i];
          enter(fibers[i]);
          left -= all[i].done;
        }
      }
    }
  }
  return patience > 0 && !left_something && !went_another_way && in_flight.empty();
}

}  // namespace

bool may_hold_large_numbers = true;

void bring(void* to, const void* from, int64_t bytes, int* ready) {
  of_the_grid_before.push_back([=] {
    memcpy(to, from, bytes);
    ++*ready;
  });
}

bool run(const Kernel& of, bool backwards, int ctas, int size, int cluster_size, long patience) {
  kernel = &of;
  threads = size, cluster = cluster_size;
  grid.x = ctas;
  if (cluster > 16 || ctas % cluster != 0) abort();
  stacks.reset(new char[STACK * threads * cluster]);
  for (int done = 0; done < ctas; done += cluster) {
    block.x = backwards ? ctas - cluster - done : done;
    if (!run_cluster(patience)) return false;
  }
  return true;
}

void yield() { leave(); }

void perhaps_rest() {
  warp_rests = random_order() % 4 == 0;
  if (warp_rests) leave();
}

void wait_for_phase(const uint64_t* barrier, uint32_t parity) {
  const Wait wait = {nullptr, 0, barrier, parity};
  if (wait.over()) return;
  waits[number()] = wait;
  leave();
}

void later(Deed deed) { in_flight.push_back(std::move(deed)); }

bool happens_now() { return random_order() % 2 == 0; }

void meet(Meeting& meeting, int count) {
  const int round = meeting.round;
  if (++meeting.arrived < count) return wait_for(meeting, round);
  meeting.arrived = 0;
  ++meeting.round;
}

void barrier(int id, int count) { meet(barriers[current->rank][id], count); }

void cluster_arrive() {
  running().cluster_round = whole_cluster.round;
  if (++whole_cluster.arrived == cluster * threads) whole_cluster.arrived = 0, ++whole_cluster.round;
}

void cluster_wait() {
  if (whole_cluster.round == running().cluster_round) wait_for(whole_cluster, running().cluster_round);
}

void together(void* argument, void (*f)(void**)) {
  Meeting& meeting = warps[number() / 32];
  const int round = meeting.round;
  meeting.arguments[current->index % 32] = argument;
  if (++meeting.arrived < 32) return wait_for(meeting, round);
  f(meeting.arguments);
  meeting.arrived = 0;
  ++meeting.round;
}

// Hash of the return addresses on the stack, by the chain of frames: x86-64 and AArch64 with -fno-omit-frame-pointer.
size_t way_here() {
  const char* const stack = stacks.get() + STACK * number();
  size_t hash = 0;
  for (auto frame = static_cast<void**>(__builtin_frame_address(0)); reinterpret_cast<char*>(frame) >= stack && reinterpret_cast<char*>(frame) < stack + STACK;
       frame = static_cast<void**>(frame[0]))
    hash = hash * 31 + reinterpret_cast<size_t>(frame[1]);
  return hash;
}

void meet_in_warpgroup() {
  if (current->index % 32 != 0) return;
  std::vector<size_t>& warpgroup = ways[number() / 128];
  const size_t turn = met[number() / 32]++, way = way_here();
  if (turn == warpgroup.size()) warpgroup.push_back(way);
  went_another_way |= warpgroup[turn] != way;
}

bool is_last_of_warp() { return ++warps[number() / 32].passed % 32 == 0; }

}  // namespace cta
