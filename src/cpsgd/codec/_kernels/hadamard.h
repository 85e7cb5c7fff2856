// Walsh–Hadamard transform, in place, unnormalised. Stages always run from distance 1 upwards,
// whatever the blocking, so every SIMD level (and the NumPy reference) gives the same bits.
#pragma once

#include <algorithm>

#include "simd.h"

namespace cpsgd {
namespace CPSGD_LEVEL {

constexpr int kLaneBits = kLanes == 16 ? 4 : kLanes == 8 ? 3 : 2;
constexpr int kTileBits = kLaneBits + kMaxRowBits;  // a tile is transformed within registers
constexpr int kLeafBits = 12;  // a leaf of 16 KiB stays in the first-level cache
constexpr std::size_t kLeaf = std::size_t{1} << kLeafBits;
constexpr int kFarRowBits = 3;  // rows a power of two apart share a cache set, which has eight ways

// Leaves of a transform: half as large where the passes beyond them have room for one more stage.
static int leaf_bits(int bits) {
  return bits > kLeafBits && (bits - kLeafBits) % kFarRowBits != 0 ? kLeafBits - 1 : kLeafBits;
}

template <int kRows>
static inline void row_butterflies(Floats (&rows)[kRows], Floats one) {
#pragma GCC unroll 8
  for (int distance = 1; distance < kRows; distance *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      if (i & distance) continue;
      const Floats a = rows[i], b = rows[i + distance];
      rows[i] = a + b;
      rows[i + distance] = subtract(a, b, one);
    }
  }
}

// The stages within registers, one after the other for all of them: each waits for the one before.
template <int kDistance, int kCount>
static inline void lane_butterflies(Floats* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) rows[i] = lane_butterfly<kDistance>(rows[i]);
}

// The stages of one tile. `source(position)` brings a register of the input.
template <typename Source>
static inline void tile_transform(float* data, std::size_t start, const Source& source,
                                  Floats one) {
  constexpr int kRows = 1 << kMaxRowBits, kGroup = kRows / 2;
  Floats rows[kRows];
#pragma GCC unroll 2
  for (int first = 0; first < kRows; first += kGroup) {
#pragma GCC unroll 16
    for (int i = first; i < first + kGroup; ++i) rows[i] = source(start + i * kLanes);
    lane_butterflies<1, kGroup>(rows + first);
    lane_butterflies<2, kGroup>(rows + first);
#if CPSGD_LANES >= 8
    lane_butterflies<4, kGroup>(rows + first);
#endif
#if CPSGD_LANES >= 16
    lane_butterflies<8, kGroup>(rows + first);
#endif
  }
  row_butterflies(rows, one);
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) store(data + start + i * kLanes, rows[i]);
}

// log2(kRows) stages at once over rows that lie `stride` floats apart. `sink(position, register)`
// takes the result away; what it remembers is kept in registers meanwhile.
template <int kRows, typename Sink>
static void row_pass(const float* data, std::size_t start, std::size_t stride, Sink& shared,
                     Floats one) {
  Sink sink = shared;
  for (std::size_t column = start; column < start + stride; column += kLanes) {
    Floats rows[kRows];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) rows[i] = load(data + column + i * stride);
    row_butterflies(rows, one);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) sink(column + i * stride, rows[i]);
  }
  shared = sink;
}

template <typename Sink>
static void row_pass(const float* data, std::size_t start, std::size_t stride, int bits, Sink& sink,
                     Floats one) {
  switch (bits) {
    case 1: return row_pass<2>(data, start, stride, sink, one);
    case 2: return row_pass<4>(data, start, stride, sink, one);
    case 3: return row_pass<8>(data, start, stride, sink, one);
#if CPSGD_LANES == 16
    case 4: return row_pass<16>(data, start, stride, sink, one);
#endif
  }
}

// Takes registers from where they are, and puts them back there.
struct InPlace {
  float* data;
  Floats operator()(std::size_t position) const { return load(data + position); }
  void operator()(std::size_t position, Floats v) const { store(data + position, v); }
};

// How many of `stages` one pass takes, at most `most`, so that passes are few and of equal width.
static int pass_bits(int stages, int most) {
  const int passes = (stages + most - 1) / most;
  return (stages + passes - 1) / passes;
}

template <typename Source>
static void leaf_transform(float* data, std::size_t start, int bits, const Source& source,
                           Floats one) {
  const std::size_t size = std::size_t{1} << bits;
  InPlace sink{data};
  for (std::size_t tile = 0; tile < size; tile += std::size_t{1} << kTileBits) {
    tile_transform(data, start + tile, source, one);
  }
  for (int done = kTileBits; done < bits;) {
    const int step = pass_bits(bits - done, kMaxRowBits);
    const std::size_t stride = std::size_t{1} << done;
    for (std::size_t base = 0; base < size; base += stride << step) {
      row_pass(data, start + base, stride, step, sink, one);
    }
    done += step;
  }
}

// Depth first, so that each part is finished while it is in cache. `prepare(start, size)` is called
// for each leaf, in order, just before its input is taken from the source. The last pass hands its
// results to the sink; there is none where the whole is a leaf.
template <typename Prepare, typename Source, typename Sink>
static void large_transform(float* data, std::size_t start, int bits, int leaf,
                            const Prepare& prepare, const Source& source, Sink& sink, Floats one) {
  if (bits <= leaf) {
    prepare(start, std::size_t{1} << bits);
    return leaf_transform(data, start, bits, source, one);
  }
  const int step = pass_bits(bits - leaf, kFarRowBits);
  const std::size_t stride = std::size_t{1} << (bits - step);
  InPlace inner{data};
  for (std::size_t part = 0; part < (std::size_t{1} << step); ++part) {
    large_transform(data, start + part * stride, bits - step, leaf, prepare, source, inner, one);
  }
  row_pass(data, start, stride, step, sink, one);
}

static void small_transform(float* data, int bits) {
  const std::size_t size = std::size_t{1} << bits;
  for (std::size_t distance = 1; distance < size; distance *= 2) {
    for (std::size_t base = 0; base < size; base += 2 * distance) {
      for (std::size_t i = base; i < base + distance; ++i) {
        const float a = data[i], b = data[i + distance];
        data[i] = a + b;
        data[i + distance] = a - b;
      }
    }
  }
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
