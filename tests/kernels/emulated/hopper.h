// The functions of csrc/include/hopper.h on emulated threads; see cuda.h.
//
// Asynchronous work happens as late as possible. A box is copied when a thread waits for its barrier. A product
// reads its operands and is computed when a thread waits for it. With `early`, boxes are copied at once.
#pragma once
#include <map>

#include <ptx.h>

namespace hopper {

// The tests' replacement for a tensor map: three dimensions, of which the first is contiguous.
struct Map {
  const unsigned char* base;
  int64 size[3];         // elements
  int64 stride_bytes[2]; // of the second and third dimension
  int64 box[3];
};

struct Box {
  uint32 target;
  const Map* map;
  int x, y, z;
};

struct PhaseBarrier {
  int count = 0, pending = 0;
  int64 bytes = 0;
  uint32 phase = 0;
  std::vector<Box> boxes;
};

inline std::map<uint32, PhaseBarrier> phase_barriers;
inline std::map<int, emulated::Barrier> named_barriers;

inline PhaseBarrier& barrier_at(uint32 address) {
  const auto found = phase_barriers.find(address);
  if (found == phase_barriers.end()) emulated::fail("a barrier that was not initialised");
  return found->second;
}

inline void end_phase_if_complete(PhaseBarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.count;
  barrier.phase ^= 1;
  ++emulated::progress;
}

inline void init_barrier(uint32 address, int count) {
  ptx::at(address, 8);
  phase_barriers[address] = {count, count, 0, 0, {}};
}

inline void publish_barriers() {}

inline void arrive_expecting(uint32 address, uint32 bytes) {
  PhaseBarrier& barrier = barrier_at(address);
  if (barrier.pending == 0) emulated::fail("more arrivals than a barrier expects");
  --barrier.pending;
  barrier.bytes += bytes;
  end_phase_if_complete(barrier);
}

inline void arrive(uint32 address) { arrive_expecting(address, 0); }

inline uint32 swizzled(uint32 address) { return address ^ (address >> 7 & 7) << 4; }

inline void copy(const Box& box, PhaseBarrier& barrier) {
  const Map& map = *box.map;
  if (map.box[0] != 64 || box.target % 1024) emulated::fail("a box that the swizzle does not fit");
  for (int64 row = 0; row < map.box[1]; ++row)
    for (int piece = 0; piece < 8; ++piece) {
      const int64 x = box.x + piece * 8, y = box.y + row;
      if (x + 8 > map.size[0] || y >= map.size[1] || box.z >= map.size[2] || x < 0 || y < 0 || box.z < 0)
        emulated::fail("a box outside of its tensor");
      std::memcpy(ptx::at(swizzled(box.target + row * 128 + piece * 16), 16),
                  map.base + x * 2 + y * map.stride_bytes[0] + box.z * map.stride_bytes[1], 16);
    }
  barrier.bytes -= map.box[0] * map.box[1] * 2;
}

inline void wait(uint32 address, uint32 parity) {
  PhaseBarrier& barrier = barrier_at(address);
  while (barrier.phase == parity) {
    if (barrier.boxes.empty()) {
      emulated::pause();
      continue;
    }
    for (const Box& box : barrier.boxes) copy(box, barrier);
    barrier.boxes.clear();
    end_phase_if_complete(barrier);
  }
}

inline void copy_box(uint32 target, const void* map, int x, int y, int z, uint32 barrier) {
  const Box box{target, static_cast<const Map*>(map), x, y, z};
  if (emulated::early) {
    copy(box, barrier_at(barrier));
    end_phase_if_complete(barrier_at(barrier));
  } else {
    barrier_at(barrier).boxes.push_back(box);
  }
  ++emulated::progress;
}

inline void acquire_map(const void*) {}
inline void finish_before_waiting(float, uint32) {}
inline void publish_shared() {}

template <int COUNT>
inline void registers_up_to() {}
template <int COUNT>
inline void registers_down_to() {}

inline void meet(int index, int threads) {
  emulated::Barrier& barrier = named_barriers[index];
  barrier.expected = threads;
  emulated::meet(barrier);
}

// -- products: computed when they are waited for --

inline uint64 descriptor(uint32 address, uint32 leading_bytes, uint32 stride_bytes) {
  if (address % 16 || leading_bytes % 16 || stride_bytes % 16) emulated::fail("a descriptor that is not aligned");
  if (leading_bytes >> 4 > 0x3fff || stride_bytes >> 4 > 0x3fff) emulated::fail("a stride that is too large");
  return 1ull << 62 | uint64(stride_bytes >> 4) << 32 | uint64(leading_bytes >> 4) << 16 | address >> 4;
}

using Products = std::vector<std::function<void()>>;
struct Pending {
  Products open;
  std::vector<Products> closed;
};
inline std::map<unsigned, Pending> pending;  // by thread

inline void begin_products() {}

inline void close_products() {
  Pending& mine = pending[threadIdx.x];
  mine.closed.push_back(std::move(mine.open));
  mine.open.clear();
}

template <int N>
inline void wait_for_products_but() {
  while (pending[threadIdx.x].closed.size() > N) {
    const Products products = std::move(pending[threadIdx.x].closed.front());
    pending[threadIdx.x].closed.erase(pending[threadIdx.x].closed.begin());
    for (const auto& product : products) product();
  }
  ptx::sync_warp();  // all threads of a warp wait together
}

template <class Registers>
inline void pin(Registers&) {}

template <class Element, bool KEYS_DOWN, int COLUMNS>
inline void multiply_now(float (&sums)[COLUMNS][4], const uint32 (&left)[4], uint64 right, bool add) {
  const uint32 words[4] = {left[0], left[1], left[2], left[3]};
  const unsigned lane = threadIdx.x % 32;
  const auto& all = emulated::exchange(ptx::warp(), lane, words);
  const uint32 start = (right & 0x3fff) << 4, leading = (right >> 16 & 0x3fff) << 4,
               stride = (right >> 32 & 0x3fff) << 4;
  if (right >> 62 != 1) emulated::fail("another swizzle than 128 bytes");
  for (int column = 0; column < COLUMNS; ++column)
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4, n = column * 8 + lane % 4 * 2 + i % 2;
      float sum = add ? sums[column][i] : 0.0f;
      for (int k = 0; k < 16; ++k) {
        // Rows have 128 bytes. Groups of eight rows are `stride` apart, and blocks of 64 elements `leading` apart.
        const int line = KEYS_DOWN ? k : n, element = KEYS_DOWN ? n : k;
        const uint32 address =
            swizzled(start + line / 8 * stride + line % 8 * 128 + element / 64 * leading + element % 64 * 2);
        Element value;
        std::memcpy(&value, ptx::at(address, 2), 2);
        sum += ptx::half_of<Element>(all[row * 4 + k % 8 / 2][i / 2 + k / 8 * 2], k % 2) * ptx::widen(value);
      }
      sums[column][i] = sum;
    }
}

template <class Element, bool KEYS_DOWN, int COLUMNS>
inline void multiply(float (&sums)[COLUMNS][4], const uint32 (&left)[4], uint64 right, bool add) {
  for (auto& column : sums)
    for (float& value : column) value = add ? value : NAN;  // must not be read before the wait
  pending[threadIdx.x].open.push_back(
      [&sums, &left, right, add] { multiply_now<Element, KEYS_DOWN>(sums, left, right, add); });
}

}  // namespace hopper
