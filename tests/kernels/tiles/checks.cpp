// Checks of csrc/cpu/amx.cpp: exits with 0 if everything holds, and says what does not.
//
// With EMULATED_TILES on tiles in plain C++, else on the processor's, or on those of trapped.h where it has none.
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

// Rows of a slice, together and each alone: the same to the last bit, also where blocks of pages lie between them.
void a_row_of_attention_is_the_same_in_any_company() {
  constexpr int kPages = 11, kHead = 64, kTokens = 16, kGroup = 4, kRows = kTokens * kGroup;
  constexpr int kTile = kSlots * kHead;
  std::vector<uint16_t> arena(kPages * 2 * kTile), query(kRows * kHead);
  std::vector<int32_t> pages(kPages);
  Drawn drawn;
  for (uint16_t& each : arena) each = drawn();
  for (uint16_t& each : query) each = drawn();
  for (int i = 0; i < kPages; ++i) pages[i] = i * 7 % kPages;
  alignas(64) static char scratch[pensieve::kScratchBytes];
  alignas(64) static float weighted[2][kRows * kHead];
  static float largest[2][kRows], sum[2][kRows];
  for (int position : {0, 20, 5 * kSlots - 7, 9 * kSlots - 5, 10 * kSlots}) {
    Part whole{};
    whole.query = query.data();
    whole.token_stride = kGroup * kHead;
    whole.head_stride = kHead;
    whole.keys = arena.data();
    whole.values = arena.data() + kTile;
    whole.page_stride = 2 * kTile;
    whole.pages = pages.data();
    whole.end_page = (position + kTokens + kSlots - 1) / kSlots;
    whole.position = position;
    whole.num_tokens = kTokens;
    whole.group = kGroup;
    whole.head_size = kHead;
    whole.scaling = 0.125f;
    Partial all{largest[0], sum[0], weighted[0]}, some{largest[1], sum[1], weighted[1]};
    attend_in_tiles(whole, all, scratch);
    must(released(), "tiles stay configured after attention");
    for (int count : {1, 3, 5})
      for (int token = 0; token + count <= kTokens; token += 3) {
        Part part = whole;
        part.query = query.data() + token * kGroup * kHead;
        part.position = position + token;
        part.num_tokens = count;
        part.end_page = (part.position + count + kSlots - 1) / kSlots;
        attend_in_tiles(part, some, scratch);
        const int row = token * kGroup, num_rows = count * kGroup;
        must(!memcmp(sum[1], sum[0] + row, 4 * num_rows), "a sum of weights differs in company");
        must(!memcmp(largest[1], largest[0] + row, 4 * num_rows), "a largest score differs in company");
        must(!memcmp(weighted[1], weighted[0] + row * kHead, 4 * num_rows * kHead),
             "a row of attention differs in company");
      }
  }
}

}  // namespace

int main() {
#if !EMULATED_TILES
  const bool traps = !may_use_tiles();
  if (traps) trapped::begin();
#endif
  must(products_agree<uint16_t>(), "products differ from those without tiles");
  must(products_agree<uint8_t>(), "products of bytes differ from those without tiles");
  must(released(), "tiles stay configured after a product");
  must(attention_agrees(), "attention differs from that without tiles");
  a_row_of_attention_is_the_same_in_any_company();
#if !EMULATED_TILES
  must(!traps || trapped::count > 10000, "nothing was trapped");
#endif
  return failed;
}
