// How many thresholds the first bytes of a number reach: a bisection as in inversion.h, of three
// bytes, which notes where a threshold has the same.
#pragma once

#include "inversion.h"

namespace cpsgd {
namespace CPSGD_LEVEL {

// Of as many numbers as a register has bytes: 256 high + low; and whether a threshold is the number
// itself, where `apart` is zero.
struct Reached {
  Bytes low, high, apart;
};

#if CPSGD_LANES == 16
// Complements of thresholds that no number reaches: those behind a step's last one.
alignas(kBlock) static constexpr std::uint8_t kBeyond[3 * kBlock] = {};

// For kWays registers at once: each waits for its own steps.
template <std::size_t kWays>
static inline void reach(const Bytes (&draws)[kWays][3], const Thresholds& table,
                         Reached (&reached)[kWays]) {
  const __m512i one = _mm512_set1_epi8(1), top = _mm512_set1_epi8(32);
  __m512i entries[kWays], blocks[kWays], apart[kWays];
  for (std::size_t way = 0; way < kWays; ++way) {
    entries[way] = blocks[way] = _mm512_setzero_si512();
    apart[way] = _mm512_set1_epi8(-1);
  }
  const std::uint8_t* thresholds = table.blocks;
  for (std::size_t step = table.first_step; step != 0; step /= 2) {
    const std::size_t count = blocks_of_step(table.count, step, kBlock);
    __m512i found[kWays][3];
#pragma GCC unroll 4
    for (std::size_t way = 0; way < kWays; ++way) {
#pragma GCC unroll 3
      for (int i = 0; i < 3; ++i) {
        found[way][i] =
            _mm512_permutexvar_epi8(entries[way], _mm512_loadu_si512(thresholds + kBlock * i));
      }
    }
    // A number behind all of a step's thresholds may be in the block behind theirs.
    for (std::size_t block = 1; block <= table.count / (2 * step) / kBlock; ++block) {
      const std::uint8_t* bytes = block < count ? thresholds + 3 * kBlock * block : kBeyond;
      const __m512i number = _mm512_set1_epi8(static_cast<char>(block));
#pragma GCC unroll 4
      for (std::size_t way = 0; way < kWays; ++way) {
        const __mmask64 here = _mm512_cmpeq_epi8_mask(blocks[way], number);
#pragma GCC unroll 3
        for (int i = 0; i < 3; ++i) {
          found[way][i] = _mm512_mask_permutexvar_epi8(found[way][i], here, entries[way],
                                                       _mm512_loadu_si512(bytes + kBlock * i));
        }
      }
    }
    thresholds += 3 * kBlock * count;
    // Up to here all are in the first block, and so they are in the next step.
    const bool narrow = step > 1 && table.count / step < kBlock;
#pragma GCC unroll 4
    for (std::size_t way = 0; way < kWays; ++way) {
      // Both sides are complements: the larger byte belongs to the smaller number.
      __mmask64 least = _mm512_cmpge_epu8_mask(found[way][0], (__m512i)draws[way][0]);
      __m512i differs = found[way][0] ^ (__m512i)draws[way][0];
#pragma GCC unroll 2
      for (int i = 1; i < 3; ++i) {
        const __m512i threshold = found[way][i], draw = (__m512i)draws[way][i];
        least = _mm512_cmpgt_epu8_mask(threshold, draw) |
                _mm512_mask_cmpge_epu8_mask(least, threshold, draw);
        differs = _mm512_ternarylogic_epi32(differs, threshold, draw, 0xF6);  // a | (b ^ c)
      }
      apart[way] = _mm512_min_epu8(apart[way], differs);
      if (!narrow) {
        const __mmask64 carried = _mm512_test_epi8_mask(entries[way], top);
        blocks[way] = _mm512_add_epi8(blocks[way], blocks[way]);
        blocks[way] = _mm512_mask_add_epi8(blocks[way], carried, blocks[way], one);
      }
      entries[way] = _mm512_add_epi8(entries[way], entries[way]);
      entries[way] = _mm512_mask_add_epi8(entries[way], least, entries[way], one);
    }
  }
#pragma GCC unroll 4
  for (std::size_t way = 0; way < kWays; ++way) {
    const Bytes all = (Bytes)blocks[way];
    const Bytes low = ((Bytes)entries[way] & std::uint8_t{63}) | (all << 6);
    reached[way] = {low, all >> 2, (Bytes)apart[way]};
  }
}
#else
template <std::size_t kWays>
static inline void reach(const Bytes (&draws)[kWays][3], const Thresholds& table,
                         Reached (&reached)[kWays]) {
  for (std::size_t way = 0; way < kWays; ++way) {
    const std::uint8_t* thresholds = table.blocks;
    Positions next;
    Bytes apart = ~Bytes{};
    for (std::size_t step = table.first_step; step != 0; step /= 2) {
      const std::size_t count = blocks_of_step(table.count, step, kBlock);
      Bytes found[3] = {}, least = ~Bytes{}, differs{};
      for (std::size_t block = 0; block < count; ++block) {
        const Bytes index = next.entries | (Bytes)(next.blocks != static_cast<std::uint8_t>(block));
        const std::uint8_t* bytes = thresholds + 3 * kBlock * block;
        for (int i = 0; i < 3; ++i) found[i] |= pick(bytes + kBlock * i, index);
      }
      for (int i = 0; i < 3; ++i) {
        least = decide(found[i], draws[way][i], least);
        differs |= found[i] ^ draws[way][i];
      }
      apart = apart < differs ? apart : differs;
      thresholds += 3 * kBlock * count;
      next.advance((Bytes)(least != std::uint8_t{0}));
    }
    reached[way] = {next.entries | (next.blocks << 4), next.blocks >> 4, apart};
  }
}
#endif

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
