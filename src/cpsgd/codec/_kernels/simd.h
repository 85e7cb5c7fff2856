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

// One butterfly stage inside a register: lanes i and i ^ kDistance become their sum and difference.
template <int kDistance>
static inline Floats lane_butterfly(Floats v) {
  using Indices = std::make_index_sequence<kLanes>;
  return v * lane_signs<kDistance>(Indices{}) + exchange_lanes<kDistance>(v, Indices{});
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
