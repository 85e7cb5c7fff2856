// One vector type, three widths. This header is compiled once per SIMD level, each time in its own
// namespace (see level.cpp), so that one binary carries every level and picks at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#define CPSGD_LANES 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define CPSGD_LANES 8
#else
#define CPSGD_LANES 4
#if defined(__SSSE3__)
#include <tmmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#endif

namespace cpsgd {
namespace CPSGD_LEVEL {

constexpr int kLanes = CPSGD_LANES;
// Rows of registers a butterfly pass may hold at once: AVX-512 has 32 registers, the others 16
// (or NEON's 32 narrow ones).
constexpr int kMaxRowBits = kLanes == 16 ? 4 : 3;

typedef float Floats __attribute__((vector_size(4 * CPSGD_LANES)));
typedef std::uint32_t Words __attribute__((vector_size(4 * CPSGD_LANES)));

static inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

static inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

static inline Floats broadcast(float x) { return x - Floats{}; }

// a - b. Where there is FMA it is written as a + (-1)·b, which rounds the same and runs on the
// multiply units, so that sums and differences of a butterfly do not queue for the same two adders.
static inline Floats subtract(Floats a, Floats b, Floats one) {
#if CPSGD_LANES == 16
  return (Floats)_mm512_fnmadd_ps((__m512)b, (__m512)one, (__m512)a);
#elif CPSGD_LANES == 8
  return (Floats)_mm256_fnmadd_ps((__m256)b, (__m256)one, (__m256)a);
#else
  (void)one;
  return a - b;
#endif
}

// ±a + b for signs of ±1: multiplying by one is exact, so that FMA rounds as a sum does.
static inline Floats add_signed(Floats a, Floats signs, Floats b) {
#if CPSGD_LANES == 16
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)signs, (__m512)b);
#elif CPSGD_LANES == 8
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)signs, (__m256)b);
#else
  return a * signs + b;
#endif
}

// The constant 1, hidden from the optimiser: it would fold the multiplication in `subtract` away.
static inline Floats opaque_one() {
  Floats one = broadcast(1.0f);
#if CPSGD_LANES == 16
  __asm__("" : "+v"(one));
#elif CPSGD_LANES == 8
  __asm__("" : "+x"(one));
#endif
  return one;
}

// Clipped to ±limit; what is not a number stays so.
static inline float clamp(float y, float limit) {
  y = y < -limit ? -limit : y;
  return y > limit ? limit : y;
}

#if CPSGD_LANES >= 8
// The same for a register, where the second operand of these instructions is what NaN yields.
static inline Floats clamp(Floats y, float limit) {
  const Floats high = broadcast(limit), low = -high;
#if CPSGD_LANES == 16
  return (Floats)_mm512_min_ps((__m512)high, _mm512_max_ps((__m512)low, (__m512)y));
#else
  return (Floats)_mm256_min_ps((__m256)high, _mm256_max_ps((__m256)low, (__m256)y));
#endif
}

// The nearest integers, halves to even, as floats and as words.
static inline Floats nearest(Floats y) {
#if CPSGD_LANES == 16
  return (Floats)_mm512_roundscale_ps((__m512)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  return (Floats)_mm256_round_ps((__m256)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
}

static inline Words nearest_words(Floats y) {
#if CPSGD_LANES == 16
  return (Words)_mm512_cvtps_epi32((__m512)y);
#else
  return (Words)_mm256_cvtps_epi32((__m256)y);
#endif
}
#endif

// To be called when kernels are done. Compilers clear the upper register halves themselves, but GCC
// 12 forgets it on some paths, and code compiled for SSE that runs afterwards then crawls (a
// cipher's keystream by 60 % on Zen 4).
static void leave() {
#if CPSGD_LANES >= 8
  _mm256_zeroupper();
#endif
}

template <int kDistance, std::size_t... kIndex>
static inline Floats exchange_lanes(Floats v, std::index_sequence<kIndex...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, static_cast<int>(kIndex ^ kDistance)...);
#else
  typedef int Indices __attribute__((vector_size(4 * CPSGD_LANES)));
  return __builtin_shuffle(v, Indices{static_cast<int>(kIndex ^ kDistance)...});
#endif
}

template <int kDistance, std::size_t... kIndex>
static inline Floats lane_signs(std::index_sequence<kIndex...>) {
  return Floats{((kIndex & kDistance) ? -1.0f : 1.0f)...};
}

template <std::size_t... kIndex>
static inline Words lane_bits(std::index_sequence<kIndex...>) {
  return Words{(std::uint32_t{1} << kIndex)...};
}

// The numbers, negated where a bit from `position` (a multiple of kLanes) on is set.
static inline Floats negate(Floats v, const std::uint8_t* bits, std::size_t position) {
  const std::uint8_t* bytes = bits + position / 8;
#if CPSGD_LANES == 16
  std::uint16_t word;
  std::memcpy(&word, bytes, 2);
  return (Floats)_mm512_mask_xor_ps((__m512)v, word, (__m512)v, _mm512_set1_ps(-0.0f));
#else
  const std::uint32_t word = std::uint32_t{*bytes} >> (position % 8);
  const Words lanes = lane_bits(std::make_index_sequence<kLanes>{});
  const Words sign = reinterpret_cast<Words>((word & lanes) == lanes) & 0x80000000u;
  return reinterpret_cast<Floats>(reinterpret_cast<Words>(v) ^ sign);
#endif
}

// One butterfly stage inside a register: lanes i and i ^ kDistance become their sum and difference.
template <int kDistance>
static inline Floats lane_butterfly(Floats v) {
  using Indices = std::make_index_sequence<kLanes>;
  return add_signed(v, lane_signs<kDistance>(Indices{}), exchange_lanes<kDistance>(v, Indices{}));
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
