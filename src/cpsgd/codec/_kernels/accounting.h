// What certificates of privacy take most of their time for. Every number is the result of the same
// operations in the same order at every level, and in NumPy.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace cpsgd {
namespace CPSGD_LEVEL {

// exp(x) within a few roundings, x clipped to ±700: 2^k times a Taylor polynomial.
static inline double exponential(double x) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 2^52: added, the rest is a whole number
  x = x < -700.0 ? -700.0 : x;
  x = x > 700.0 ? 700.0 : x;
  const double moved = x * 1.4426950408889634 + kRound;
  const double k = moved - kRound;
  // log 2 in two parts, the first so short that k times it is exact.
  const double r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  std::int64_t bits;
  std::memcpy(&bits, &moved, sizeof bits);
  bits = static_cast<std::int64_t>((static_cast<std::uint64_t>(bits) + 1023u) << 52);
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// log(x) within a few roundings, x a normal positive number.
static inline double logarithm(double x) {
  constexpr double kWhole = 4503599627370496.0;  // 2^52, the last bits of which are whole numbers
  std::uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  std::uint64_t shifted = (bits >> 52) | 0x4330000000000000u;
  bits = (bits & 0x000FFFFFFFFFFFFFu) | 0x3FF0000000000000u;
  double k, m;
  std::memcpy(&k, &shifted, sizeof k);
  std::memcpy(&m, &bits, sizeof m);
  k = k - (kWhole + 1023.0);
  const bool high = m > 1.4142135623730951;
  k = high ? k + 1.0 : k;
  m = high ? 0.5 * m : m;
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double p = 1.0 / 21.0;
  p = p * z + 1.0 / 19.0;
  p = p * z + 1.0 / 17.0;
  p = p * z + 1.0 / 15.0;
  p = p * z + 1.0 / 13.0;
  p = p * z + 1.0 / 11.0;
  p = p * z + 1.0 / 9.0;
  p = p * z + 1.0 / 7.0;
  p = p * z + 1.0 / 5.0;
  p = p * z + 1.0 / 3.0;
  p = p * z + 1.0;
  return k * 6.93147180369123816490e-01 + (2.0 * s * p + k * 1.90821492927058770002e-10);
}

// The largest of numbers, at least 0; side by side, as compilers do not reorder comparisons.
static inline double largest_of(const double* numbers, std::size_t n) {
  constexpr std::size_t kSide = 8;
  double found[kSide] = {};
  std::size_t j = 0;
  for (; j + kSide <= n; j += kSide) {
    for (std::size_t i = 0; i < kSide; ++i) {
      found[i] = numbers[j + i] > found[i] ? numbers[j + i] : found[i];
    }
  }
  for (; j < n; ++j) found[0] = numbers[j] > found[0] ? numbers[j] : found[0];
  return *std::max_element(found, found + kSide);
}

// Cells of curves: see `cell_masses` of the NumPy twin. Returns the largest |y|.
static double cell_masses(const double* x, const double* e, double w, double bent, double* mass,
                          std::size_t curves, std::size_t points) {
  double largest = 0.0;
  std::vector<double> left(points), right(points), sizes(points);
  for (std::size_t i = 0; i < curves; ++i, x += points, e += points, mass += points) {
    for (std::size_t j = 0; j + 1 < points; ++j) {
      const double width = x[j + 1] - x[j], middle = 0.5 * (x[j + 1] + x[j]);
      const double y = -(middle / w + 0.5) * 0.5 * width, z = y * y;
      sizes[j] = std::fabs(y);
      const double even =
          1.0 +
          z * (1.0 / 6 + z * (1.0 / 120 + z * (1.0 / 5040 + z * (1.0 / 362880 + z / 39916800))));
      const double odd =
          y * (1.0 / 3 +
               z * (1.0 / 30 +
                    z * (1.0 / 840 + z * (1.0 / 45360 + z * (1.0 / 3991680 + z / 518918400)))));
      const double square =
          1.0 / 3 +
          z * (1.0 / 10 + z * (1.0 / 168 + z * (1.0 / 6480 + z * (1.0 / 443520 + z / 47174400))));
      const double fall = e[j] - e[j + 1];
      const double mean = 0.5 * (e[j + 1] + e[j]) + (fall > 0.0 ? fall : 0.0) * width * bent;
      const double half = 0.5 * (e[j + 1] - e[j]);
      const double scale = 0.5 * width * exponential(-middle * (0.5 * middle / w + 0.5));
      const double both = mean * even + half * odd, apart = mean * odd + half * square;
      right[j] = scale * (both + apart);
      left[j] = scale * (both - apart);
    }
    const double most = largest_of(sizes.data(), points - 1);
    if (most > 1.0) {
      for (std::size_t j = 0; j + 1 < points; ++j) {
        const double width = x[j + 1] - x[j], middle = 0.5 * (x[j + 1] + x[j]);
        const double y = -(middle / w + 0.5) * 0.5 * width;
        if (!(y * y > 1.0)) continue;
        const double up = exponential(y), down = 1.0 / up;
        const double sinh = 0.5 * (up - down), cosh = 0.5 * (up + down);
        const double even = sinh / y, odd = (y * cosh - sinh) / (y * y);
        const double square = ((y * y + 2.0) * sinh - 2.0 * y * cosh) / (y * y * y);
        const double fall = e[j] - e[j + 1];
        const double mean = 0.5 * (e[j + 1] + e[j]) + (fall > 0.0 ? fall : 0.0) * width * bent;
        const double half = 0.5 * (e[j + 1] - e[j]);
        const double scale = 0.5 * width * exponential(-middle * (0.5 * middle / w + 0.5));
        const double both = mean * even + half * odd, apart = mean * odd + half * square;
        right[j] = scale * (both + apart);
        left[j] = scale * (both - apart);
      }
    }
    mass[0] = left[0];
    for (std::size_t j = 1; j + 1 < points; ++j) mass[j] = right[j - 1] + left[j];
    mass[points - 1] = right[points - 2];
    largest = most > largest ? most : largest;
  }
  return largest;
}

// Sums over the points of each curve of mass exp(k step x) for k = -half, ..., half, a row per
// curve.
static void tilted_sums(const double* mass, const double* x, double step, double* sums,
                        std::size_t curves, std::size_t points, std::size_t half) {
  // So many curves side by side, and so many sums of each at a time, fit the registers.
  constexpr std::size_t kSide = 8, kSums = 8;
  const std::size_t thresholds = 2 * half + 1;
  std::vector<double> start(points * kSide), factors(points * kSide), terms(points * kSide);
  for (std::size_t first = 0; first < curves; first += kSide) {
    const std::size_t here = std::min(kSide, curves - first);
    for (std::size_t i = 0; i < kSide; ++i) {
      const std::size_t row = (first + std::min(i, here - 1)) * points;
      for (std::size_t j = 0; j < points; ++j) start[j * kSide + i] = mass[row + j];
      for (std::size_t j = 0; j < points; ++j) factors[j * kSide + i] = step * x[row + j];
    }
    for (double& factor : factors) factor = exponential(factor);
    for (const int sign : {1, -1}) {
      if (sign < 0) {
        for (double& factor : factors) factor = 1.0 / factor;
      }
      terms = start;
      for (std::size_t from = 0; from <= half; from += kSums) {
        double found[kSums][kSide] = {};
        for (std::size_t j = 0; j < points; ++j) {
          double* term = terms.data() + j * kSide;
          const double* by = factors.data() + j * kSide;
          double now[kSide];
          for (std::size_t i = 0; i < kSide; ++i) now[i] = term[i];
          for (std::size_t k = 0; k < kSums; ++k) {
            for (std::size_t i = 0; i < kSide; ++i) {
              found[k][i] += now[i];
              now[i] *= by[i];
            }
          }
          for (std::size_t i = 0; i < kSide; ++i) term[i] = now[i];
        }
        for (std::size_t k = 0; k < std::min(kSums, half + 1 - from); ++k) {
          const std::size_t place = sign > 0 ? half + from + k : half - from - k;
          for (std::size_t i = 0; i < here; ++i) {
            sums[(first + i) * thresholds + place] = found[k][i];
          }
        }
      }
    }
  }
}

// Logarithms of averages of exponentials of functions affine in y, and their slopes: see
// `log_averages` of the NumPy twin.
static void log_averages(const double* constant, const double* slope, const double* mean_constant,
                         const double* mean_slope, const double* y, const double* least,
                         const double* enough, double* value, double* bend, std::size_t rows,
                         std::size_t parts, std::size_t cells) {
  constexpr std::size_t kCells = 64;
  const double share = 1.0 / static_cast<double>(parts);
  for (std::size_t i = 0; i < rows; ++i) {
    const double *at = constant + i * (parts + 1), *by = slope + i * (parts + 1);
    const double *mean_at = mean_constant + i * parts, *mean_by = mean_slope + i * parts;
    for (std::size_t from = 0; from < cells; from += kCells) {
      const std::size_t here = std::min(kCells, cells - from);
      const double* place = y + from;
      double top[kCells], mean_top[kCells];
      double total[kCells] = {}, tilt[kCells] = {}, mean_total[kCells] = {}, mean_tilt[kCells] = {};
      for (std::size_t j = 0; j < here; ++j) {
        top[j] = at[0] + by[0] * place[j];
        mean_top[j] = mean_at[0] + mean_by[0] * place[j];
      }
      for (std::size_t p = 1; p <= parts; ++p) {
        for (std::size_t j = 0; j < here; ++j) {
          const double next = at[p] + by[p] * place[j];
          top[j] = next > top[j] ? next : top[j];
        }
      }
      for (std::size_t p = 1; p < parts; ++p) {
        for (std::size_t j = 0; j < here; ++j) {
          const double next = mean_at[p] + mean_by[p] * place[j];
          mean_top[j] = next > mean_top[j] ? next : mean_top[j];
        }
      }
      double first[kCells], last[kCells];
      for (std::size_t j = 0; j < here; ++j)
        last[j] = exponential(at[0] + by[0] * place[j] - top[j]);
      for (std::size_t p = 0; p < parts; ++p) {
        for (std::size_t j = 0; j < here; ++j) {
          const double start = at[p] + by[p] * place[j], end = at[p + 1] + by[p + 1] * place[j];
          const double rise = end - start;
          first[j] = last[j];
          last[j] = exponential(end - top[j]);
          const bool small = std::fabs(rise) < 0.01;
          const double safe = small ? 1.0 : rise;
          const double whole =
              small
                  ? first[j] *
                        (1.0 + rise * (1.0 / 2 + rise * (1.0 / 6 + rise * (1.0 / 24 + rise / 120))))
                  : (last[j] - first[j]) / safe;
          const double moment =
              small ? first[j] *
                          (1.0 / 2 +
                           rise * (1.0 / 3 + rise * (1.0 / 8 + rise * (1.0 / 30 + rise / 144))))
                    : (last[j] - whole) / safe;
          total[j] += whole;
          tilt[j] += whole * by[p] + moment * (by[p + 1] - by[p]);
          const double weight = exponential(mean_at[p] + mean_by[p] * place[j] - mean_top[j]);
          mean_total[j] += weight;
          mean_tilt[j] += weight * mean_by[p];
        }
      }
      for (std::size_t j = 0; j < here; ++j) {
        const bool concave = least[from + j] >= enough[i];
        const double sum = concave ? total[j] : mean_total[j];
        value[i * cells + from + j] = (concave ? top[j] : mean_top[j]) + logarithm(sum * share);
        bend[i * cells + from + j] = (concave ? tilt[j] : mean_tilt[j]) / sum;
      }
    }
  }
}

// log(exp a + exp b), and the share of b in the sum.
static void log_sums(const double* a, const double* b, double* sums, double* shares,
                     std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const double apart = b[i] - a[i], top = apart > 0.0 ? b[i] : a[i];
    const double less = exponential(-std::fabs(apart));
    sums[i] = top + logarithm(1.0 + less);
    shares[i] = (apart > 0.0 ? 1.0 : less) / (1.0 + less);
  }
}

// Raises `found`, one per row, to the largest start - value + bend y + max over c in [c0, c1] of
// rise c - bend c², over what is `wanted`; not a number if any of them is none.
static void raise_to_excess(const double* start, const double* rise, const double* value,
                            const double* bend, const bool* wanted, const double* y,
                            const double* c0, const double* c1, double* found, std::size_t rows,
                            std::size_t cells) {
  std::vector<double> gaps(cells);
  const auto* counted = reinterpret_cast<const unsigned char*>(wanted);
  for (std::size_t i = 0; i < rows * cells; i += cells, ++found) {
    for (std::size_t j = 0; j < cells; ++j) {
      const double curved = bend[i + j] > 1e-300 ? bend[i + j] : 1e-300;
      double c = rise[i + j] / (2.0 * curved);
      c = c < c0[j] ? c0[j] : c;
      c = c > c1[j] ? c1[j] : c;
      const double here =
          (start[i + j] - value[i + j] + bend[i + j] * y[j]) + (rise[i + j] - bend[i + j] * c) * c;
      gaps[j] = counted[i + j] != 0 ? here : -INFINITY;
    }
    double row = *found;
    std::size_t wrong = row != row;
    for (std::size_t j = 0; j < cells; ++j) {
      row = gaps[j] > row ? gaps[j] : row;
      wrong += gaps[j] != gaps[j];
    }
    *found = wrong != 0 ? NAN : row;
  }
}

// Ratios I_{j+1}/I_j of Bessel functions for j = count - 1, ..., 0, and bounds on their errors.
static void bessel_ratios(double variance, std::size_t start, double ratio, double error,
                          double* ratios, double* errors, std::size_t count) {
  for (std::size_t j = start; j != 0; --j) {
    const double below = 1.0 / (2.0 * static_cast<double>(j) / variance + ratio);
    error = 4.0 + 1.000001 * ratio * below * error;
    ratio = below;
    if (j <= count) {
      ratios[j - 1] = ratio;
      errors[j - 1] = 1.01 * error;
    }
  }
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
