// The engines of a CTA: asynchronous copies, TMA and tensor cores, compiled once for all kernels.
#include "engines.h"

#include "ptx/cluster.h"
#include "ptx/cp_async.h"
#include "ptx/grid.h"
#include "ptx/mma.h"
#include "ptx/tma.h"

namespace fp8attn::ptx {

namespace {

enum Codes { E4M3, INT8, UINT8 };

// The numbers of all codes of 8 bits.
const float* values_of_codes(Codes codes) {
  static float values[3][256];
  static const bool filled = [] {
    for (int code = 0; code < 256; ++code) values[E4M3][code] = e4m3_value(code), values[INT8][code] = int8_t(code), values[UINT8][code] = code;
    return true;
  }();
  return values[codes];
}

}  // namespace

// ---- cp.async

void copy_later(void* to, const void* from, int bytes, int count) {
  if (uintptr_t(to) % bytes != 0 || (count > 0 && uintptr_t(from) % bytes != 0) || count < 0 || count > bytes) abort();
  memset(to, 0xFF, bytes);
  cta::running().copies.open.push_back({to, from, bytes, count});
}

void cp_async_commit() { cta::running().copies.commit(); }

void copy_but(int pending) {
  auto& groups = cta::running().copies.committed;
  for (; int(groups.size()) > pending; groups.erase(groups.begin())) {
    for (const cta::Copy& copy : groups.front()) {
      memset(copy.to, 0, copy.bytes);
      memcpy(copy.to, copy.from, copy.count);
    }
  }
}

// ---- TMA

namespace {

// Calls f(global address, offset in shared memory, number of bytes inside the tensor) for every 16-byte chunk of the
// box, row by row.
template <typename F>
void for_chunks(const TensorMapOnCpu& map, uint8_t* box, Place place, F&& f) {
  const int64_t width = map.box[0].size;
  int64_t rows = 1;
  for (uint64_t i = 1; i < map.rank; ++i) rows *= map.box[i].size;
  for (int64_t row = 0; row < rows; ++row) {
    uint8_t* from = map.data;
    bool exists = true;
    int64_t rest = row;
    for (uint64_t i = 1; i < map.rank; ++i) {
      const int64_t at = place.at[i] + rest % map.box[i].size;
      rest /= map.box[i].size;
      exists &= at >= 0 && at < int64_t(map.sizes[i]);
      from += at * int64_t(map.strides[i - 1]);
    }
    for (int64_t column = 0; column < width; column += 16) {
      const int64_t at = place.at[0] + column, address = box - bytes + row * width + column;
      // CU_TENSOR_MAP_SWIZZLE_32B is 1, _128B 3
      const int64_t swizzled = address ^ (address >> 7 & ((1 << map.swizzle) - 1)) << 4;
      f(from + at, swizzled, exists && at >= 0 ? int(std::clamp<int64_t>(map.sizes[0] - at, 0, 16)) : 0);
    }
  }
}

int64_t box_bytes(const TensorMapOnCpu& map) {
  int64_t count = 1;
  for (uint64_t i = 0; i < map.rank; ++i) count *= map.box[i].size;
  return count;
}

TensorMapOnCpu on_cpu(const CUtensorMap& map) {
  TensorMapOnCpu found;
  memcpy(&found, &map, sizeof(found));
  return found;
}

}  // namespace

void load_box(void* to, const CUtensorMap& its_map, uint64_t* barrier, Place place) {
  const TensorMapOnCpu map = on_cpu(its_map);
  uint8_t* box = static_cast<uint8_t*>(to);
  if ((box - bytes) % 128 != 0 || place.at[0] % 16 != 0) abort();
  hide_from_all(box, box_bytes(map));
  cta::later([=] {
    for_chunks(map, box, place, [](const uint8_t* from, int64_t chunk, int count) {
      uint8_t brought[16] = {};
      memcpy(brought, from, count);
      write_by_engine(bytes + chunk, brought, 16);
    });
    mbarrier_complete(barrier, box_bytes(map));
  });
}

void bulk_load(void* to, const void* from, uint32_t count, uint64_t* barrier) {
  if (uintptr_t(to) % 16 != 0 || uintptr_t(from) % 16 != 0 || count % 16 != 0) abort();
  hide_from_all(to, count);
  cta::later([=] {
    write_by_engine(to, from, count);
    mbarrier_complete(barrier, count);
  });
}

void tma_store(const CUtensorMap& its_map, const void* from, int x, int y, int z, int w) {
  uint8_t* box = const_cast<uint8_t*>(static_cast<const uint8_t*>(from));
  if ((box - bytes) % 128 != 0 || x % 16 != 0) abort();
  cta::running().stores.open.push_back([=, map = on_cpu(its_map)] {
    for_chunks(map, box, {x, y, z, w}, [](uint8_t* to, int64_t chunk, int count) { memcpy(to, seen_by_engines + chunk, count); });
  });
}

void bulk_store(void* to, const void* from, uint32_t count) {
  if (uintptr_t(to) % 16 != 0 || uintptr_t(from) % 16 != 0 || count % 16 != 0) abort();
  const int64_t at = static_cast<const uint8_t*>(from) - bytes;
  cta::running().stores.open.push_back([=] { memcpy(to, seen_by_engines + at, count); });
}

void store_but(int pending) {
  auto& groups = cta::running().stores.committed;
  for (; int(groups.size()) > pending; groups.erase(groups.begin())) {
    for (const cta::Deed& store : groups.front()) store();
  }
}

void tma_store_commit() {
  cta::running().stores.commit();
  if (cta::happens_now()) store_but(0);
}

void bulk_copy(uint32_t to, uint32_t from, uint32_t count, uint32_t barrier) {
  if (to % 16 != 0 || from % 16 != 0 || count % 16 != 0 || to / cta::SHARED != barrier / cta::SHARED) abort();
  hide_from_all(bytes + to, count);
  cta::later([=] {
    write_by_engine(bytes + to, seen_by_engines + from, count);
    mbarrier_complete(reinterpret_cast<uint64_t*>(bytes + barrier), count);
  });
}

// ---- mma.sync

namespace {

// Operands have K summands, K / 8 of them in each word of A and B. F(word, i) is the i-th value of a word.
template <int K, typename D, typename F>
void multiply_add(D* d, const uint32_t* a, const uint32_t* b, F) {
  struct Lane {
    D* d;
    const uint32_t *a, *b;
  } mine{d, a, b};
  cta::together(&mine, [](void** all) {
    constexpr int per_word = K / 8;
    float rows[16][K], columns[8][K];
    for (int l = 0; l < 32; ++l) {
      const Lane& lane = *static_cast<Lane*>(all[l]);
      for (int i = 0; i < per_word; ++i) {
        for (int word = 0; word < 4; ++word) rows[l / 4 + 8 * (word % 2)][K / 2 * (word / 2) + l % 4 * per_word + i] = F()(lane.a[word], i);
        for (int word = 0; word < 2; ++word) columns[l / 4][K / 2 * word + l % 4 * per_word + i] = F()(lane.b[word], i);
      }
    }
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 4; ++i) {
        float sum = 0.0f;
        for (int k = 0; k < K; ++k) sum += rows[l / 4 + 8 * (i / 2)][k] * columns[l % 4 * 2 + i % 2][k];
        static_cast<Lane*>(all[l])->d[i] += D(sum);
      }
    }
  });
}

}  // namespace

void mma_f16(float* d, const uint32_t* a, const uint32_t* b) {
  multiply_add<16>(d, a, b, [](uint32_t word, int i) { return half_value(word >> 16 * i); });
}

void mma_bf16(float* d, const uint32_t* a, const uint32_t* b) {
  multiply_add<16>(d, a, b, [](uint32_t word, int i) { return __uint_as_float(word >> 16 * i << 16); });
}

void mma_e4m3(float* d, const uint32_t* a, const uint32_t* b) {
  multiply_add<32>(d, a, b, [](uint32_t word, int i) { return values_of_codes(E4M3)[word >> 8 * i & 255]; });
}

void mma_e4m3(uint32_t* d, const uint32_t* a, const uint32_t* b) {
  float sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = half_value(d[i / 2] >> i % 2 * 16);
  mma_e4m3(sums, a, b);
  for (int i = 0; i < 2; ++i) {
    const __half2 halves = __floats2half2_rn(sums[2 * i], sums[2 * i + 1]);
    memcpy(&d[i], &halves, 4);
  }
}

void mma_s8(int32_t* d, const uint32_t* a, const uint32_t* b) {
  // sums of 32 products are exact
  multiply_add<32>(d, a, b, [](uint32_t word, int i) { return float(int8_t(word >> 8 * i)); });
}

// ---- wgmma

namespace {

constexpr int MOST = 32, WIDEST = 256;  // elements of K, and of N

// Address of the 16 bytes from (row, column) on of an operand.
const uint8_t* operand_at(uint64_t descriptor, int row, int column) {
  const auto field = [&](int from) { return int(descriptor >> from & 0x3FFF) << 4; };
  const int start = field(0), leading = field(16), group = field(32), mode = descriptor >> 62;
  int at = start + row / 8 * group;
  if (mode == 0) {
    at += row % 8 * 16 + column / 16 * leading;
  } else {  // 1: 128 bytes, 3: 32
    const int width = 256 >> mode;
    at += row % 8 * width + column;
    at ^= (at >> 7 & ((16 >> mode) - 1)) << 4;
  }
  if (at >= cta::SHARED) abort();
  return cta::shared_memory(seen_by_engines) + at;
}

// Address of the eight elements of 16 bits from (row, k) on, by rows, of a transposed B: PTX ISA, "Strides" of matrix
// descriptors. Rows of 64 columns have 128 bytes; 64 columns are `leading` bytes apart, and eight rows `group` bytes.
const uint8_t* transposed_at(uint64_t descriptor, int row, int k) {
  const auto field = [&](int from) { return int(descriptor >> from & 0x3FFF) << 4; };
  if (descriptor >> 62 != 1) abort();
  int at = field(0) + row / 64 * field(16) + k / 8 * field(32) + k % 8 * 128 + row % 64 * 2;
  at ^= (at >> 7 & 7) << 4;
  if (at >= cta::SHARED) abort();
  return cta::shared_memory(seen_by_engines) + at;
}

float half_operand_value(const Product& product, uint16_t bits) {
  return product.half == 2 ? half_value(bits) : __uint_as_float(uint32_t(bits) << 16);
}

// Calls f(k, x) for the elements of a row of an operand that is K-major.
template <typename F>
void for_row(const Product& product, const float* values, uint64_t descriptor, int row, F&& f) {
  for (int chunk = 0; chunk < 2; ++chunk) {
    const uint8_t* const from = operand_at(descriptor, row, 16 * chunk);
    if (product.half) {
      uint16_t bits[8];
      memcpy(bits, from, sizeof(bits));
      for (int i = 0; i < 8; ++i) f(8 * chunk + i, half_operand_value(product, bits[i]));
    } else {
      for (int i = 0; i < 16; ++i) f(16 * chunk + i, values[from[i]]);
    }
  }
}

// Computes one product of a warp, which has 16 of the 64 rows. Lane 4g + c has rows g and g + 8 of A, and columns
// 8j + 2c + {0, 1} of D.
void multiply(cta::Started* const (&lanes)[32], int warp) {
  const Product& first = *lanes[0];
  const int K = first.half ? 16 : 32;
  static float a[16][MOST], b[MOST][WIDEST], sums[16][WIDEST];
  const float* const values = values_of_codes(first.is_unsigned ? UINT8 : first.int8 ? INT8 : E4M3);
  for (int l = 0; l < 32; ++l) {
    const cta::Started& mine = *lanes[l];
    if (mine.a_descriptor != first.a_descriptor || mine.b_descriptor != first.b_descriptor) abort();
    for (int i = 0; i < 8 && mine.a != nullptr && mine.half; ++i)
      a[l / 4 + i / 2 % 2 * 8][i / 4 * 8 + l % 4 * 2 + i % 2] = half_operand_value(mine, mine.a[i / 2] >> i % 2 * 16);
    for (int i = 0; i < 16 && mine.a != nullptr && !mine.half; ++i) a[l / 4 + i / 4 % 2 * 8][i / 8 * 16 + l % 4 * 4 + i % 4] = values[mine.a[i / 4] >> i % 4 * 8 & 255];
  }
  if (first.a == nullptr) {
    for (int row = 0; row < 16; ++row) for_row(first, values, first.a_descriptor, 16 * warp + row, [&](int k, float x) { a[row][k] = x; });
  }
  if (first.transposed) {
    for (int k = 0; k < K; ++k) {
      for (int n = 0; n < first.n; n += 8) {
        uint16_t bits[8];
        memcpy(bits, transposed_at(first.b_descriptor, n, k), sizeof(bits));
        for (int i = 0; i < 8; ++i) b[k][n + i] = half_operand_value(first, bits[i]);
      }
    }
  } else {
    for (int n = 0; n < first.n; ++n) for_row(first, values, first.b_descriptor, n, [&](int k, float x) { b[k][n] = x; });
  }
  memset(sums, 0, sizeof(sums));
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < K; ++k)
      for (int n = 0; n < first.n; ++n) sums[row][n] += a[row][k] * b[k][n];
  for (int l = 0; l < 32; ++l) {
    const cta::Started& mine = *lanes[l];
    if (!mine.before.empty()) memcpy(mine.d, mine.before.data(), mine.before.size() * sizeof(uint32_t));
    for (int i = 0; i < mine.n / 2; ++i) {
      const float sum = sums[l / 4 + i / 2 % 2 * 8][i / 4 * 8 + l % 4 * 2 + i % 2];
      if (mine.int8) {
        reinterpret_cast<int32_t&>(mine.d[i]) = (mine.add ? int32_t(mine.d[i]) : 0) + int32_t(sum);
      } else {
        float& d = reinterpret_cast<float&>(mine.d[i]);
        d = mine.add ? d + sum : sum;
        if (d != d) mine.d[i] = 0x7FFFFFFF;  // as tensor cores do
      }
    }
  }
}

using Warp = cta::Running* [32];

// Computes the products of all groups of a warp but the last `pending`.
void multiply_but(const Warp& warp, int pending) {
  while (int(warp[0]->products.committed.size()) > pending) {
    for (size_t i = 0; i < warp[0]->products.committed.front().size(); ++i) {
      cta::Started* lanes[32];
      for (int l = 0; l < 32; ++l) lanes[l] = &warp[l]->products.committed.front().at(i);
      multiply(lanes, warp[0]->index % 128 / 32);
    }
    for (int l = 0; l < 32; ++l) warp[l]->products.committed.erase(warp[l]->products.committed.begin());
  }
}

// By the last lane of a warp that gets here, for all of them. `may_wait`: whether it may also happen later.
void multiply_together(int pending, bool may_wait) {
  struct Lane {
    cta::Running* thread;
    int pending;
    bool may_wait;
  } mine{&cta::running(), pending, may_wait};
  cta::together(&mine, [](void** all) {
    Warp warp;
    for (int l = 0; l < 32; ++l) warp[l] = static_cast<Lane*>(all[l])->thread;
    const Lane& any = *static_cast<Lane*>(all[0]);
    if (!any.may_wait || cta::happens_now()) multiply_but(warp, any.pending);
  });
}

}  // namespace

void start_product(const Product& product) {
  cta::meet_in_warpgroup();
  auto& products = cta::running().products;
  bool written = false;
  products.for_all([&](const Product& other) { written |= other.d == product.d; });
  cta::Started started = {product};
  if (!written) {
    if (product.add) started.before.assign(product.d, product.d + product.n / 2);
    std::fill_n(product.d, product.n / 2, ~0u);
  }
  products.open.push_back(std::move(started));
}

void wgmma_commit() {
  cta::running().products.commit();
  multiply_together(0, true);
}

void wgmma_wait_but(int pending) { multiply_together(pending, false); }

// ---- grids

namespace {

struct KeptBack {
  void* to;
  const void* from;
  size_t bytes;
};

std::vector<KeptBack> kept_back;

}  // namespace

void wait_for_grids_before() {
  for (const KeptBack& x : kept_back) memcpy(x.to, x.from, x.bytes);
  kept_back.clear();
}

// The kernel finds `from` at `to` once it waits.
extern "C" void keep_back(void* to, const void* from, size_t bytes) { kept_back.push_back({to, from, bytes}); }

}  // namespace fp8attn::ptx
