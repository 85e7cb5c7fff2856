// Binomial(m, p) by inversion: base + how many thresholds a 128-bit uniform number reaches.
//
// A bisection in a fixed number of steps. Neither its instructions nor the addresses they use
// depend on the number drawn: every step reads all the thresholds that it may need, sixteen or 64
// to a register, and picks one with byte shuffles. For many numbers at once that takes less time
// than looking each up, as long as there are not many thousand thresholds.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace cpsgd {
namespace CPSGD_LEVEL {

// One byte of each of kDraws numbers. Numbers have sixteen bytes and so take sixteen of these, the
// least significant first.
typedef std::uint8_t Bytes __attribute__((vector_size(4 * CPSGD_LANES)));
constexpr std::size_t kDraws = sizeof(Bytes);

typedef std::uint8_t Sixteen __attribute__((vector_size(16)));

// Bytes that one pick chooses among.
#if CPSGD_LANES == 16
constexpr std::size_t kBlock = 64;
#else
constexpr std::size_t kBlock = 16;
#endif

// In every lane: the byte of those at `entries` that `index` names, or 0 where that is 255.
static inline Bytes pick(const std::uint8_t* entries, Bytes index) {
#if CPSGD_LANES == 16
  const __mmask64 named = ~_mm512_movepi8_mask((__m512i)index);
  return (Bytes)_mm512_maskz_permutexvar_epi8(named, (__m512i)index, _mm512_loadu_si512(entries));
#elif CPSGD_LANES == 8
  return (Bytes)_mm256_shuffle_epi8(
      _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)entries)), (__m256i)index);
#elif defined(__SSSE3__)
  return (Bytes)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)entries), (__m128i)index);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return (Bytes)vqtbl1q_u8(vld1q_u8(entries), (uint8x16_t)index);
#else
  Bytes found{};
  for (int entry = 0; entry < 16; ++entry) {
    found |= (Bytes)(index == static_cast<std::uint8_t>(entry)) & entries[entry];
  }
  return found;
#endif
}

#if CPSGD_LANES == 16
// Complements of kDraws numbers, transposed: byte p of number i goes from draws[16 i + p] to
// lane i of planes[p].
static inline void transpose(const std::uint8_t* draws, Bytes (&planes)[16]) {
  __m512i rows[16], mixed[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    const __m128i* row = (const __m128i*)draws + i;
    rows[i] = _mm512_castsi128_si512(_mm_loadu_si128(row));
    rows[i] = _mm512_inserti32x4(rows[i], _mm_loadu_si128(row + 16), 1);
    rows[i] = _mm512_inserti32x4(rows[i], _mm_loadu_si128(row + 32), 2);
    rows[i] = _mm512_inserti32x4(rows[i], _mm_loadu_si128(row + 48), 3);
  }
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      mixed[2 * i] = _mm512_unpacklo_epi8(rows[i], rows[i + 8]);
      mixed[2 * i + 1] = _mm512_unpackhi_epi8(rows[i], rows[i + 8]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = mixed[i];
  }
#pragma GCC unroll 16
  for (int plane = 0; plane < 16; ++plane) planes[plane] = ~(Bytes)rows[plane];
}
#else
template <std::size_t... kIndex>
static inline Sixteen interleave(Sixteen a, Sixteen b, int half, std::index_sequence<kIndex...>) {
#if defined(__clang__)
  return half == 0
             ? __builtin_shufflevector(a, b, static_cast<int>(kIndex / 2 + 16 * (kIndex % 2))...)
             : __builtin_shufflevector(a, b,
                                       static_cast<int>(8 + kIndex / 2 + 16 * (kIndex % 2))...);
#else
  const std::uint8_t first = static_cast<std::uint8_t>(8 * half);
  return __builtin_shuffle(
      a, b, Sixteen{static_cast<std::uint8_t>(first + kIndex / 2 + 16 * (kIndex % 2))...});
#endif
}

// Complements of kDraws numbers, transposed: byte p of number i goes from draws[16 i + p] to
// lane i of planes[p].
static inline void transpose(const std::uint8_t* draws, Bytes (&planes)[16]) {
  for (std::size_t start = 0; start < kDraws; start += 16) {
    Sixteen rows[16], mixed[16];
    std::memcpy(rows, draws + 16 * start, sizeof rows);
#pragma GCC unroll 4
    for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        mixed[2 * i] = interleave(rows[i], rows[i + 8], 0, std::make_index_sequence<16>{});
        mixed[2 * i + 1] = interleave(rows[i], rows[i + 8], 1, std::make_index_sequence<16>{});
      }
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) rows[i] = mixed[i];
    }
#pragma GCC unroll 16
    for (int plane = 0; plane < 16; ++plane) {
      const Sixteen complement = ~rows[plane];
      std::memcpy(reinterpret_cast<std::uint8_t*>(&planes[plane]) + start, &complement, 16);
    }
  }
}

#endif

// A number below 2^20 in every lane: kBlock (256 pages + blocks) + entries.
struct Positions {
  Bytes pages{}, blocks{}, entries{};

  // Twice the numbers, plus one where `plus` is all ones.
  void advance(Bytes plus) {
    pages = pages + pages - (Bytes)(blocks > std::uint8_t{127});  // a true comparison is -1
    blocks = blocks + blocks - (Bytes)(entries >= std::uint8_t{kBlock / 2});
    entries = (entries + entries - plus) & std::uint8_t{kBlock - 1};
  }
};

// Where the first number's byte is larger, or the same and `reached` is not zero: not zero.
static inline Bytes decide(Bytes a, Bytes b, Bytes reached) {
#if CPSGD_LANES == 16
  const __m512i above = _mm512_subs_epu8((__m512i)a, (__m512i)b);
  const __mmask64 least = _mm512_cmpge_epu8_mask((__m512i)a, (__m512i)b);
  return (Bytes)_mm512_maskz_adds_epu8(least, above, (__m512i)reached);
#else
  return (Bytes)(a > b) | ((Bytes)(a == b) & reached);
#endif
}

// Registers of kDraws numbers that are looked up at a time. A step has to wait for the one before,
// and meanwhile the processor takes the same step for the other registers.
constexpr std::size_t kAbreast = 8;

// How many thresholds the numbers of some registers reach. The largest number of all may seem to
// reach more than there are.
static inline void search(const Bytes (*draws)[16], const Thresholds& table, Positions* reaching,
                          std::size_t registers) {
  // Planes whose bytes are picked with the same indices, while these are in a register.
  constexpr int kAtOnce = 8;
  const std::uint8_t* thresholds = table.blocks;
  for (std::size_t step = table.first_step; step != 0; step /= 2) {
    const std::size_t count = blocks_of_step(table.count, step, kBlock);
    for (std::size_t number = 0; number < registers; ++number) {
      Positions& next = reaching[number];  // which of the step's thresholds to compare with
      Bytes reached = ~Bytes{};
      for (int first = 0; first < 16; first += kAtOnce) {
        Bytes found[kAtOnce] = {};
        for (std::size_t start = 0; start < count; start += 256) {
          const Bytes entries =
              next.entries | (Bytes)(next.pages != static_cast<std::uint8_t>(start / 256));
          const std::size_t end = std::min<std::size_t>(count, start + 256);
          for (std::size_t block = start; block < end; ++block) {
            const Bytes index = entries | (Bytes)(next.blocks != static_cast<std::uint8_t>(block));
            const std::uint8_t* bytes = thresholds + kBlock * (16 * block + first);
#pragma GCC unroll 8
            for (int i = 0; i < kAtOnce; ++i) found[i] |= pick(bytes + kBlock * i, index);
          }
        }
        // Both sides are complements: the larger byte belongs to the smaller number.
#pragma GCC unroll 8
        for (int i = 0; i < kAtOnce; ++i) {
          reached = decide(found[i], draws[number][first + i], reached);
        }
      }
      next.advance((Bytes)(reached != std::uint8_t{0}));
    }
    thresholds += 16 * kBlock * count;
  }
}

static void add_inverted(const std::uint8_t* uniform, const Thresholds& table,
                         std::uint32_t* __restrict values, std::size_t n) {
  const std::uint32_t count = static_cast<std::uint32_t>(table.count), base = table.base;
  Bytes draws[kAbreast][16];
  for (std::size_t start = 0; start < n; start += kAbreast * kDraws) {
    const std::size_t registers = std::min(kAbreast, (n - start + kDraws - 1) / kDraws);
    Positions reached[kAbreast];
    for (std::size_t number = 0; number < registers; ++number) {
      const std::size_t first = start + number * kDraws, here = std::min(kDraws, n - first);
      if (here == kDraws) {
        transpose(uniform + 16 * first, draws[number]);
      } else {
        std::uint8_t last[16 * kDraws] = {};
        std::memcpy(last, uniform + 16 * first, 16 * here);
        transpose(last, draws[number]);
      }
    }
    search(draws, table, reached, registers);
    for (std::size_t number = 0; number < registers; ++number) {
      const std::size_t first = start + number * kDraws, here = std::min(kDraws, n - first);
      std::uint8_t bytes[3][kDraws];
      std::memcpy(bytes[0], &reached[number].entries, kDraws);
      std::memcpy(bytes[1], &reached[number].blocks, kDraws);
      std::memcpy(bytes[2], &reached[number].pages, kDraws);
      for (std::size_t i = 0; i < here; ++i) {
        const std::uint32_t blocks = 256u * bytes[2][i] + bytes[1][i];
        values[first + i] += base + std::min<std::uint32_t>(kBlock * blocks + bytes[0][i], count);
      }
    }
  }
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
