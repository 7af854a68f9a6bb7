// Counts the bytes that products in tiles load into a modelled second-level cache, without doing the arithmetic.
//
// Arguments: rows, inputs, outputs, KiB of the cache. Prints three numbers of bytes for one thread: the bytes that its
// tiles load and store; the bytes that miss the cache if products are computed in blocks, as in the library;
// and the bytes that miss the cache without blocks, one panel of weights after another.
//
// The cache has lines of 64 bytes, 16 lines in a set, and evicts the least recently used line. Results of rows and too
// early prefetches are not counted.
//
// Only the products of layer.cpp are used. The linker drops everything else (--gc-sections).
#include <cstdint>
#include <vector>

namespace {

class Cache {
 public:
  explicit Cache(int64_t num_bytes) : lines_(num_bytes / 64) {}

  void touch(const void* at) {
    ++touched;
    const uint64_t line = reinterpret_cast<uintptr_t>(at) / 64 + 1;
    uint64_t* set = &lines_[line % (lines_.size() / kWays) * kWays];  // most recently used first
    int way = 0;
    while (way < kWays - 1 && set[way] != line) ++way;
    missed += set[way] != line;
    for (; way > 0; --way) set[way] = set[way - 1];
    set[0] = line;
  }

  int64_t touched = 0, missed = 0;

 private:
  static constexpr int kWays = 16;
  std::vector<uint64_t> lines_;
};

Cache* cache;

}  // namespace

#define TILE_TOUCHED(from, num_bytes) cache->touch(from)
#define TILE_COUNTS_ONLY 1
#include "amx.cpp"
#include "experts.cpp"
#include "layer.cpp"

#include <cstdio>
#include <cstdlib>

namespace pensieve {

static Dense used = tiled_bfloat16;
const Dense& dense_of(const char*, Type) { return used; }
void run_on_threads(int, RunWork run_work, void* work) { run_work(work); }

}  // namespace pensieve

int main(int, char** arguments) {
  const int num_rows = atoi(arguments[1]), inputs = atoi(arguments[2]), outputs = atoi(arguments[3]);
  const int64_t num_bytes = atoll(arguments[4]) << 10;
  void* panels = calloc(size_t(inputs) * outputs, 2);
  void* rows = calloc(size_t(num_rows) * inputs, 2);
  std::vector<uint16_t> out(size_t(num_rows) * outputs);
  const Linear linear{panels, nullptr, nullptr, nullptr, int64_t(inputs) * 64, inputs, inputs, outputs, 0};
  const Product product{&linear, rows, inputs, num_rows, out.data(), outputs, 0};
  int64_t missed[2], touched = 0;
  for (bool in_blocks : {true, false}) {
    if (!in_blocks) used.multiply_block = nullptr;
    Cache fresh(num_bytes);
    cache = &fresh;
    pensieve_multiply("", 1, &product, 1);
    missed[in_blocks] = fresh.missed;
    if (in_blocks) touched = fresh.touched;
  }
  printf("%lld %lld %lld\n", (long long)touched * 64, (long long)missed[1] * 64, (long long)missed[0] * 64);
  free(panels);
  free(rows);
}
