// Executes AMX instructions that the processor refuses, so that the compiled code itself is checked.
//
// A processor without AMX raises an invalid opcode. The signal handler decodes the instruction, does on arrays what
// the processor's manual says, and continues after the instruction. So operands, encodings and the compiler's order
// are those of the real library. On a processor with AMX nothing is trapped.
#pragma once

#include <signal.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace trapped {

struct Shapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

inline Shapes shapes;
inline uint8_t tiles[8][16][64];
inline long count = 0;

inline void must(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "%s\n", what);
  abort();
}

inline void configure(const Shapes& wanted) {
  must(wanted.palette == 1 && wanted.start_row == 0, "a configuration that the processor refuses");
  for (int i = 0; i < 16; ++i) {
    must(wanted.rows[i] <= (i < 8 ? 16 : 0) && wanted.row_bytes[i] <= (i < 8 ? 64 : 0), "a shape that is too large");
    must(!wanted.rows[i] == !wanted.row_bytes[i], "a shape without rows or columns");
  }
  for (uint8_t each : wanted.reserved) must(each == 0, "a reserved byte that is not zero");
  shapes = wanted;
  memset(tiles, 0, sizeof tiles);
}

inline float number(uint8_t tile, int row, int at) {  // a bfloat16
  uint16_t half;
  memcpy(&half, &tiles[tile][row][2 * at], 2);
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline void multiply(int sums, int a, int b, bool bytes) {
  must(sums != a && sums != b && a != b, "a product of a tile with itself");
  must(shapes.rows[sums] && shapes.rows[sums] == shapes.rows[a] && shapes.row_bytes[a] == 4 * shapes.rows[b] &&
           shapes.row_bytes[sums] == shapes.row_bytes[b],
       "a product of shapes that do not fit");
  for (int r = 0; r < shapes.rows[sums]; ++r)
    for (int c = 0; c < shapes.row_bytes[sums] / 4; ++c) {
      float more = 0.0f, sum;
      int32_t whole;
      memcpy(&sum, &tiles[sums][r][4 * c], 4);
      memcpy(&whole, &tiles[sums][r][4 * c], 4);
      for (int k = 0; k < shapes.rows[b]; ++k)
        if (bytes)
          for (int i = 0; i < 4; ++i) whole += tiles[a][r][4 * k + i] * int8_t(tiles[b][k][4 * c + i]);
        else
          for (int i = 0; i < 2; ++i) more += number(a, r, 2 * k + i) * number(b, k, 2 * c + i);
      sum += more;
      memcpy(&tiles[sums][r][4 * c], bytes ? static_cast<void*>(&whole) : &sum, 4);
    }
}

// The registers in the order of their numbers in instructions.
constexpr int kRegisters[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

inline void on_invalid_opcode(int, siginfo_t*, void* context) {
  greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const uint8_t* const code = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  must(code[0] == 0xc4 && (code[1] & 0x1f) == 2 && !(code[2] & 0x84), "an instruction that is none of tiles");
  const int prefix = code[2] & 3, opcode = code[3], mode = code[4] >> 6, reg = code[4] >> 3 & 7, rm = code[4] & 7;
  const int third = ~code[2] >> 3 & 15;
  const uint8_t* next = code + 5;
  uint8_t* memory = nullptr;
  int64_t stride = 0;
  if (mode != 3) {
    auto value = [&](int number, int high) { return int64_t(registers[kRegisters[number + 8 * high]]); };
    const int b = !(code[1] & 0x20), x = !(code[1] & 0x40);
    int base = rm;
    int64_t address = 0;
    if (rm == 4) {
      base = *next & 7;
      const int index = *next >> 3 & 7;
      if (index != 4 || x) stride = value(index, x) << (*next >> 6);
      ++next;
    }
    must(!(mode == 0 && base == 5), "an address without a base");
    address = value(base, b);
    if (mode == 1) address += int8_t(*next), next += 1;
    int32_t far;
    memcpy(&far, next, 4);
    if (mode == 2) address += far, next += 4;
    memory = reinterpret_cast<uint8_t*>(address);
  }
  enum { kNone, k66, kF3, kF2 };
  if (opcode == 0x49 && prefix == kNone && mode == 3) {
    memset(&shapes, 0, sizeof shapes);
  } else if (opcode == 0x49 && prefix == kNone) {
    Shapes wanted;
    memcpy(&wanted, memory + stride, sizeof wanted);
    configure(wanted);
  } else if (opcode == 0x49 && prefix == k66 && mode != 3) {
    memcpy(memory + stride, &shapes, sizeof shapes);
  } else if (opcode == 0x49 && prefix == kF2 && mode == 3) {
    must(shapes.rows[reg], "a tile without a shape");
    memset(tiles[reg], 0, sizeof tiles[reg]);
  } else if (opcode == 0x4b && prefix == kF2 && mode != 3) {
    must(shapes.rows[reg], "a tile without a shape");
    memset(tiles[reg], 0, sizeof tiles[reg]);
    for (int r = 0; r < shapes.rows[reg]; ++r) memcpy(tiles[reg][r], memory + r * stride, shapes.row_bytes[reg]);
  } else if (opcode == 0x4b && prefix == kF3 && mode != 3) {
    must(shapes.rows[reg], "a tile without a shape");
    for (int r = 0; r < shapes.rows[reg]; ++r) memcpy(memory + r * stride, tiles[reg][r], shapes.row_bytes[reg]);
  } else if (opcode == 0x5c && prefix == kF3 && mode == 3) {
    multiply(reg, rm, third, false);
  } else if (opcode == 0x5e && prefix == k66 && mode == 3) {
    multiply(reg, rm, third, true);
  } else {
    must(false, "an instruction that is none of tiles");
  }
  ++count;
  registers[REG_RIP] = reinterpret_cast<greg_t>(next);
}

inline void begin() {
  struct sigaction action = {};
  action.sa_sigaction = on_invalid_opcode;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, nullptr);
}

}  // namespace trapped
