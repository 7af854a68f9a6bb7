// The dense parts of a decoder layer, in vectors of LANES floats. Included once per instruction set.
//
// A product of few rows is limited by the memory bandwidth, so it reads its weights once. All rows are multiplied by a
// panel while the panel is in the cache, up to kRows at a time with their sums in registers. The next panel is
// prefetched meanwhile. Measured (Zen 5, two threads): 41 of 45 GB/s with 16 rows, 930 GFLOP/s with 512 rows. oneDNN
// reaches 20 GB/s and 880 GFLOP/s.
#pragma once

#include "choose.h"
#include "layer.h"
#include "vector.h"

namespace {

using pensieve::Norm;
using pensieve::Product;
using pensieve::Rotating;
using pensieve::SumAndNorm;

constexpr int kPanel = 2 * LANES;
constexpr int kRows = kRegisters == 32 ? 12 : 4;  // each row has two sums, in two registers

#if SIGNED_DOT
constexpr int kMiddle = 0;  // the byte of a quantised row that stands for 0
#else
constexpr int kMiddle = pensieve::kZero;
#endif

// -- a product --

// If no instruction multiplies pairs of bfloat16, rows of bfloat16 are passed as floats. Rows of Half are always
// passed as floats.
template <typename Input>
constexpr bool kPairs = !BFLOAT16_DOT && std::is_same_v<Input, uint16_t>;
template <typename Input>
constexpr bool kWidened = kPairs<Input> || is_half<Input>;

// The weights of one step for a vector of outputs. A step multiplies the next four bytes of a row: one float, two
// bfloat16 or four uint8. The weights stay as they are in the panel, but weights of Half become floats. If rows of
// bfloat16 are passed as floats, the specialisation below unpacks each pair of weights to two vectors of floats, and a
// step multiplies two floats of a row.
template <typename Input>
struct Weights {
  Words words;
  Weights(const char* panel, int64_t at) {
    if constexpr (is_half<Input>)
      words = (Words)read(reinterpret_cast<const Half*>(panel) + at);
    else
      words = load<Words>(reinterpret_cast<const uint32_t*>(panel) + at);
  }
  Floats times(const char* row, int64_t step, Floats sum) const {
    uint32_t input;
    memcpy(&input, row + 4 * step, sizeof input);
    if constexpr (std::is_same_v<Input, uint8_t>)  // four inputs times four signed weights; sums are whole numbers
      return (Floats)dot_add_bytes((Ints)sum, Words{} + input, words);
#if BFLOAT16_DOT
    if constexpr (std::is_same_v<Input, uint16_t>) return dot_add(sum, Words{} + input, words);
#endif
    float value;
    memcpy(&value, &input, sizeof value);
    return sum + splat(value) * (Floats)words;
  }
};

#if !BFLOAT16_DOT
template <>
struct Weights<uint16_t> {
  Floats first, second;
  Weights(const char* panel, int64_t at) {
    const Words words = load<Words>(reinterpret_cast<const uint32_t*>(panel) + at);
    first = even_half(words), second = odd_half(words);
  }
  Floats times(const char* row, int64_t step, Floats sum) const {
    float one, other;
    memcpy(&one, row + 8 * step, sizeof one);
    memcpy(&other, row + 8 * step + 4, sizeof other);
    sum += splat(one) * first;
    return sum + splat(other) * second;
  }
};
#endif

template <typename Input, int Rows>
void sums_of(const char* panel, const char* rows, int64_t row_bytes, int64_t steps,
             const char* ahead, int lines, float* sums) {
  Floats sum[Rows][2];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) sum[r][0] = sum[r][1] = Floats{};
  for (int64_t k = 0; k < steps; ++k) {
    const Weights<Input> first(panel, k * kPanel), second(panel, k * kPanel + LANES);
    if (lines > 0) __builtin_prefetch(ahead + k * lines * 64, 0, 3);
    if (lines > 1) __builtin_prefetch(ahead + k * lines * 64 + 64, 0, 3);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      sum[r][0] = first.times(rows + r * row_bytes, k, sum[r][0]);
      sum[r][1] = second.times(rows + r * row_bytes, k, sum[r][1]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    store(sums + r * kPanel, sum[r][0]);
    store(sums + r * kPanel + LANES, sum[r][1]);
  }
}

using SumsOf = void (*)(const char*, const char*, int64_t, int64_t, const char*, int, float*);

template <typename Input, int... I>
inline SumsOf sums_for(int num_rows, std::integer_sequence<int, I...>) {
  constexpr SumsOf table[] = {sums_of<Input, I + 1>...};
  return table[num_rows - 1];
}

inline Floats sigmoid(Floats x) {
  const Floats e = exp2_nonpositive((x < 0.0f ? x : -x) * 1.44269504088896f);
  return (x < 0.0f ? e : splat(1.0f)) / (e + 1.0f);
}

// x times the probability that a normal variable is below x. The probability beyond |x| is exp(-x^2/2) t P(t) / 2,
// where t = 1 / (1 + 0.4 |x| / sqrt(2)). P was fitted, with a relative error < 7e-8.
inline Floats gelu(Floats x) {
  const Floats size = x < 0.0f ? -x : x;
  const Floats t = 1.0f / (1.0f + 0.282842712474619f * size);
  Floats p = splat(4.194180345e-2f);
  p = p * t - 1.435891299e-1f;
  p = p * t + 9.055944281e-2f;
  p = p * t + 8.068357177e-2f;
  p = p * t + 8.460270127e-2f;
  p = p * t + 1.914151355e-1f;
  p = p * t + 2.023696411e-1f;
  p = p * t + 2.263791328e-1f;
  p = p * t + 2.256377676e-1f;
  const Floats beyond = 0.5f * p * t * exp2_nonpositive(x * x * -0.7213475204444817f);
  return x * (x < 0.0f ? beyond : 1.0f - beyond);
}

inline Floats activated(Floats x, int32_t activation) {
  if (activation == pensieve::kSilu) return x * sigmoid(x);
  if (activation == pensieve::kRelu) return x < 0.0f ? splat(0.0f) : x;  // NaN stays
  if (activation == pensieve::kGelu) return gelu(x);
  // 0.5 x (1 + tanh(y)) = x sigmoid(2 y)
  return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

// Converts integer sums to floats. The sums are the products of int8 weights and a quantised row.
inline Floats dequantised(Floats sums, const pensieve::Linear& linear, int column, float row_scale) {
  const Ints whole = kMiddle ? (Ints)sums - load<Ints>(linear.offsets + column) : (Ints)sums;
  return __builtin_convertvector(whole, Floats) * load<Floats>(linear.scales + column) * row_scale;
}

template <typename Element, typename Out>
void finish(const Product& product, int32_t panel, int32_t first, int num_rows, const float* sums) {
  const pensieve::Linear& linear = *product.linear;
  const int width = linear.activation ? LANES : kPanel;
  const int column = panel * width;
  const int count = linear.outputs - column < width ? linear.outputs - column : width;
  for (int r = 0; r < num_rows; ++r) {
    Floats a = load<Floats>(sums + r * kPanel), b = load<Floats>(sums + r * kPanel + LANES);
    if (linear.scales) {
      a = dequantised(a, linear, panel * kPanel, product.row_scales[first + r]);
      b = dequantised(b, linear, panel * kPanel + LANES, product.row_scales[first + r]);
    }
    if (linear.bias) {
      a += load<Floats>(linear.bias + panel * kPanel);
      b += load<Floats>(linear.bias + panel * kPanel + LANES);
    }
    if (linear.pointwise) {
      a = activated(a, linear.pointwise);
      b = activated(b, linear.pointwise);
    }
    Out whole[kPanel];
    Out* to = static_cast<Out*>(product.out) + (first + r) * product.out_stride + column;
    Out* at = count == width ? to : whole;
    if (linear.activation) {
      write(at, activated(a, linear.activation) * b);
    } else {
      write(at, a);
      write(at + LANES, b);
    }
    if (count < width) memcpy(to, whole, count * sizeof(Out));
  }
}

// Input is the type of the rows: Element, or uint8_t for quantised rows.
template <typename Element, typename Input = Element>
void multiply(const Product& product, int32_t panel, int32_t first, int32_t end,
              const char* ahead) {
  const pensieve::Linear& linear = *product.linear;
  const int64_t steps = is_half<Input> ? linear.inputs : int64_t(linear.inputs) * sizeof(Input) / 4;
  const char* weights = static_cast<const char*>(linear.panels) + panel * linear.panel_bytes;
  const int64_t row_bytes = product.row_stride * (kWidened<Input> ? 4 : sizeof(Input));
  const char* rows = static_cast<const char*>(product.rows);
  const int blocks = (end - first + kRows - 1) / kRows;
  alignas(64) float sums[kRows * kPanel];
  constexpr int kLines = LANES == 16 ? kPanel * (is_half<Input> ? 2 : 4) / 64 : 0;  // cache lines in a step
  for (int block = 0; block < blocks; ++block) {
    const int from = first + (end - first) * block / blocks;
    const int to = first + (end - first) * (block + 1) / blocks;
    const char* next = nullptr;
    int lines = 0;
    if (ahead && block < kLines) {  // all lines in one pass, or half of them in each of two passes
      lines = blocks == 1 ? kLines : 1;
      next = ahead + block * steps * 64;
    }
    sums_for<Input>(to - from, std::make_integer_sequence<int, kRows>{})(
        weights, rows + from * row_bytes, row_bytes, steps, next, lines, sums);
    if (product.out_float)
      finish<Element, float>(product, panel, from, to - from, sums);
    else
      finish<Element, Element>(product, panel, from, to - from, sums);
  }
}

// -- row by row --

template <typename Element>
inline float mean_square(const Element* row, int width) {
  Floats squares{};
  int i = 0;
  for (; i + LANES <= width; i += LANES) {
    const Floats x = read(row + i);
    squares += x * x;
  }
  float sum = sum_of(squares);
  for (; i < width; ++i) sum += read_one(row + i) * read_one(row + i);
  return sum / width;
}

// LayerNorm of one part of a row. The variance is computed from the values minus their mean. The sum of these
// differences corrects the mean. So mean and variance are exact even if the mean is much larger than the differences.
template <typename From, typename To>
inline void normalise_centred(const From* from, const Norm& norm, To* to) {
  const int width = norm.width;
  Floats sums{}, rests{}, squares{};
  int i = 0;
  for (; i + LANES <= width; i += LANES) sums += read(from + i);
  float sum = sum_of(sums);
  for (; i < width; ++i) sum += read_one(from + i);
  const float near = sum / width;
  for (i = 0; i + LANES <= width; i += LANES) {
    const Floats x = read(from + i) - near;
    rests += x;
    squares += x * x;
  }
  float rest = sum_of(rests), square = sum_of(squares);
  for (; i < width; ++i) {
    const float x = read_one(from + i) - near;
    rest += x;
    square += x * x;
  }
  rest /= width;
  const float mean = near + rest, variance = square / width - rest * rest;
  const float factor = 1.0f / __builtin_sqrtf((variance > 0.0f ? variance : 0.0f) + norm.eps);
  for (i = 0; i + LANES <= width; i += LANES) {
    Floats x = (read(from + i) - mean) * factor * load<Floats>(norm.weight + i);
    if (norm.bias) x += load<Floats>(norm.bias + i);
    write(to + i, x);
  }
  for (; i < width; ++i)
    write_one(to + i, (read_one(from + i) - mean) * factor * norm.weight[i] + (norm.bias ? norm.bias[i] : 0.0f));
}

template <typename From, typename To>
inline void normalise(const From* from, const Norm& norm, int row_width, To* to) {
  if (norm.centred) {
    for (int at = 0; at < row_width; at += norm.width) normalise_centred(from + at, norm, to + at);
    return;
  }
  for (int at = 0; at < row_width; at += norm.width) {
    const float factor = 1.0f / __builtin_sqrtf(mean_square(from + at, norm.width) + norm.eps);
    int i = 0;
    for (; i + LANES <= norm.width; i += LANES)
      write(to + at + i, read(from + at + i) * factor * load<Floats>(norm.weight + i));
    for (; i < norm.width; ++i)
      write_one(to + at + i, read_one(from + at + i) * factor * norm.weight[i]);
  }
}

template <typename Element, typename Base>
void sum_and_norm_of(const SumAndNorm& task, int32_t row) {
  const int width = task.width;
  const Base* base = static_cast<const Base*>(task.base) + int64_t(row) * width;
  Element* out = task.out ? static_cast<Element*>(task.out) + int64_t(row) * width : nullptr;
  if (!task.added) {
    normalise(base, task.before, width, out);
    return;
  }
  const float* added = task.added + int64_t(row) * width;
  float* sum = task.sum + int64_t(row) * width;
  float factor = task.factor;
  if (task.after.weight) factor /= __builtin_sqrtf(mean_square(added, width) + task.after.eps);
  int i = 0;
  for (; i + LANES <= width; i += LANES) {
    Floats more = load<Floats>(added + i) * factor;
    if (task.after.weight) more *= load<Floats>(task.after.weight + i);
    store(sum + i, read(base + i) + more);
  }
  for (; i < width; ++i)
    sum[i] = read_one(base + i) +
             added[i] * factor * (task.after.weight ? task.after.weight[i] : 1.0f);
  if (!out) return;
  if (task.before.weight) {
    normalise(sum, task.before, width, out);
    return;
  }
  for (i = 0; i + LANES <= width; i += LANES) write(out + i, load<Floats>(sum + i));
  for (; i < width; ++i) write_one(out + i, sum[i]);
}

template <typename Element>
void sum_and_norm(const SumAndNorm& task, int32_t row) {
  if (task.base_float)
    sum_and_norm_of<Element, float>(task, row);
  else
    sum_and_norm_of<Element, Element>(task, row);
}

template <typename Element, typename Rotation>
inline void rotate(Element* head, const Rotation* cosine, const Rotation* sine, int rotary) {
  const int half = rotary / 2;
  int i = 0;
  for (; i + LANES <= half; i += LANES) {
    const Floats a = read(head + i), b = read(head + half + i);
    write(head + i, a * read(cosine + i) - b * read(sine + i));
    write(head + half + i, b * read(cosine + half + i) + a * read(sine + half + i));
  }
  for (; i < half; ++i) {
    const float a = read_one(head + i), b = read_one(head + half + i);
    write_one(head + i, a * read_one(cosine + i) - b * read_one(sine + i));
    write_one(head + half + i, b * read_one(cosine + half + i) + a * read_one(sine + half + i));
  }
}

template <typename Element, typename Rotation>
inline void rotate_heads(const Rotating& rotating, int32_t row, Element* first) {
  const int64_t at = int64_t(row) * rotating.rotary;
  const Rotation* cosine = static_cast<const Rotation*>(rotating.cosines) + at;
  const Rotation* sine = static_cast<const Rotation*>(rotating.sines) + at;
  for (int head = 0; head < rotating.num_heads + rotating.num_kv_heads; ++head)
    rotate(first + head * rotating.head_size, cosine, sine, rotating.rotary);
}

template <typename Element>
void rotate_row(const Rotating& rotating, int32_t row) {
  const int heads = rotating.num_heads, kv_heads = rotating.num_kv_heads, size = rotating.head_size;
  Element* queries = static_cast<Element*>(rotating.rows) + row * rotating.row_stride;
  Element* keys = queries + heads * size;
  if (rotating.query_norm.weight) normalise(queries, rotating.query_norm, heads * size, queries);
  if (rotating.key_norm.weight) normalise(keys, rotating.key_norm, kv_heads * size, keys);
  if (rotating.rotation_float)
    rotate_heads<Element, float>(rotating, row, queries);
  else
    rotate_heads<Element, Element>(rotating, row, queries);
}

template <typename Element>
float quantise(const void* memory, int32_t width, int32_t padded, uint8_t* out) {
  const Element* row = static_cast<const Element*>(memory);
  Floats most{}, nan_lanes{};
  int i = 0;
  for (; i + LANES <= width; i += LANES) {
    const Floats x = read(row + i);
    most = larger(x < 0.0f ? -x : x, most);
    nan_lanes += x - x;  // becomes NaN if a value is not finite
  }
  float largest = max_of(most), nan_sum = sum_of(nan_lanes);
  for (; i < width; ++i) {
    const float x = read_one(row + i), size = x < 0.0f ? -x : x;
    largest = size > largest ? size : largest;
    nan_sum += x - x;
  }
  if (nan_sum != 0.0f) {  // also true for NaN; then the row's products must not be finite
    memset(out, kMiddle, padded);
    return __builtin_nanf("");
  }
  const float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
  const Floats magic = splat(12582912.0f + kMiddle);  // 1.5 * 2^23: adding it rounds
  for (i = 0; i + LANES <= width; i += LANES) {
    const Floats shifted = read(row + i) * factor + magic;
    for (int lane = 0; lane < LANES; ++lane) out[i + lane] = uint8_t(((Words)shifted)[lane]);
  }
  for (; i < width; ++i) {
    const float shifted = read_one(row + i) * factor + magic[0];
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    out[i] = uint8_t(bits);
  }
  memset(out + width, kMiddle, padded - width);
  return largest / 127.0f;
}

template <typename Element>
void widen_row(const void* memory, int32_t width, float* out) {
  const Element* row = static_cast<const Element*>(memory);
  int i = 0;
  for (; i + LANES <= width; i += LANES) store(out + i, read(row + i));
  for (; i < width; ++i) out[i] = read_one(row + i);
}

inline int32_t largest(const float* row, int32_t width) {
  Floats most = splat(-INFINITY), nan_lanes{};
  int i = 0;
  for (; i + LANES <= width; i += LANES) {
    const Floats x = load<Floats>(row + i);
    most = larger(x, most);
    nan_lanes += x - x;  // becomes NaN if a value is not finite
  }
  float best = max_of(most), nan_sum = sum_of(nan_lanes);
  for (; i < width; ++i) {
    best = row[i] > best ? row[i] : best;
    nan_sum += row[i] - row[i];
  }
  if (nan_sum != 0.0f) return -1;  // also true for NaN
  i = 0;
  for (; i + LANES <= width; i += LANES)
    if (max_of(load<Floats>(row + i)) == best) break;
  while (row[i] != best) ++i;
  return i;
}

template <typename Element>
constexpr pensieve::Dense dense_for = {
    LANES, multiply<Element>, multiply<Element, uint8_t>, quantise<Element>,
    sum_and_norm<Element>, rotate_row<Element>, largest, choose<Element>,
    kWidened<Element> ? widen_row<Element> : nullptr};

}  // namespace
