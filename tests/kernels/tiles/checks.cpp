// Checks of csrc/cpu/amx.cpp. Exits with 0 if all pass, and prints those that fail.
//
// With any argument, it only tells whether the library would use these tiles: the exit code is 0 if so, else 3.
// With EMULATED_TILES the tiles are plain C++. Otherwise they are the processor's, or those of trapped.h.
#include "amx.cpp"

#include <cstdio>
#include <vector>

#if !EMULATED_TILES
#include "trapped.h"
#endif

namespace {

int failed = 0;

void must(bool holds, const char* what) {
  if (!holds) printf("%s\n", what), failed = 1;
}

bool released() {
#if EMULATED_TILES
  const TileShapes shapes = emulated_shapes;
#else
  TileShapes shapes;
  __asm__ volatile("sttilecfg %0" : "=m"(shapes));
#endif
  int left = 0;
  for (int tile = 0; tile < 8; ++tile) left += shapes.rows[tile];
  return left == 0;
}

constexpr int kPages = 11, kHead = 64, kTokens = 16, kGroup = 4, kSliceRows = kTokens * kGroup;
constexpr int kTile = kSlots * kHead;

// A slice of tokens over pages in random order, all of them written.
struct Slice {
  std::vector<uint16_t> arena, query;
  std::vector<int32_t> pages;

  Slice() : arena(kPages * 2 * kTile), query(kSliceRows * kHead), pages(kPages) {
    Drawn drawn;
    for (uint16_t& each : arena) each = drawn();
    for (uint16_t& each : query) each = drawn();
    for (int i = 0; i < kPages; ++i) pages[i] = i * 7 % kPages;
  }

  Part part(int position) const {
    Part part{};
    part.query = query.data();
    part.token_stride = kGroup * kHead;
    part.head_stride = kHead;
    part.keys = arena.data();
    part.values = arena.data() + kTile;
    part.page_stride = 2 * kTile;
    part.pages = pages.data();
    part.end_page = (position + kTokens + kSlots - 1) / kSlots;
    part.position = position;
    part.num_tokens = kTokens;
    part.group = kGroup;
    part.head_size = kHead;
    part.kind.scaling = 0.125f;
    return part;
  }
};

alignas(64) char scratch[pensieve::kScratchBytes];
alignas(64) float weighted[2][kSliceRows * kHead];
float largest_of[2][kSliceRows], sum[2][kSliceRows];
Partial all{largest_of[0], sum[0], weighted[0]}, some{largest_of[1], sum[1], weighted[1]};

// Rows of a slice have the same bits together and alone, also if blocks of pages lie between them.
void a_row_of_attention_does_not_depend_on_other_rows() {
  const Slice slice;
  for (int position : {0, 20, 5 * kSlots - 7, 9 * kSlots - 5, 10 * kSlots}) {
    const Part whole = slice.part(position);
    attend_in_tiles(whole, all, scratch);
    must(released(), "tiles stay configured after attention");
    for (int count : {1, 3, 5})
      for (int token = 0; token + count <= kTokens; token += 3) {
        Part part = whole;
        part.query = slice.query.data() + token * kGroup * kHead;
        part.position = position + token;
        part.num_tokens = count;
        part.end_page = (part.position + count + kSlots - 1) / kSlots;
        attend_in_tiles(part, some, scratch);
        const int row = token * kGroup, num_rows = count * kGroup;
        must(!memcmp(sum[1], sum[0] + row, 4 * num_rows), "a sum of weights differs in company");
        must(!memcmp(largest_of[1], largest_of[0] + row, 4 * num_rows), "a largest score differs in company");
        must(!memcmp(weighted[1], weighted[0] + row * kHead, 4 * num_rows * kHead),
             "a row of attention differs in company");
      }
  }
}

// Rows taken from a batch first read shared pages together, and then their own pages. The results have the same bits
// as those of a single pass.
void a_row_goes_on_where_shared_pages_end() {
  const Slice slice;
  const Part whole = slice.part(10 * kSlots);
  attend_in_tiles(whole, all, scratch);
  std::vector<int32_t> rows(kTokens);
  std::vector<uint16_t> batch(3 * kTokens * kGroup * kHead);
  for (int token = 0; token < kTokens; ++token) {
    rows[token] = 3 * ((token * 5 + 2) % kTokens) + 1;
    memcpy(batch.data() + rows[token] * kGroup * kHead, slice.query.data() + token * kGroup * kHead,
           2 * kGroup * kHead);
  }
  for (int shared : {1, 5, 9}) {
    Part together = whole;
    together.query = batch.data();
    together.rows = rows.data();
    together.end_page = shared;
    together.position = 1 << 30;
    attend_in_tiles(together, some, scratch);
    Part own = whole;
    own.first_page = shared;
    own.continues = true;
    attend_in_tiles(own, some, scratch);
    must(!memcmp(sum[1], sum[0], sizeof sum[0]) &&
             !memcmp(largest_of[1], largest_of[0], sizeof sum[0]) &&
             !memcmp(weighted[1], weighted[0], sizeof weighted[0]),
         "a row differs where it goes on behind shared pages");
  }
}

// A part of the context that begins after some of the rows adds nothing to these rows.
void a_row_gets_nothing_of_pages_behind_it() {
  const Slice slice;
  Part part = slice.part(5 * kSlots - 7);
  part.first_page = 5;
  attend_in_tiles(part, all, scratch);
  attend<uint16_t>(part, some, scratch);
  for (int row = 0; row < kSliceRows; ++row) {
    const bool nothing = row < 7 * kGroup;
    must((largest_of[0][row] == -INFINITY) == nothing && (sum[0][row] == 0.0f) == nothing,
         "a row's largest score or sum where it sees nothing");
    for (int i = row * kHead; i < (row + 1) * kHead; ++i)
      must(std::fabs(weighted[0][i] - weighted[1][i]) <= (nothing ? 0.0f : 0.1f), "what a row gets of a later part");
  }
}

}  // namespace

int main(int num_arguments, char**) {
  if (num_arguments > 1) return pensieve::amx_works() ? 0 : 3;
#if !EMULATED_TILES
  const bool traps = !may_use_tiles();
  if (traps) trapped::begin();
#endif
  must(products_agree<uint16_t>(), "products differ from those without tiles");
  must(products_agree<uint8_t>(), "products of bytes differ from those without tiles");
  must(released(), "tiles stay configured after a product");
  must(attention_agrees(), "attention differs from that without tiles");
  a_row_of_attention_does_not_depend_on_other_rows();
  a_row_gets_nothing_of_pages_behind_it();
  a_row_goes_on_where_shared_pages_end();
#if !EMULATED_TILES
  must(!traps || trapped::count > 10000, "nothing was trapped");
#endif
  return failed;
}
