// What certificates of privacy take most of their time for. Every number is the result of the same
// operations in the same order at every level, and in NumPy.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
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

// Lower bounds on logarithms of averages, and their slopes: see `log_averages` of the NumPy twin.
static void log_averages(double w, const double* widths, const double* y0, const double* y1,
                         std::size_t parts, double* value, double* bend, std::size_t rows,
                         std::size_t cells) {
  constexpr std::size_t kCells = 16;
  const double share = 1.0 / static_cast<double>(parts);
  std::vector<double> v(parts + 1), at(parts + 1), by(parts + 1), mean_at(parts), mean_by(parts);
  for (std::size_t i = 0; i < rows; ++i, value += cells, bend += cells) {
    for (std::size_t p = 0; p <= parts; ++p) {
      v[p] = w + widths[i] * static_cast<double>(p) / static_cast<double>(parts);
      at[p] = -0.5 * logarithm(v[p] / w) - (v[p] - w) / 8.0;
      by[p] = 0.5 * (v[p] - w) / (w * v[p]);
    }
    for (std::size_t p = 0; p < parts; ++p) {
      const double middle = 0.5 * (v[p + 1] + v[p]);
      mean_at[p] = -0.5 * logarithm(middle / w) - (middle - w) / 8.0;
      mean_by[p] = 0.5 * (by[p + 1] + by[p]);
    }
    if (parts == 1) {
      for (std::size_t j = 0; j < cells; ++j) {
        value[j] = mean_at[0] + mean_by[0] * (0.5 * (y0[j] + y1[j])) - 1e-12;
        bend[j] = mean_by[0];
      }
      continue;
    }
    const double enough = 0.5 * v[parts];
    for (std::size_t from = 0; from < cells; from += kCells) {
      const std::size_t here = std::min(kCells, cells - from);
      double y[kCells], top[kCells], whole[kCells], tilt[kCells];
      bool concave[kCells];
      std::size_t count = 0;
      for (std::size_t j = 0; j < here; ++j) {
        const double low = y0[from + j], high = y1[from + j];
        y[j] = 0.5 * (low + high);
        concave[j] = (low < high ? low : high) >= enough;
        count += concave[j];
      }
      if (count < here) {
        for (std::size_t j = 0; j < here; ++j) {
          top[j] = mean_at[0] + mean_by[0] * y[j];
          whole[j] = tilt[j] = 0.0;
        }
        for (std::size_t p = 1; p < parts; ++p) {
          for (std::size_t j = 0; j < here; ++j) {
            const double next = mean_at[p] + mean_by[p] * y[j];
            top[j] = next > top[j] ? next : top[j];
          }
        }
        for (std::size_t p = 0; p < parts; ++p) {
          for (std::size_t j = 0; j < here; ++j) {
            const double weight = exponential(mean_at[p] + mean_by[p] * y[j] - top[j]);
            whole[j] += weight;
            tilt[j] += weight * mean_by[p];
          }
        }
      }
      if (count > 0) {
        double highest[kCells], first[kCells], last[kCells], total[kCells] = {}, sum[kCells] = {};
        for (std::size_t j = 0; j < here; ++j) highest[j] = at[0] + by[0] * y[j];
        for (std::size_t p = 1; p <= parts; ++p) {
          for (std::size_t j = 0; j < here; ++j) {
            const double next = at[p] + by[p] * y[j];
            highest[j] = next > highest[j] ? next : highest[j];
          }
        }
        for (std::size_t j = 0; j < here; ++j)
          last[j] = exponential(at[0] + by[0] * y[j] - highest[j]);
        for (std::size_t p = 0; p < parts; ++p) {
          for (std::size_t j = 0; j < here; ++j) {
            const double start = at[p] + by[p] * y[j], end = at[p + 1] + by[p + 1] * y[j];
            const double rise = end - start;
            first[j] = last[j];
            last[j] = exponential(end - highest[j]);
            const bool small = std::fabs(rise) < 0.01;
            const double safe = small ? 1.0 : rise;
            const double part =
                small
                    ? first[j] * (1.0 + rise * (1.0 / 2 +
                                                rise * (1.0 / 6 + rise * (1.0 / 24 + rise / 120))))
                    : (last[j] - first[j]) / safe;
            const double moment =
                small ? first[j] *
                            (1.0 / 2 +
                             rise * (1.0 / 3 + rise * (1.0 / 8 + rise * (1.0 / 30 + rise / 144))))
                      : (last[j] - part) / safe;
            total[j] += part;
            sum[j] += part * by[p] + moment * (by[p + 1] - by[p]);
          }
        }
        for (std::size_t j = 0; j < here; ++j) {
          if (!concave[j]) continue;
          top[j] = highest[j];
          whole[j] = total[j];
          tilt[j] = sum[j];
        }
      }
      for (std::size_t j = 0; j < here; ++j) {
        value[from + j] = top[j] + logarithm(whole[j] * share) - 1e-9;
        bend[from + j] = tilt[j] / whole[j];
      }
    }
  }
}

// The same; not a number where x is no normal positive number.
static inline double safe_logarithm(double x) {
  const bool safe =
      x >= std::numeric_limits<double>::min() && x <= std::numeric_limits<double>::max();
  return safe ? logarithm(x) : NAN;
}

// Chords of log R, and of the largest R/t² between distances: see `chords` of the NumPy twin.
static void chords(const double* t, const double* values, const double* c, double* moments,
                   double* largest, std::size_t rows, std::size_t cells) {
  std::vector<double> logs(cells + 1);
  const auto write = [&](double* starts, double* rises) {
    for (std::size_t j = 0; j < cells; ++j) {
      rises[j] = (logs[j + 1] - logs[j]) / (c[j + 1] - c[j]);
      starts[j] = logs[j] - rises[j] * c[j];
    }
  };
  for (std::size_t i = 0; i < rows; ++i) {
    const double *here = values + i * (cells + 1), *next = here + cells + 1;
    for (std::size_t j = 0; j <= cells; ++j) logs[j] = safe_logarithm(here[j]);
    write(moments + i * cells, moments + (rows + i) * cells);
    if (i + 1 == rows) break;
    const double near = 1.0 / t[i], far = 1.0 / t[i + 1], apart = t[i + 1] - t[i];
    for (std::size_t j = 0; j <= cells; ++j) {
      const double b = (next[j] - here[j]) / apart, a = here[j] - b * t[i];
      double vertex = -0.5 * b / (a < -1e-300 ? a : -1e-300);
      vertex = vertex < far ? far : vertex;
      vertex = vertex > near ? near : vertex;
      const double at_near = (a * near + b) * near, at_far = (a * far + b) * far;
      const double at_vertex = (a * vertex + b) * vertex;
      double most = at_near > at_far ? at_near : at_far;
      most = at_vertex > most ? at_vertex : most;
      logs[j] = safe_logarithm(most * (1.0 + 1e-11));
    }
    write(largest + i * cells, largest + (rows - 1 + i) * cells);
  }
}

// The larger of `known` and the largest start - value + bend y + max over c in [c0, c1] of
// rise c - bend c² over what is `wanted`; not a number if any of them is none.
static double largest_excess(double known, const double* start, const double* rise,
                             const double* value, const double* bend, const double* wanted,
                             const double* y, const double* c0, const double* c1, double* room,
                             std::size_t cells) {
  for (std::size_t j = 0; j < cells; ++j) {
    const double curved = bend[j] > 1e-300 ? bend[j] : 1e-300;
    double c = rise[j] / (2.0 * curved);
    c = c < c0[j] ? c0[j] : c;
    c = c > c1[j] ? c1[j] : c;
    const double here = (start[j] - value[j] + bend[j] * y[j]) + (rise[j] - bend[j] * c) * c;
    room[j] = wanted[j] > 0.0 ? here : -INFINITY;
  }
  // Side by side, as compilers do not reorder comparisons.
  constexpr std::size_t kSide = 8;
  double most[kSide];
  std::size_t wrong = known != known, j = 0;
  for (double& each : most) each = known;
  for (; j + kSide <= cells; j += kSide) {
    for (std::size_t i = 0; i < kSide; ++i) most[i] = room[j + i] > most[i] ? room[j + i] : most[i];
  }
  for (; j < cells; ++j) most[0] = room[j] > most[0] ? room[j] : most[0];
  for (const double each : most) known = each > known ? each : known;
  for (j = 0; j < cells; ++j) wrong += room[j] != room[j];
  return wrong != 0 ? NAN : known;
}

// Upper bounds on log R - log J between distances: see `gaps` of the NumPy twin.
static void gaps(double w, double rate, double narrow, const double* t, const double* average,
                 const double* bend, const double* smallest, const double* largest,
                 const double* moments, const double* c0, const double* c1, double* found,
                 std::size_t rows, std::size_t cells) {
  std::vector<double> numbers(11 * cells);
  double *y = numbers.data(), *squares = y + cells, *room = y + 2 * cells, *value = y + 3 * cells;
  double *other = y + 4 * cells, *slopes = y + 5 * cells;
  double *now = y + 6 * cells, *next = y + 7 * cells;
  double *convex = y + 8 * cells, *flat = y + 9 * cells, *all = y + 10 * cells;
  std::fill_n(all, cells, 1.0);
  for (std::size_t j = 0; j < cells; ++j) {
    const double low = c0[j] * c0[j], high = c1[j] * c1[j];
    y[j] = 0.5 * (low + high);
    squares[j] = low < high ? low : high;
  }
  const double log_rate = logarithm(rate);
  const auto raise = [&](double& bound, const double* chords, std::size_t count, std::size_t row,
                         const double* over, const double* bends, const double* wanted) {
    bound = largest_excess(bound, chords + row * cells, chords + (count + row) * cells, over, bends,
                           wanted, y, c0, c1, room, cells);
  };
  for (std::size_t j = 0; j < cells; ++j) {
    now[j] = average[j] + log_rate;
    value[j] = now[j] > log_rate ? log_rate : now[j];
    slopes[j] = 0.0 * bend[j];
  }
  found[0] = -INFINITY;
  raise(found[0], smallest, 1, 0, value, slopes, all);
  raise(found[0], smallest, 1, 0, now, bend, all);
  const double steep = c1[cells - 1] / w * (c1[cells - 1] / w);
  for (std::size_t i = 0; i + 1 < rows; ++i, bend += cells) {
    double& bound = found[i + 1];
    bound = -INFINITY;
    const double width = rate * t[i] * t[i], wider = rate * t[i + 1] * t[i + 1];
    const double* next_bend = bend + cells;
    for (std::size_t j = 0; j < cells; ++j) next[j] = average[(i + 1) * cells + j] + log_rate;
    if (wider * steep <= narrow) {
      raise(bound, largest, rows - 1, i, now, bend, all);
      raise(bound, largest, rows - 1, i, next, next_bend, all);
    } else {
      const double v = w + width, slope = 0.5 * width / (w * v), log_t = 2.0 * logarithm(t[i]);
      const double density =
          -0.5 * logarithm(v / w) - width / 8.0 + logarithm(2.0 * rate * t[i] * (t[i + 1] - t[i]));
      const double end = w + wider, limit = end * (1.0 + 0.25 * end);
      const bool short_enough = wider <= w / (1.0 + 0.25 * w);
      double count = 0.0;
      for (std::size_t j = 0; j < cells; ++j) {
        convex[j] = short_enough || squares[j] >= limit ? 1.0 : 0.0;
        flat[j] = 1.0 - convex[j];
        count += flat[j];
      }
      for (std::size_t j = 0; j < cells; ++j) {
        value[j] = now[j] + log_t;
        // log(exp a + exp b), and the share of b in the sum.
        const double b = density + slope * y[j], apart = b - value[j];
        const double less = exponential(-std::fabs(apart));
        const double share = (apart > 0.0 ? 1.0 : less) / (1.0 + less);
        other[j] = (apart > 0.0 ? b : value[j]) + logarithm(1.0 + less);
        slopes[j] = bend[j] + share * (slope - bend[j]);
      }
      raise(bound, moments, rows, i, value, bend, convex);
      raise(bound, moments, rows, i + 1, other, slopes, convex);
      if (count > 0.0) {
        raise(bound, largest, rows - 1, i, now, bend, flat);
        raise(bound, largest, rows - 1, i, next, next_bend, flat);
      }
    }
    std::swap(now, next);
  }
  for (std::size_t i = 0; i < rows; ++i) found[i] += 1e-8;
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
