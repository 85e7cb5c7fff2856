// Arithmetic modulo a prime below 2^31 and in an extension of its field, for sums of two servers.
// Time depends on sizes and the prime alone: no branch, division or table looks at a value.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace cpsgd {
namespace CPSGD_LEVEL {

// x mod p by Barrett's method: floor(2^64 / p) gives a quotient that is at most one too small.
struct Modulus {
  std::uint64_t p;
  std::uint64_t inverse;
  std::size_t terms;  // products of two elements that can be added to an element without overflow

  explicit Modulus(std::uint32_t prime) : p(prime), inverse(~std::uint64_t{0} / prime), terms(0) {
    const std::uint64_t largest = (p - 1) * (p - 1);
    terms = static_cast<std::size_t>(std::min<std::uint64_t>(
        (~std::uint64_t{0} - p) / std::max<std::uint64_t>(largest, 1), std::uint64_t{1} << 40));
  }

  std::uint32_t reduce(std::uint64_t x) const {
    const std::uint64_t quotient =
        static_cast<std::uint64_t>((static_cast<unsigned __int128>(x) * inverse) >> 64);
    std::uint64_t rest = x - quotient * p;
    rest -= p & (0 - static_cast<std::uint64_t>(rest >= p));
    rest -= p & (0 - static_cast<std::uint64_t>(rest >= p));
    return static_cast<std::uint32_t>(rest);
  }
};

constexpr std::size_t kModularTile = 32;

// One row times a matrix: a tile of columns stays in registers while rows of b are added up.
static void multiply_row(const std::uint32_t* a, const std::uint32_t* b, const Modulus& modulus,
                         std::size_t inner, std::size_t columns, std::uint32_t* out) {
  for (std::size_t first = 0; first < columns; first += kModularTile) {
    const std::size_t width = std::min(kModularTile, columns - first);
    std::uint64_t sums[kModularTile] = {};
    std::size_t left = modulus.terms;
    for (std::size_t k = 0; k < inner; ++k) {
      const std::uint64_t factor = a[k];
      const std::uint32_t* row = b + k * columns + first;
      if (width == kModularTile) {
        for (std::size_t j = 0; j < kModularTile; ++j) sums[j] += factor * row[j];
      } else {
        for (std::size_t j = 0; j < width; ++j) sums[j] += factor * row[j];
      }
      if (--left == 0) {
        for (std::size_t j = 0; j < width; ++j) sums[j] = modulus.reduce(sums[j]);
        left = modulus.terms;
      }
    }
    for (std::size_t j = 0; j < width; ++j) out[first + j] = modulus.reduce(sums[j]);
  }
}

// out = a b mod p, a of rows × inner, b of inner × columns.
static void modular_product(const std::uint32_t* a, const std::uint32_t* b, std::uint32_t prime,
                            std::uint32_t* out, std::size_t rows, std::size_t inner,
                            std::size_t columns) {
  const Modulus modulus(prime);
  for (std::size_t i = 0; i < rows; ++i) {
    multiply_row(a + i * inner, b, modulus, inner, columns, out + i * columns);
  }
}

// sums += aᵀ b mod p, a of inner × rows, b of inner × columns; sums are reduced before and after.
static void modular_gram(const std::uint32_t* a, const std::uint32_t* b, std::uint32_t prime,
                         std::uint32_t* sums, std::size_t inner, std::size_t rows,
                         std::size_t columns) {
  const Modulus modulus(prime);
  for (std::size_t first = 0; first < columns; first += kModularTile) {
    const std::size_t width = std::min(kModularTile, columns - first);
    for (std::size_t i = 0; i < rows; ++i) {
      std::uint64_t total[kModularTile] = {};
      for (std::size_t j = 0; j < width; ++j) total[j] = sums[i * columns + first + j];
      std::size_t left = modulus.terms;
      for (std::size_t k = 0; k < inner; ++k) {
        const std::uint64_t factor = a[k * rows + i];
        const std::uint32_t* row = b + k * columns + first;
        if (width == kModularTile) {
          for (std::size_t j = 0; j < kModularTile; ++j) total[j] += factor * row[j];
        } else {
          for (std::size_t j = 0; j < width; ++j) total[j] += factor * row[j];
        }
        if (--left == 0) {
          for (std::size_t j = 0; j < width; ++j) total[j] = modulus.reduce(total[j]);
          left = modulus.terms;
        }
      }
      for (std::size_t j = 0; j < width; ++j) {
        sums[i * columns + first + j] = modulus.reduce(total[j]);
      }
    }
  }
}

constexpr std::size_t kLargestDegree = 128;

// One product in F_p[X]/f: `powers` has X^K, ..., X^(2K-2) modulo f as its rows. `out` may be a or
// b.
static void multiply_elements(const std::uint32_t* a, const std::uint32_t* b,
                              const std::uint32_t* powers, const Modulus& modulus,
                              std::uint32_t* out, std::size_t degree) {
  std::uint64_t wide[2 * kLargestDegree];
  for (std::size_t j = 0; j < 2 * degree; ++j) wide[j] = 0;
  std::size_t left = modulus.terms;
  for (std::size_t i = 0; i < degree; ++i) {
    const std::uint64_t factor = a[i];
    for (std::size_t j = 0; j < degree; ++j) wide[i + j] += factor * b[j];
    if (--left == 0) {
      for (std::size_t j = 0; j + 1 < 2 * degree; ++j) wide[j] = modulus.reduce(wide[j]);
      left = modulus.terms;
    }
  }
  for (std::size_t j = 0; j + 1 < 2 * degree; ++j) wide[j] = modulus.reduce(wide[j]);
  left = modulus.terms;
  for (std::size_t i = 0; i + 1 < degree; ++i) {
    const std::uint64_t factor = wide[degree + i];
    for (std::size_t j = 0; j < degree; ++j) wide[j] += factor * powers[i * degree + j];
    if (--left == 0) {
      for (std::size_t j = 0; j < degree; ++j) wide[j] = modulus.reduce(wide[j]);
      left = modulus.terms;
    }
  }
  for (std::size_t j = 0; j < degree; ++j) out[j] = modulus.reduce(wide[j]);
}

// Products of `count` elements with as many others, or with one other.
static void extension_product(const std::uint32_t* a, const std::uint32_t* b,
                              const std::uint32_t* powers, std::uint32_t prime, std::uint32_t* out,
                              std::size_t count, std::size_t degree, bool one) {
  const Modulus modulus(prime);
  const std::size_t step = one ? 0 : degree;
  for (std::size_t n = 0; n < count; ++n, a += degree, b += step, out += degree) {
    multiply_elements(a, b, powers, modulus, out, degree);
  }
}

// t^0, ..., t^(count-1).
static void extension_powers(const std::uint32_t* t, const std::uint32_t* powers,
                             std::uint32_t prime, std::uint32_t* out, std::size_t count,
                             std::size_t degree) {
  const Modulus modulus(prime);
  for (std::size_t j = 0; j < degree; ++j) out[j] = j == 0;
  for (std::size_t n = 1; n < count; ++n, out += degree) {
    multiply_elements(out, t, powers, modulus, out + degree, degree);
  }
}

// The values of a polynomial, the highest coefficient first, at n elements; several at once, for
// each step waits for the one before it.
static void modular_polynomial(const std::uint32_t* x, const std::uint32_t* coefficients,
                               std::size_t size, std::uint32_t prime, std::uint32_t* out,
                               std::size_t n) {
  constexpr std::size_t kAtOnce = 8;
  const Modulus modulus(prime);
  for (std::size_t i = 0; i < n; i += kAtOnce) {
    const std::size_t width = std::min(kAtOnce, n - i);
    std::uint32_t at[kAtOnce] = {};
    std::uint32_t values[kAtOnce];
    for (std::size_t j = 0; j < width; ++j) at[j] = x[i + j];
    for (std::size_t j = 0; j < kAtOnce; ++j) values[j] = coefficients[0];
    for (std::size_t k = 1; k < size; ++k) {
      for (std::size_t j = 0; j < kAtOnce; ++j) {
        values[j] = modulus.reduce(static_cast<std::uint64_t>(values[j]) * at[j] + coefficients[k]);
      }
    }
    for (std::size_t j = 0; j < width; ++j) out[i + j] = values[j];
  }
}

// Adds or subtracts: out = (a ± b) mod p.
static void modular_sum(const std::uint32_t* a, const std::uint32_t* b, bool minus,
                        std::uint32_t prime, std::uint32_t* out, std::size_t n) {
  const std::uint32_t flip = minus ? prime : 0;
  const std::uint32_t sign = minus ? ~std::uint32_t{0} : 0;
  for (std::size_t i = 0; i < n; ++i) {
    // Both are below p < 2^31, so that a + b and a + p - b are below 2^32.
    const std::uint32_t sum = a[i] + flip + ((b[i] ^ sign) - sign);
    out[i] = sum - (prime & (0 - static_cast<std::uint32_t>(sum >= prime)));
  }
}

// Uniform elements by rejection: words from `bound`, the largest multiple of p that fits, are left
// out. What is drawn decides how many remain, and nothing else.
static std::size_t uniform_elements(const std::uint32_t* words, std::uint32_t prime,
                                    std::uint32_t* out, std::size_t n, std::size_t most) {
  const Modulus modulus(prime);
  const std::uint64_t bound = (std::uint64_t{1} << 32) / prime * prime;
  std::size_t found = 0;
  for (std::size_t i = 0; i < n && found < most; ++i) {
    out[found] = modulus.reduce(words[i]);
    found += words[i] < bound;
  }
  return found;
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
