// The stages between a vector and its integers: norms, signs, rounding to the lattice, and
// Binomial noise.
#pragma once

#include <cmath>

#include "hadamard.h"

namespace cpsgd {
namespace CPSGD_LEVEL {

typedef std::uint32_t Words __attribute__((vector_size(4 * CPSGD_LANES)));

// ---------------------------------------------------------------- norms

// A fixed number of partial sums, whatever the level: the order of additions, hence the result,
// is the same on all.
constexpr int kPartialSums = 32;

template <typename T, typename Map>
static double sum_of_squares(const T* x, std::size_t n, const Map& map) {
  double partial[kPartialSums] = {};
  std::size_t i = 0;
  for (; i + kPartialSums <= n; i += kPartialSums) {
    for (int j = 0; j < kPartialSums; ++j) {
      const double value = map(x[i + j]);
      partial[j] += value * value;
    }
  }
  for (int j = 0; i < n; ++i, ++j) {
    const double value = map(x[i]);
    partial[j] += value * value;
  }
  for (int width = kPartialSums / 2; width; width /= 2) {
    for (int j = 0; j < width; ++j) partial[j] += partial[j + width];
  }
  return partial[0];
}

static inline float clamp(float y, float limit) {
  y = y < -limit ? -limit : y;
  return y > limit ? limit : y;
}

template <typename T>
static double norm_squared(const T* x, std::size_t n) {
  return sum_of_squares(x, n, [](T value) { return static_cast<double>(value); });
}

// The squared norm of the grid point that `quantize` will round from.
static double grid_norm_squared(const float* y, std::size_t n, float limit) {
  return sum_of_squares(
      y, n, [limit](float value) { return static_cast<double>(std::rint(clamp(value, limit))); });
}

// ---------------------------------------------------------------- signs and scale

template <typename T>
static inline float scaled(T x, double factor);
template <>
inline float scaled<float>(float x, double factor) {
  return x * static_cast<float>(factor);
}
template <>
inline float scaled<double>(double x, double factor) {
  return static_cast<float>(x * factor);
}

static inline Floats load_scaled(const float* x, double factor) {
  return load(x) * static_cast<float>(factor);
}

static inline Floats load_scaled(const double* x, double factor) {
  Floats v;
  for (int lane = 0; lane < kLanes; ++lane) v[lane] = scaled(x[lane], factor);
  return v;
}

template <typename T>
static void scale(const T* x, double factor, float* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = scaled(x[i], factor);
}

template <std::size_t... kIndex>
static inline Words lane_bits(std::index_sequence<kIndex...>) {
  return Words{(std::uint32_t{1} << kIndex)...};
}

// out = ±(x · factor) · normalise, the signs from `first_bit` (a multiple of 16) of `bits` on.
// `out` may be `x`.
template <typename T>
static void apply_signs(const T* x, double factor, const std::uint8_t* bits, std::size_t first_bit,
                        float normalise, float* out, std::size_t n) {
  const std::uint8_t* bytes = bits + first_bit / 8;
  const Words lanes = lane_bits(std::make_index_sequence<kLanes>{});
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    std::uint32_t word = bytes[i / 8] | (std::uint32_t{bytes[i / 8 + 1]} << 8);
    for (int part = 0; part < 16; part += kLanes, word >>= kLanes) {
      const Floats product = load_scaled(x + i + part, factor) * normalise;
      const Words sign = reinterpret_cast<Words>((word & lanes) == lanes) & 0x80000000u;
      store(out + i + part, reinterpret_cast<Floats>(reinterpret_cast<Words>(product) ^ sign));
    }
  }
  for (; i < n; ++i) {
    out[i] = scaled(x[i], factor) * ((bytes[i / 8] >> (i % 8)) & 1 ? -normalise : normalise);
  }
}

// ---------------------------------------------------------------- rotation (see codec/rotate.py)

static int log2_floor(std::size_t n) { return 63 - __builtin_clzll(n); }

// Scale, signs, then the normalised transform: from the first 2^bits entries of x to those of
// `out`, which may be the same.
template <typename T>
static void signed_transform(const T* x, double factor, const std::uint8_t* signs,
                             std::size_t first_sign, float* out, int bits) {
  const float normalise = static_cast<float>(std::exp2(-0.5 * bits));
  const auto fill = [&](float* part, std::size_t count) {
    const std::size_t start = static_cast<std::size_t>(part - out);
    apply_signs(x + start, factor, signs, first_sign + start, normalise, part, count);
  };
  transform(out, bits, fill, opaque_one());
}

// The inverse: the transform, then signs.
static void transform_signed(float* data, const std::uint8_t* signs, std::size_t first_sign,
                             int bits) {
  const float normalise = static_cast<float>(std::exp2(-0.5 * bits));
  transform(data, bits, [](float*, std::size_t) {}, opaque_one());
  apply_signs(data, 1.0, signs, first_sign, normalise, data, std::size_t{1} << bits);
}

// Where the second transform's signs begin.
static std::size_t second_signs(std::size_t size) { return size < 16 ? 16 : size; }

template <typename T>
static void rotate_forward(const T* x, double factor, const std::uint8_t* signs, float* out,
                           std::size_t n) {
  const int bits = log2_floor(n);
  const std::size_t size = std::size_t{1} << bits, rest = n - size;
  signed_transform(x, factor, signs, 0, out, bits);
  if (rest == 0) return;
  scale(x + size, factor, out + size, rest);
  std::swap_ranges(out, out + rest, out + size);
  signed_transform(out, 1.0, signs, second_signs(size), out, bits);
}

static void rotate_backward(float* data, const std::uint8_t* signs, std::size_t n) {
  const int bits = log2_floor(n);
  const std::size_t size = std::size_t{1} << bits, rest = n - size;
  if (rest != 0) {
    transform_signed(data, signs, second_signs(size), bits);
    std::swap_ranges(data, data + rest, data + size);
  }
  transform_signed(data, signs, 0, bits);
}

// ---------------------------------------------------------------- stochastic rounding

// The number of ones. Where no vector instruction counts them it is spelled out, without the
// usual closing multiplication: compilers recognise that, turn it into the scalar instruction and
// stop vectorising.
static inline std::uint32_t count_ones(std::uint32_t x) {
#if defined(__AVX512VPOPCNTDQ__)
  return static_cast<std::uint32_t>(__builtin_popcount(x));
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
  const std::uint32_t offset = lattice.offset, mask = (1u << coins) - 1u;
  const int fraction = lattice.fraction_bits, unused = 16 - fraction;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t word = words[i];
    const std::uint32_t v =
        static_cast<std::uint32_t>(static_cast<std::int32_t>(std::rint(clamp(y[i], limit))));
    values[i] =
        ((offset + v + ((word & 0xFFFFu) >> unused)) >> fraction) + count_ones((word >> 16) & mask);
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

// ---------------------------------------------------------------- decoding

template <typename Sum>
static void centre(const Sum* sums, double centre, double factor, float* out, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    out[i] = static_cast<float>((static_cast<double>(sums[i]) - centre) * factor);
  }
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
