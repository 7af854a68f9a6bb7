// The types of rows (bfloat16 and float16) and of stored keys and values (also E4m3; see e4m3.h), and integers of known
// width.  No library header is included, so a kernel compiles with this folder alone.
#pragma once

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

struct Bf16 {
  uint16 bits;
};
struct Fp16 {
  uint16 bits;
};
struct E4m3 {
  uint8 bits;
};

template <class First, class Second>
constexpr bool same = false;
template <class Type>
constexpr bool same<Type, Type> = true;
