// Draws a token from each row of logits, exactly as pensieve/model/sampling/draw.py defines it, without sorting.
//
// A token's weight is floor(2^weight_bits exp((value - largest) / temperature)), an integer.  Tokens are ordered by
// descending value, then ascending id.  Every cut keeps a prefix of that order.  So each cut, and the drawn token
// itself, answers one question: where does a running sum, of weights or of tokens, first exceed a number?
//
//   top_k    the running count exceeds top_k - 1; `mass` is the running weight up to there
//   top_p    the running weight exceeds ceil(top_p * mass) - 1; the result is the running weight up to there
//   min_p    no search; the result is the sum of all weights of at least weight_min
//   token    the running weight exceeds floor(mass * draw / 2^62), where `mass` is the smallest of the three results
//
// A search is a radix search over the bits of the value (`key_of`: descending): 11, 11 and 10 bits at a time.  Each
// step makes a histogram of the weights of the tokens that agree with the bits found so far.  Then it finds the bin
// where the running sum exceeds the number.  After the last step, the remaining tokens have equal values and weights.
// A division finds the position of the token among them, and counting their ids in order finds its id.  All sums are
// over integers, so the order of threads does not change a result.
//
// One block does one row, so a row's token depends on no other row.  All searches of a row use the same first
// histogram.  A 64-bit sum in shared memory is two words and a carry, because the hardware adds only words.
//
// The additions in shared memory and the double-precision exponentials take most of the time.  A token with a nonzero
// weight needs one of each.  Each search makes three passes over the row, which stays in the cache.
//
// Measured on an H200: 64 rows of 128,256 take 0.16 ms, and 0.22 ms with top_p (0.25 and 0.36 ms with 512 threads).
#include <element.h>
#include <ptx.h>

namespace {

constexpr int THREADS = 1024, WARPS = THREADS / 32;
constexpr int BINS = 2048;  // in each of the first two steps; the last step has half as many
constexpr int DIGITS = 3;
constexpr int UNROLLED = 8;

struct RowOptions {
  double temperature, top_p;
  int64 top_k;        // the size of the vocabulary: no limit
  uint64 weight_min;  // at least 1
  uint64 draw;        // 62 random bits
};

struct Histogram {
  uint32 low[BINS], high[BINS];  // words of the sums of weights
  uint32 counts[BINS];

  __device__ __forceinline__ uint64 weight(int bin) const { return uint64(high[bin]) << 32 | low[bin]; }

  __device__ __forceinline__ void add(int bin, uint64 weight) {
    const uint32 added = uint32(weight);
    uint32 carried = uint32(weight >> 32);
    if (added != 0 && ptx::add(&low[bin], added) + added < added) ++carried;
    if (carried != 0) ptx::add(&high[bin], carried);
  }
};

struct Shared {
  Histogram first, later;
  uint64 weights[WARPS], more_weights[WARPS];  // of each warp's tokens, or bins
  uint32 counts[WARPS];
  float largest[WARPS];
  uint64 weight_before;  // the result of a search: the sums before the found bin, and the bin
  uint32 count_before, bin;
};

// Returns a key that is smaller for a larger value; -0 counts as 0.
__device__ __forceinline__ uint32 key_of(float value) {
  const uint32 bits = ptx::bits_of(value + 0.0f);
  return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

__device__ __forceinline__ float value_of(uint32 key) {
  return ptx::float_of(key & 0x80000000u ? key : ~key & 0x7fffffffu);
}

__device__ __forceinline__ int shift_of(int digit) { return digit == 0 ? 21 : digit == 1 ? 10
                                                                                         : 0; }

struct Row {
  const float* values;
  int vocab;
  double largest, temperature, scale;

  __device__ __forceinline__ uint64 weight(float value) const {
    return uint64(ptx::exp((double(value) - largest) / temperature) * scale);
  }
};

// The run of equal values in which a running sum first exceeds a number.
struct Place {
  uint64 weight_before;
  uint32 count_before, key;
};

// Returns the sum over all threads to each thread.  Overwrites `each_warps`.
__device__ __forceinline__ uint64 sum_of_all(uint64 value, uint64 (&each_warps)[WARPS]) {
  for (int step = 16; step > 0; step /= 2) value += ptx::shuffle_xor(value, step);
  if (threadIdx.x % 32 == 0) each_warps[threadIdx.x / 32] = value;
  ptx::sync_block();
  uint64 sum = 0;
#pragma unroll 1  // unrolled, this would need more registers than 1,024 threads have
  for (int warp = 0; warp < WARPS; ++warp) sum += each_warps[warp];
  return sum;
}

__device__ __forceinline__ void clear(Histogram& histogram) {
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS)
    histogram.low[bin] = histogram.high[bin] = histogram.counts[bin] = 0;
}

// Puts into `shared` the bin where the running sum exceeds `limit`, and the sums before it.
__device__ __forceinline__ void find_bin(Shared& shared, const Histogram& histogram, uint64 limit, bool counted,
                                         uint64 weight_before, uint32 count_before) {
  constexpr int EACH = BINS / THREADS;  // neighbouring bins of a thread
  const int warp = threadIdx.x / 32, first = threadIdx.x * EACH;
  uint64 weight = 0;
  uint32 count = 0;
  for (int i = 0; i < EACH; ++i) weight += histogram.weight(first + i), count += histogram.counts[first + i];
  uint64 weights = weight, counts = count;  // sums over this warp's lanes, up to and including this lane
  for (int step = 1; step < 32; step *= 2) {
    const uint64 other_weights = ptx::shuffle_up(weights, step), other_counts = ptx::shuffle_up(counts, step);
    if (threadIdx.x % 32 >= step) weights += other_weights, counts += other_counts;
  }
  if (threadIdx.x % 32 == 31) shared.weights[warp] = weights, shared.counts[warp] = uint32(counts);
  ptx::sync_block();
  for (int other = 0; other < warp; ++other)
    weight_before += shared.weights[other], count_before += shared.counts[other];
  weight_before += weights - weight;
  count_before += uint32(counts) - count;
  for (int i = 0; i < EACH; ++i) {
    const uint64 added = histogram.weight(first + i);
    const uint64 before = counted ? count_before : weight_before;
    const uint64 after = before + (counted ? histogram.counts[first + i] : added);
    if (before <= limit && limit < after) {  // true for exactly one bin
      shared.weight_before = weight_before;
      shared.count_before = count_before;
      shared.bin = first + i;
    }
    weight_before += added;
    count_before += histogram.counts[first + i];
  }
  ptx::sync_block();
}

// Returns, in every thread, the place where the running sum first exceeds `limit`: the sum of tokens if `counted`,
// otherwise of weights.  `limit` is less than the sum over the whole row.
__device__ __forceinline__ Place search(Shared& shared, const Row& row, uint64 limit, bool counted) {
  find_bin(shared, shared.first, limit, counted, 0, 0);
  Place place{shared.weight_before, shared.count_before, shared.bin << shift_of(0)};
  for (int digit = 1; digit < DIGITS; ++digit) {
    const int shift = shift_of(digit), known = shift_of(digit - 1);
    clear(shared.later);
    ptx::sync_block();
    for (int id = threadIdx.x; id < row.vocab; id += THREADS) {
      const float value = row.values[id];
      const uint32 key = key_of(value);
      if (key >> known != place.key >> known) continue;
      const int bin = key >> shift & ((1u << (known - shift)) - 1);
      shared.later.add(bin, row.weight(value));
      if (counted) ptx::add(&shared.later.counts[bin], 1u);
    }
    ptx::sync_block();
    find_bin(shared, shared.later, limit, counted, place.weight_before, place.count_before);
    place = {shared.weight_before, shared.count_before, place.key | shared.bin << shift};
  }
  return place;
}

// Writes the id of the nth token with this key, by ascending id, counted from 0.
__device__ __forceinline__ void write_nth(Shared& shared, const Row& row, uint32 key, uint32 nth, int64* token_id) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int each = (row.vocab + THREADS * UNROLLED - 1) / (THREADS * UNROLLED) * 32 * UNROLLED;  // ids per warp
  const int begin = warp * each, end = begin + each < row.vocab ? begin + each : row.vocab;
  uint64 count = 0;
  for (int id = begin + lane; id < end; id += 32) count += key_of(row.values[id]) == key;
  for (int step = 16; step > 0; step /= 2) count += ptx::shuffle_xor(count, step);
  if (lane == 0) shared.counts[warp] = uint32(count);
  ptx::sync_block();
  uint32 before = 0;
  for (int other = 0; other < warp; ++other) before += shared.counts[other];
  if (nth < before || nth >= before + uint32(count)) return;  // the token is in another warp's range
  for (int first = begin; first < end; first += 32 * UNROLLED) {
    bool same[UNROLLED];
#pragma unroll
    for (int i = 0; i < UNROLLED; ++i) {
      const int id = first + i * 32 + lane;
      same[i] = id < end && key_of(row.values[id]) == key;
    }
#pragma unroll
    for (int i = 0; i < UNROLLED; ++i) {
      const uint32 all = ptx::ballot(same[i]);
      if (same[i] && before + ptx::count_bits(all & ((1u << lane) - 1)) == nth) *token_id = first + i * 32 + lane;
      before += ptx::count_bits(all);
    }
  }
}

}  // namespace

extern "C" __device__ const int draw_tokens_shared_bytes = sizeof(Shared);

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    draw_tokens(const float* values,        // (rows, vocab), rows row_stride apart, finite or -infinity
                const RowOptions* options,  // (rows)
                int vocab, int weight_bits, int64 row_stride,
                int64* token_ids) {  // (rows)
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
  const RowOptions option = options[blockIdx.x];
  Row row{values + blockIdx.x * row_stride, vocab, 0.0, option.temperature, double(uint64(1) << weight_bits)};

  float largest = ptx::minus_infinity();
  for (int id = threadIdx.x; id < vocab; id += THREADS) largest = fmaxf(largest, row.values[id]);
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, ptx::shuffle_xor(largest, step));
  if (threadIdx.x % 32 == 0) shared.largest[threadIdx.x / 32] = largest;
  clear(shared.first);
  ptx::sync_block();
#pragma unroll 1
  for (int warp = 0; warp < WARPS; ++warp) largest = fmaxf(largest, shared.largest[warp]);
  row.largest = largest;

  const bool counted = option.top_k < vocab;
  uint64 whole = 0, likely = 0;  // the weights of this thread's tokens, and of those that min_p keeps
  for (int id = threadIdx.x; id < vocab; id += THREADS) {
    const float value = row.values[id];
    const uint64 weight = row.weight(value);
    const int bin = key_of(value) >> shift_of(0);
    shared.first.add(bin, weight);
    if (counted) ptx::add(&shared.first.counts[bin], 1u);
    whole += weight;
    if (weight >= option.weight_min) likely += weight;
  }
  uint64 mass = sum_of_all(whole, shared.weights);
  likely = sum_of_all(likely, shared.more_weights);
  ptx::sync_block();  // all threads have read `weights`, and the histogram is complete
  if (counted) {
    const Place last = search(shared, row, option.top_k - 1, true);
    mass = last.weight_before + (option.top_k - last.count_before) * row.weight(value_of(last.key));
  }
  if (option.top_p < 1.0) {
    // `wanted` is from 1 to mass: `double(mass)` may round up, but a top_p below 1 takes away at least that much.
    const uint64 wanted = uint64(ptx::ceil(option.top_p * double(mass)));
    const Place last = search(shared, row, wanted - 1, false);
    const uint64 weight = row.weight(value_of(last.key));
    const uint64 kept = last.weight_before + ((wanted - 1 - last.weight_before) / weight + 1) * weight;
    mass = kept < mass ? kept : mass;
  }
  mass = likely < mass ? likely : mass;
  const uint64 target = ptx::multiply_high(mass, option.draw) << 2 | mass * option.draw >> 62;
  const Place drawn = search(shared, row, target, false);
  const uint64 weight = row.weight(value_of(drawn.key));
  write_nth(shared, row, drawn.key, uint32((target - drawn.weight_before) / weight), token_ids + blockIdx.x);
}
