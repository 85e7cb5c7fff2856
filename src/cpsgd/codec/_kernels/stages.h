// The stages between a vector and its integers, beside norms and the rotation: rounding to
// the lattice, and Binomial noise.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "simd.h"

namespace cpsgd {
namespace CPSGD_LEVEL {

// ---------------------------------------------------------------- stochastic rounding

// The number of ones in a word, or in each word of a register. Where no vector instruction counts
// them it is spelled out, without the usual closing multiplication: compilers recognise that, turn
// it into the scalar instruction and stop vectorising.
template <typename W>
static inline W count_ones(W x) {
#if defined(__AVX512VPOPCNTDQ__)
  if constexpr (sizeof(W) == 4) {
    return static_cast<W>(__builtin_popcount(x));
  } else {
    return (W)_mm512_popcnt_epi32((__m512i)x);
  }
#else
  x -= (x >> 1) & 0x55555555u;
  x = (x & 0x33333333u) + ((x >> 2) & 0x33333333u);
  x = (x + (x >> 4)) & 0x0F0F0F0Fu;
  x += x >> 8;
  return (x + (x >> 16)) & 63u;
#endif
}

// values = floor((offset + v + r) / 2^fraction_bits) + ones, where v is the grid point nearest to
// y, r the low half of the keystream word, and `ones` counts the first `coins` (at most 16) bits of
// its high half.
static void quantize(const float* __restrict y, const std::uint32_t* __restrict words,
                     const Lattice& lattice, std::uint32_t coins, std::uint32_t* __restrict values,
                     std::size_t n) {
  const float limit = lattice.limit;
  const std::uint32_t offset = lattice.offset, mask = ((1u << coins) - 1u) << 16;
  const int fraction = lattice.fraction_bits, unused = 16 - fraction;
  std::size_t i = 0;
#if CPSGD_LANES >= 8
  for (; i + kLanes <= n; i += kLanes) {
    Words word;
    std::memcpy(&word, words + i, sizeof word);
    const Words points = nearest_words(clamp(load(y + i), limit)) + offset;
    const Words rounded = (points + ((word & 0xFFFFu) >> unused)) >> fraction;
    const Words sum = rounded + count_ones(word & mask);
    std::memcpy(values + i, &sum, sizeof sum);
  }
#endif
  for (; i < n; ++i) {
    const std::uint32_t word = words[i];
    const std::uint32_t v =
        static_cast<std::uint32_t>(static_cast<std::int32_t>(std::rint(clamp(y[i], limit))));
    values[i] = ((offset + v + ((word & 0xFFFFu) >> unused)) >> fraction) + count_ones(word & mask);
  }
}

// ---------------------------------------------------------------- Binomial(m, 1/2) noise by coins
// (Other laws: inversion.h.)

constexpr std::uint32_t kCoinsInWord = 16;

// The rest of Binomial(m, 1/2), beyond the coins in the rounding words: planes of 32 coins,
// `stride` words apart.
static void add_planes(const std::uint32_t* __restrict planes, std::size_t stride,
                       std::uint32_t coins, std::uint32_t* __restrict values, std::size_t n) {
  for (std::uint32_t left = coins; left != 0; planes += stride) {
    const std::uint32_t here = std::min<std::uint32_t>(left, 32);
    const std::uint32_t mask = here == 32 ? ~0u : (1u << here) - 1u;
    for (std::size_t i = 0; i < n; ++i) values[i] += count_ones(planes[i] & mask);
    left -= here;
  }
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
