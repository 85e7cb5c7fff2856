// Messages that hold some of the coordinates: which ones, and sums of them. Who is chosen follows
// from a message's id, which is no secret of the client: the time taken may depend on it.
#pragma once

#include "packing.h"

namespace cpsgd {
namespace CPSGD_LEVEL {

#if CPSGD_LANES == 8
// Which of 32 words reach the bound.
static inline std::uint32_t mask_reached(const std::uint16_t* words, __m256i bounds) {
  const __m256i a = _mm256_loadu_si256((const __m256i*)words);
  const __m256i b = _mm256_loadu_si256((const __m256i*)(words + 16));
  const __m256i bytes = _mm256_packs_epi16(_mm256_cmpeq_epi16(_mm256_max_epu16(a, bounds), a),
                                           _mm256_cmpeq_epi16(_mm256_max_epu16(b, bounds), b));
  // Packing works on each half of a register by itself.
  return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_permute4x64_epi64(bytes, 0xD8)));
}
#endif

// Which of 64 words are below the bound, the first in the least significant bit.
static inline std::uint64_t mask_below(const std::uint16_t* words, std::uint16_t bound) {
#if CPSGD_LANES == 16
  const __m512i bounds = _mm512_set1_epi16(static_cast<short>(bound));
  const std::uint64_t low = _mm512_cmplt_epu16_mask(_mm512_loadu_si512(words), bounds);
  const std::uint64_t high = _mm512_cmplt_epu16_mask(_mm512_loadu_si512(words + 32), bounds);
  return low | high << 32;
#elif CPSGD_LANES == 8
  const __m256i bounds = _mm256_set1_epi16(static_cast<short>(bound));
  const std::uint64_t high = mask_reached(words + 32, bounds);
  return ~(mask_reached(words, bounds) | high << 32);
#else
  std::uint8_t narrow[64];
  for (int i = 0; i < 64; ++i) narrow[i] = words[i] < bound;
  std::uint64_t mask = 0;
  for (int i = 0; i < 8; ++i) mask |= squeeze<1>(read_bytes(narrow + 8 * i, 8)) << (8 * i);
  return mask;
#endif
}

// Writes first + the positions of the words below the bound, and says how many there are.
static std::size_t find_below(const std::uint16_t* words, std::uint16_t bound, std::uint32_t first,
                              std::uint32_t* positions, std::size_t n) {
  std::size_t count = 0, i = 0;
  for (; i + 64 <= n; i += 64) {
    for (std::uint64_t mask = mask_below(words + i, bound); mask != 0; mask &= mask - 1) {
      const std::size_t position = i + static_cast<std::size_t>(__builtin_ctzll(mask));
      positions[count++] = first + static_cast<std::uint32_t>(position);
    }
  }
  for (; i < n; ++i) {
    if (words[i] < bound) positions[count++] = first + static_cast<std::uint32_t>(i);
  }
  return count;
}

// Adds 1 to all sums, and at each position the 1 or -1 that its bit stands for.
template <typename Sum>
static void add_signs(const std::uint8_t* bits, const std::uint32_t* positions, std::size_t count,
                      Sum* sums, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) sums[i] += 1;
  for (std::size_t j = 0; j < count; ++j) {
    const Sum bit = (bits[j / 8] >> (j % 8)) & 1;
    sums[positions[j]] += bit + bit - 1;  // unsigned numbers wrap around and back
  }
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
