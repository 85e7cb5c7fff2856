// Squared norms in float64, in a fixed number of partial sums whatever the level: the order of
// additions, hence the result, is the same on all.
#pragma once

#include <cmath>

#include "simd.h"

namespace cpsgd {
namespace CPSGD_LEVEL {

// Number i of a vector goes to partial sum i mod 32; these are then added up as a tree.
constexpr int kPartialSums = 32;

static double total(double (&partial)[kPartialSums]) {
  for (int width = kPartialSums / 2; width; width /= 2) {
    for (int j = 0; j < width; ++j) partial[j] += partial[j + width];
  }
  return partial[0];
}

// What map(i) yields for i = first, ..., n - 1, where `first` is a multiple of 32.
template <typename Map>
static double sum_of_squares(std::size_t first, std::size_t n, const Map& map,
                             double (&partial)[kPartialSums]) {
  std::size_t i = first;
  for (; i + kPartialSums <= n; i += kPartialSums) {
    for (int j = 0; j < kPartialSums; ++j) {
      const double value = map(i + j);
      partial[j] += value * value;
    }
  }
  for (int j = 0; i < n; ++i, ++j) {
    const double value = map(i);
    partial[j] += value * value;
  }
  return total(partial);
}

#if CPSGD_LANES >= 8
typedef double Doubles __attribute__((vector_size(4 * CPSGD_LANES)));
constexpr int kHalf = kLanes / 2;
constexpr int kSums = kPartialSums / kHalf;

static inline Doubles widen(const float* half) {
#if CPSGD_LANES == 16
  return (Doubles)_mm512_cvtps_pd(_mm256_loadu_ps(half));
#else
  return (Doubles)_mm256_cvtps_pd(_mm_loadu_ps(half));
#endif
}

static inline Doubles widen_upper(Floats v) {
#if CPSGD_LANES == 16
  return (Doubles)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
#else
  return (Doubles)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
#endif
}

static inline Doubles widen_lower(Floats v) {
#if CPSGD_LANES == 16
  return (Doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
#else
  return (Doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v));
#endif
}

// sum + x². The square of a float is exact in float64, so that FMA rounds as a sum does.
static inline Doubles add_square(Doubles sum, Doubles x) {
#if CPSGD_LANES == 16
  return (Doubles)_mm512_fmadd_pd((__m512d)x, (__m512d)x, (__m512d)sum);
#else
  return (Doubles)_mm256_fmadd_pd((__m256d)x, (__m256d)x, (__m256d)sum);
#endif
}
#endif

static double norm_squared(const double* x, std::size_t n) {
  double partial[kPartialSums] = {};
  return sum_of_squares(0, n, [=](std::size_t i) { return x[i]; }, partial);
}

static double norm_squared(const float* x, std::size_t n) {
  double partial[kPartialSums] = {};
  std::size_t i = 0;
#if CPSGD_LANES >= 8
  Doubles sums[kSums] = {};
  for (; i + kPartialSums <= n; i += kPartialSums) {
#pragma GCC unroll 8
    for (int j = 0; j < kSums; ++j) sums[j] = add_square(sums[j], widen(x + i + j * kHalf));
  }
  std::memcpy(partial, sums, sizeof partial);
#endif
  return sum_of_squares(i, n, [=](std::size_t at) { return static_cast<double>(x[at]); }, partial);
}

// The squared norm of the grid point that rounding starts from: the nearest to y, within ±limit.
static double grid_norm_squared(const float* y, std::size_t n, float limit) {
  double partial[kPartialSums] = {};
  std::size_t i = 0;
#if CPSGD_LANES >= 8
  Doubles sums[kSums] = {};
  for (; i + kPartialSums <= n; i += kPartialSums) {
#pragma GCC unroll 8
    for (int j = 0; j < kSums; j += 2) {
      const Floats points = nearest(clamp(load(y + i + j * kHalf), limit));
      sums[j] = add_square(sums[j], widen_lower(points));
      sums[j + 1] = add_square(sums[j + 1], widen_upper(points));
    }
  }
  std::memcpy(partial, sums, sizeof partial);
#endif
  const auto point = [=](std::size_t at) {
    return static_cast<double>(std::rint(clamp(y[at], limit)));
  };
  return sum_of_squares(i, n, point, partial);
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
