// Copy pages of one layer between arenas, or inside an arena.
//
// Arenas are on the device, or in page-locked host memory that is mapped into the device's addresses.
//
//   target[target_pages[i], :, :, :num_slots[i]] <- source[source_pages[i], :, :, :num_slots[i]]
//
// A page is 2 · kv_heads contiguous tiles of 32 · head_size elements.  The first num_slots rows of a tile are
// copied, 16 bytes at a time, bit for bit.  Each block copies whole pages, one after another.  Each thread issues
// four loads before the first store, which hides the latency of the bus.  So a few blocks saturate the bus, and the
// other multiprocessors are free for the computation.
//
// If the driver can copy pages as a batch, the driver is used instead of this kernel (pensieve/model/kv/memory.py).
#include <element.h>

namespace {

constexpr int THREADS = 1024, DEPTH = 4;

struct alignas(16) Piece {
  uint32 words[4];
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_pages(const Piece* source_arena,  // (source pages, tiles, 32, row_pieces)
               const int64* source_pages, const int64* target_pages, const int64* num_slots,
               int num_copies, int tiles, int row_pieces,
               Piece* target_arena) {  // (target pages, tiles, 32, row_pieces)
  const int64 tile_pieces = int64(32) * row_pieces, page_pieces = tiles * tile_pieces;
  for (int copy = blockIdx.x; copy < num_copies; copy += gridDim.x) {
    const Piece* const source = source_arena + source_pages[copy] * page_pieces;
    Piece* const target = target_arena + target_pages[copy] * page_pieces;
    const int run = static_cast<int>(num_slots[copy]) * row_pieces;  // pieces of a tile to be copied
    const int total = run * tiles;
    const auto place = [&](int index) { return index / run * tile_pieces + index % run; };
    for (int first = threadIdx.x; first < total; first += THREADS * DEPTH) {
      Piece held[DEPTH];
#pragma unroll
      for (int i = 0; i < DEPTH; ++i)
        if (first + i * THREADS < total) held[i] = source[place(first + i * THREADS)];
#pragma unroll
      for (int i = 0; i < DEPTH; ++i)
        if (first + i * THREADS < total) target[place(first + i * THREADS)] = held[i];
    }
  }
}
