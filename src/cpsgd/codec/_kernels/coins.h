// Biased coins: heads with probability 1/2 + v/2^16, v the grid point nearest to y. A coin shows
// heads where its 16 bits of keystream are below 2^15 + v.
#pragma once

#include "packing.h"
#include "stages.h"

namespace cpsgd {
namespace CPSGD_LEVEL {

constexpr std::int32_t kEven = 1 << 15;

static inline std::int32_t heads_below(float y, float limit) {
  return kEven + static_cast<std::int32_t>(std::rint(clamp(y, limit)));
}

// Heads among `coins.count` coins of up to kTile grid points. Coins come in planes, `stride` apart.
static void count_heads(const float* __restrict y, const std::uint16_t* __restrict planes,
                        std::size_t stride, const Coins& coins, std::uint32_t* __restrict values,
                        std::size_t n) {
  std::int32_t below[kTile];
  for (std::size_t i = 0; i < n; ++i) below[i] = heads_below(y[i], coins.limit);
  for (std::size_t i = 0; i < n; ++i) values[i] = planes[i] < below[i];
  for (std::uint32_t coin = 1; coin < coins.count; ++coin) {
    planes += stride;
    for (std::size_t i = 0; i < n; ++i) values[i] += planes[i] < below[i];
  }
}

// ---------------------------------------------------------------- one coin, packed

#if CPSGD_LANES == 16
constexpr std::size_t kHeadsAtOnce = 16;

static inline void store_heads(const float* y, const std::uint16_t* words, float limit,
                               std::uint8_t* out) {
  const __m512 bound = _mm512_set1_ps(limit);
  const __m512 point = _mm512_min_ps(
      _mm512_max_ps(_mm512_loadu_ps(y), _mm512_sub_ps(_mm512_setzero_ps(), bound)), bound);
  const __m512i below = _mm512_add_epi32(_mm512_cvtps_epi32(point), _mm512_set1_epi32(kEven));
  const __m512i coin = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)words));
  const std::uint16_t heads = _mm512_cmplt_epi32_mask(coin, below);
  std::memcpy(out, &heads, 2);
}
#elif CPSGD_LANES == 8
constexpr std::size_t kHeadsAtOnce = 8;

static inline void store_heads(const float* y, const std::uint16_t* words, float limit,
                               std::uint8_t* out) {
  const __m256 bound = _mm256_set1_ps(limit);
  const __m256 point = _mm256_min_ps(
      _mm256_max_ps(_mm256_loadu_ps(y), _mm256_sub_ps(_mm256_setzero_ps(), bound)), bound);
  const __m256i below = _mm256_add_epi32(_mm256_cvtps_epi32(point), _mm256_set1_epi32(kEven));
  const __m256i coin = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)words));
  const __m256i heads = _mm256_cmpgt_epi32(below, coin);
  *out = static_cast<std::uint8_t>(_mm256_movemask_ps(_mm256_castsi256_ps(heads)));
}
#endif

// One coin per grid point, eight to a byte, the first in the least significant bit.
static void pack_heads(const float* y, const std::uint16_t* words, const Coins& coins,
                       std::uint8_t* out, std::size_t n) {
  std::size_t whole = 0;
#if CPSGD_LANES >= 8
  for (; whole + kHeadsAtOnce <= n; whole += kHeadsAtOnce) {
    store_heads(y + whole, words + whole, coins.limit, out + whole / 8);
  }
#endif
  std::uint32_t values[kTile];
  for (std::size_t i = whole; i < n; i += kTile) {
    const std::size_t count = std::min(kTile, n - i);
    count_heads(y + i, words + i, 0, coins, values, count);
    pack_bytes<1>(values, count, out + i / 8);
  }
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
