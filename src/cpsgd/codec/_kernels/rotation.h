// The rotation of codec/rotate.py: signs and transforms, each number read and written as seldom as
// the transform alone would.
#pragma once

#include <cmath>

#include "hadamard.h"
#include "norms.h"

namespace cpsgd {
namespace CPSGD_LEVEL {

// ---------------------------------------------------------------- scale

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

// ---------------------------------------------------------------- signs

static int log2_floor(std::size_t n) { return 63 - __builtin_clzll(n); }

static float normaliser(int bits) { return static_cast<float>(std::exp2(-0.5 * bits)); }

static inline float with_sign(float x, const std::uint8_t* signs, std::size_t position) {
  return (signs[position / 8] >> (position % 8)) & 1 ? -x : x;
}

// Scale, signs, then the normalised transform: from the first 2^bits entries of x to those of
// `out`, which may be the same. `prepare` and `sink`: see large_transform.
template <typename T, typename Prepare, typename Sink>
static void signed_transform(const T* x, double factor, const std::uint8_t* signs, float* out,
                             int bits, const Prepare& prepare, Sink& sink) {
  const float normalise = normaliser(bits);
  if (bits < kTileBits) {
    const std::size_t size = std::size_t{1} << bits;
    prepare(0, size);
    for (std::size_t i = 0; i < size; ++i) {
      out[i] = with_sign(scaled(x[i], factor) * normalise, signs, i);
    }
    return small_transform(out, bits);
  }
  const auto source = [=](std::size_t position) {
    return negate(load_scaled(x + position, factor) * normalise, signs, position);
  };
  large_transform(out, 0, bits, leaf_bits(bits), prepare, source, sink, opaque_one());
}

// Multiplies registers and gives them their signs.
struct Signed {
  float* data;
  const std::uint8_t* signs;
  float normalise;
  void operator()(std::size_t position, Floats v) const {
    store(data + position, negate(v * normalise, signs, position));
  }
};

// The inverse: the transform of what the source brings (fewer than a tile are taken from `data`
// itself), then signs.
template <typename Prepare, typename Source>
static void transform_signed(float* data, const std::uint8_t* signs, int bits,
                             const Prepare& prepare, const Source& source) {
  const std::size_t size = std::size_t{1} << bits;
  const float normalise = normaliser(bits);
  if (bits < kTileBits) {
    prepare(0, size);
    small_transform(data, bits);
    for (std::size_t i = 0; i < size; ++i) data[i] = with_sign(data[i] * normalise, signs, i);
    return;
  }
  Signed sink{data, signs, normalise};
  large_transform(data, 0, bits, leaf_bits(bits), prepare, source, sink, opaque_one());
  if (bits <= kLeafBits) {  // a leaf has no last pass for the sink
    for (std::size_t i = 0; i < size; i += kLanes) sink(i, load(data + i));
  }
}

// ---------------------------------------------------------------- both transforms

// Where the second transform's signs begin, in bytes.
static std::size_t second_signs(std::size_t size) { return (size < 16 ? 16 : size) / 8; }

static void nothing(std::size_t, std::size_t) {}

template <typename T, typename Sink>
static void rotate_forward(const T* x, double factor, const std::uint8_t* signs, float* out,
                           std::size_t n, Sink& sink) {
  const int bits = log2_floor(n);
  const std::size_t size = std::size_t{1} << bits, rest = n - size;
  if (rest == 0) return signed_transform(x, factor, signs, out, bits, nothing, sink);
  InPlace first{out};
  signed_transform(x, factor, signs, out, bits, nothing, first);
  // The exchange of first and last coordinates, while they are in cache.
  const auto exchange = [=](std::size_t start, std::size_t count) {
    const std::size_t end = std::min(start + count, rest);
    for (std::size_t i = start; i < end; ++i) {
      out[size + i] = out[i];
      out[i] = scaled(x[size + i], factor);
    }
  };
  signed_transform(out, 1.0, signs + second_signs(size), out, bits, exchange, sink);
}

template <typename T>
static void rotate_forward(const T* x, double factor, const std::uint8_t* signs, float* out,
                           std::size_t n) {
  InPlace sink{out};
  rotate_forward(x, factor, signs, out, n, sink);
}

#if CPSGD_LANES >= 8
// Puts registers where they belong and adds up the squares of their grid points.
struct GridSquares {
  float* out;
  float limit;
  Doubles sums[2];
  void operator()(std::size_t position, Floats v) {
    store(out + position, v);
    const Floats points = nearest(clamp(v, limit));
    sums[0] = add_square(sums[0], widen_lower(points));
    sums[1] = add_square(sums[1], widen_upper(points));
  }
};
#endif

// The rotation, and what grid_norm_squared says of its result.
template <typename T>
static double rotate_to_grid(const T* x, double factor, const std::uint8_t* signs, float limit,
                             float* out, std::size_t n) {
#if CPSGD_LANES >= 8
  // Sums of integers below 2^53 are exact, whatever their order; sums of larger ones are taken in
  // the order that is the same everywhere.
  constexpr double kExact = 9007199254740992.0;
  if (const std::size_t size = std::size_t{1} << log2_floor(n); size > kLeaf) {
    GridSquares sink{out, limit, {}};
    rotate_forward(x, factor, signs, out, n, sink);
    double squared = grid_norm_squared(out + size, n - size, limit);
    for (const Doubles& sum : sink.sums) {
      for (int lane = 0; lane < kHalf; ++lane) squared += sum[lane];
    }
    return squared < kExact ? squared : grid_norm_squared(out, n, limit);
  }
#endif
  rotate_forward(x, factor, signs, out, n);
  return grid_norm_squared(out, n, limit);
}

// The inverse. `fill(start, count)` writes these numbers to `data`, `source(position)` brings a
// register of them; each number comes by one of the two.
template <typename Fill, typename Source>
static void rotate_backward(float* data, const std::uint8_t* signs, std::size_t n, const Fill& fill,
                            const Source& source) {
  const int bits = log2_floor(n);
  const std::size_t size = std::size_t{1} << bits, rest = n - size;
  if (bits < kTileBits) fill(0, size);
  transform_signed(data, rest == 0 ? signs : signs + second_signs(size), bits, nothing, source);
  if (rest == 0) return;
  fill(size, rest);
  const auto exchange = [=](std::size_t start, std::size_t count) {
    const std::size_t end = std::min(start + count, rest);
    for (std::size_t i = start; i < end; ++i) std::swap(data[i], data[size + i]);
  };
  transform_signed(data, signs, bits, exchange, InPlace{data});
}

static void rotate_backward(float* data, const std::uint8_t* signs, std::size_t n) {
  rotate_backward(data, signs, n, nothing, InPlace{data});
}

// ---------------------------------------------------------------- decoding

template <typename Sum>
static inline float centred(Sum sum, double middle, double factor) {
  return static_cast<float>((static_cast<double>(sum) - middle) * factor);
}

// A register of sums, centred. `kWhole`: see `whole`.
template <bool kWhole, typename Sum>
static inline Floats load_centred(const Sum* sums, double middle, double factor) {
  Floats v;
  for (int lane = 0; lane < kLanes; ++lane) v[lane] = centred(sums[lane], middle, factor);
  return v;
}

constexpr double kShift = 4503599627370496.0;  // 2^52

// Whether a middle can be taken away together with 2^52, without rounding.
static bool whole(double middle) {
  return middle >= 0.0 && middle < kShift && std::floor(middle) == middle;
}

#if CPSGD_LANES >= 8
// The same with no conversion from integers, which shares its unit with that to float32: behind the
// right upper half an integer is the float64 number 2^52 more than itself.
template <bool kWhole>
static inline Floats load_centred(const std::uint32_t* sums, double middle, double factor) {
  constexpr int kUpper = 0x43300000;
  const double shift = kWhole ? kShift + middle : kShift;
#if CPSGD_LANES == 16
  // The second subtraction runs on the multiply units, see `subtract`.
  __m512d one = _mm512_set1_pd(1.0);
  __asm__("" : "+v"(one));
  const auto finish = [=](__m512i shifted) {
    __m512d part = _mm512_sub_pd(_mm512_castsi512_pd(shifted), _mm512_set1_pd(shift));
    if constexpr (!kWhole) part = _mm512_fmsub_pd(part, one, _mm512_set1_pd(middle));
    return _mm512_castpd256_pd512(
        _mm256_castps_pd(_mm512_cvtpd_ps(_mm512_mul_pd(part, _mm512_set1_pd(factor)))));
  };
  const __m512i words = _mm512_loadu_si512(sums), upper = _mm512_set1_epi32(kUpper);
  // Pairs of numbers: even ones, then odd ones.
  const __m512d even = finish(_mm512_unpacklo_epi32(words, upper));
  const __m512d odd = finish(_mm512_unpackhi_epi32(words, upper));
  const __m512i order = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  return (Floats)_mm512_permutex2var_pd(even, order, odd);
#else
  const auto finish = [=](__m256i shifted) {
    __m256d part = _mm256_sub_pd(_mm256_castsi256_pd(shifted), _mm256_set1_pd(shift));
    if constexpr (!kWhole) part = _mm256_sub_pd(part, _mm256_set1_pd(middle));
    return _mm_castps_pd(_mm256_cvtpd_ps(_mm256_mul_pd(part, _mm256_set1_pd(factor))));
  };
  const __m256i words = _mm256_loadu_si256((const __m256i*)sums);
  const __m256i upper = _mm256_set1_epi32(kUpper);
  const __m128d even = finish(_mm256_unpacklo_epi32(words, upper));
  const __m128d odd = finish(_mm256_unpackhi_epi32(words, upper));
  return (Floats)_mm256_set_m128d(_mm_unpackhi_pd(even, odd), _mm_unpacklo_pd(even, odd));
#endif
}
#endif

template <bool kWhole, typename Sum>
static void centre_as(const Sum* sums, double middle, double factor, float* out, std::size_t n) {
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(out + i, load_centred<kWhole>(sums + i, middle, factor));
  }
  for (; i < n; ++i) out[i] = centred(sums[i], middle, factor);
}

template <typename Sum>
static void centre(const Sum* sums, double middle, double factor, float* out, std::size_t n) {
  if (whole(middle)) return centre_as<true>(sums, middle, factor, out, n);
  centre_as<false>(sums, middle, factor, out, n);
}

template <bool kWhole, typename Sum>
static void centre_and_rotate_as(const Sum* sums, double middle, double factor,
                                 const std::uint8_t* signs, float* out, std::size_t n) {
  const auto fill = [=](std::size_t start, std::size_t count) {
    centre_as<kWhole>(sums + start, middle, factor, out + start, count);
  };
  const auto source = [=](std::size_t position) {
    return load_centred<kWhole>(sums + position, middle, factor);
  };
  rotate_backward(out, signs, n, fill, source);
}

template <typename Sum>
static void centre_and_rotate(const Sum* sums, double middle, double factor,
                              const std::uint8_t* signs, float* out, std::size_t n) {
  if (whole(middle)) return centre_and_rotate_as<true>(sums, middle, factor, signs, out, n);
  centre_and_rotate_as<false>(sums, middle, factor, signs, out, n);
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
