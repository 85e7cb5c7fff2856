// Walsh–Hadamard transform, in place, unnormalised. Stages always run from distance 1 upwards,
// whatever the blocking, so every SIMD level (and the NumPy reference) gives the same bits.
#pragma once

#include <algorithm>

#include "simd.h"

namespace cpsgd {
namespace CPSGD_LEVEL {

constexpr int kLaneBits = kLanes == 16 ? 4 : kLanes == 8 ? 3 : 2;
constexpr int kTileBits = kLaneBits + kMaxRowBits;  // a tile is transformed within registers
constexpr int kLeafBits = 12;   // a leaf of 16 KiB stays in the first-level cache
constexpr int kFarRowBits = 3;  // rows a power of two apart share a cache set, which has eight ways

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

static inline void tile_transform(float* data, Floats one) {
  constexpr int kRows = 1 << kMaxRowBits;
  Floats rows[kRows];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    Floats v = load(data + i * kLanes);
    v = lane_butterfly<1>(v);
    v = lane_butterfly<2>(v);
#if CPSGD_LANES >= 8
    v = lane_butterfly<4>(v);
#endif
#if CPSGD_LANES >= 16
    v = lane_butterfly<8>(v);
#endif
    rows[i] = v;
  }
  row_butterflies(rows, one);
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) store(data + i * kLanes, rows[i]);
}

// log2(kRows) stages at once over rows that lie `stride` floats apart.
template <int kRows>
static void row_pass(float* data, std::size_t stride, Floats one) {
  for (std::size_t column = 0; column < stride; column += kLanes) {
    Floats rows[kRows];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) rows[i] = load(data + column + i * stride);
    row_butterflies(rows, one);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) store(data + column + i * stride, rows[i]);
  }
}

static void row_pass(float* data, std::size_t stride, int bits, Floats one) {
  switch (bits) {
    case 1: return row_pass<2>(data, stride, one);
    case 2: return row_pass<4>(data, stride, one);
    case 3: return row_pass<8>(data, stride, one);
#if CPSGD_LANES == 16
    case 4: return row_pass<16>(data, stride, one);
#endif
  }
}

// How many of `stages` one pass takes, at most `most`, so that passes are few and of equal width.
static int pass_bits(int stages, int most) {
  const int passes = (stages + most - 1) / most;
  return (stages + passes - 1) / passes;
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

static void leaf_transform(float* data, int bits, Floats one) {
  if (bits < kTileBits) return small_transform(data, bits);
  for (std::size_t tile = 0; tile < (std::size_t{1} << bits); tile += std::size_t{1} << kTileBits) {
    tile_transform(data + tile, one);
  }
  for (int done = kTileBits; done < bits;) {
    const int step = pass_bits(bits - done, kMaxRowBits);
    const std::size_t stride = std::size_t{1} << done;
    for (std::size_t base = 0; base < (std::size_t{1} << bits); base += stride << step) {
      row_pass(data + base, stride, step, one);
    }
    done += step;
  }
}

// Depth first, so that each part is finished while it is in cache. `fill(data, size)` is called
// once for each leaf, in order, just before it is transformed: it brings the input there (scaled
// and signed).
template <typename Fill>
static void transform(float* data, int bits, const Fill& fill, Floats one) {
  if (bits <= kLeafBits) {
    fill(data, std::size_t{1} << bits);
    return leaf_transform(data, bits, one);
  }
  const int step = pass_bits(bits - kLeafBits, kFarRowBits);
  const std::size_t stride = std::size_t{1} << (bits - step);
  for (int part = 0; part < (1 << step); ++part) {
    transform(data + part * stride, bits - step, fill, one);
  }
  row_pass(data, stride, step, one);
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
