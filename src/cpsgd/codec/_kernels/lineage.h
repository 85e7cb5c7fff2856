// Noise that follows from the seeds of a lineage: fine Gaussian draws times a weight, added to what
// is there; and rounding at random of grid points with this noise, kept within a window.
//
// A block's bytes are kRests numbers of 128 bits, then for every group of 64 draws kDrawBytes
// planes of a byte per draw, in the order of 16-bit words: draws 0, 32, 1, 33, ...
#pragma once

#include <cmath>

#include "aes.h"
#include "prefixes.h"

namespace cpsgd {
namespace CPSGD_LEVEL {

typedef std::uint16_t Halves __attribute__((vector_size(4 * CPSGD_LANES)));

// Where a plane's bytes of a draw and of those after it are in a block.
static inline std::size_t byte_of(std::size_t plane, std::size_t place) {
  return 16 * kRests + (place / kGroup * kDrawBytes + plane) * kGroup + place % kGroup;
}

// A block's bytes in memory.
struct StoredPlanes {
  const std::uint8_t* bytes;

  void rests(std::uint8_t* found) const { std::memcpy(found, bytes, 16 * kRests); }

  // Bytes of kCount planes, from a place in each.
  template <std::size_t kCount>
  void read(std::size_t first, std::size_t place, Bytes* found) const {
    for (std::size_t i = 0; i < kCount; ++i) {
      std::memcpy(&found[i], bytes + byte_of(first + i, place), sizeof(Bytes));
    }
  }
};

// The draws of a block whose first bytes do not tell |H|, in the order of bytes: these bytes, and
// what follows from all of their numbers. Compressed registers may be written beyond the last one.
struct Untold {
  std::uint8_t prefixes[kPrefixBytes][kFineBlock + kGroup];
  std::uint8_t found[2][kFineBlock + 2 * kGroup];
  std::size_t count;
#if CPSGD_LANES == 16
  __mmask64 which[kFineBlock / kGroup];
#else
  std::uint8_t which[kFineBlock];
#endif
};

// Halves of a register's bytes: those of the draws before 32, or from there on.
static inline Halves split(Bytes bytes, int half) {
  return half == 0 ? (Halves)bytes & std::uint16_t{255} : (Halves)bytes >> 8;
}

// |H| and, in its highest bit, the sign of kWays registers' draws; zero for those that are untold.
template <std::size_t kWays, typename Planes>
static inline void look(const Planes& planes, const Fine& fine, std::size_t start,
                        std::uint16_t* heads, Untold& untold) {
  Bytes given[kWays][kPrefixBytes], draws[kWays][kPrefixBytes];
  for (std::size_t way = 0; way < kWays; ++way) {
    planes.template read<kPrefixBytes>(0, start + way * kDraws, given[way]);
    draws[way][0] = ~(given[way][2] & std::uint8_t{254});
    draws[way][1] = ~given[way][1];
    draws[way][2] = ~given[way][0];
  }
  Reached reached[kWays];
  reach(draws, fine.prefixes, reached);
  for (std::size_t way = 0; way < kWays; ++way) {
    const std::size_t place = start + way * kDraws;
    const Bytes told = (Bytes)(reached[way].apart != std::uint8_t{0});
#if CPSGD_LANES == 16
    const __mmask64 which = ~_mm512_movepi8_mask((__m512i)told);
    for (std::size_t i = 0; i < kPrefixBytes; ++i) {
      _mm512_storeu_si512(untold.prefixes[i] + untold.count,
                          _mm512_maskz_compress_epi8(which, (__m512i)given[way][i]));
    }
    untold.count += static_cast<std::size_t>(__builtin_popcountll(which));
    untold.which[place / kGroup] = which;
#else
    for (std::size_t i = 0; i < kDraws; ++i) {
      for (std::size_t byte = 0; byte < kPrefixBytes; ++byte) {
        untold.prefixes[byte][untold.count] = given[way][byte][i];
      }
      untold.which[place + i] = static_cast<std::uint8_t>(1 + told[i]);
      untold.count += untold.which[place + i];
    }
#endif
    const Bytes low = reached[way].low & told;
    const Bytes high = (reached[way].high | (given[way][2] << 7)) & told;
    std::uint16_t* found = heads + place / kGroup * kGroup + place % kGroup / 2;
    for (int half = 0; half < 2; ++half) {
      const Halves head = split(low, half) | (split(high, half) << 8);
      std::memcpy(found + 32 * half, &head, sizeof head);
    }
  }
}

// The same for all draws of a block.
template <typename Planes>
static void first_look(const Planes& planes, const Fine& fine, std::size_t width,
                       std::uint16_t* heads, Untold& untold) {
  constexpr std::size_t kWays = 4;
  for (auto& prefixes : untold.prefixes) std::memset(prefixes, 0, kRests);
  std::size_t place = untold.count = 0;
  for (; place + kWays * kDraws <= width; place += kWays * kDraws) {
    look<kWays>(planes, fine, place, heads, untold);
  }
  for (; place < width; place += kDraws) look<1>(planes, fine, place, heads, untold);
}

// Looks the untold up with all their bytes: as many as there are rests, nearly always.
static void look_up(const std::uint8_t* rests, const Fine& fine, Untold& untold) {
  std::size_t start = 0;
  do {
    std::uint8_t draws[16 * kRests];
    std::uint32_t found[kRests] = {};
    std::memcpy(draws, rests, sizeof draws);
    for (std::size_t i = 0; i < kRests; ++i) {
      const std::size_t j = start + i;
      std::uint8_t* draw = draws + 16 * i;
      draw[15] = untold.prefixes[0][j];
      draw[14] = untold.prefixes[1][j];
      draw[13] = static_cast<std::uint8_t>((untold.prefixes[2][j] & 254) | (draw[13] & 1));
    }
    add_inverted(draws, fine.table, found, kRests);
    for (std::size_t i = 0; i < kRests; ++i) {
      const std::size_t j = start + i;
      untold.found[0][j] = static_cast<std::uint8_t>(found[i]);
      untold.found[1][j] =
          static_cast<std::uint8_t>(found[i] >> 8 | (untold.prefixes[2][j] & 1) << 7);
    }
    start += kRests;
  } while (start < untold.count);
}

// Puts the heads of the untold where they belong.
static void put_back(const Untold& untold, std::size_t width, std::uint16_t* heads) {
  std::size_t next = 0;
#if CPSGD_LANES == 16
  for (std::size_t group = 0; group < width; group += kGroup) {
    const __mmask64 which = untold.which[group / kGroup];
    const Bytes low =
        (Bytes)_mm512_maskz_expand_epi8(which, _mm512_loadu_si512(untold.found[0] + next));
    const Bytes high =
        (Bytes)_mm512_maskz_expand_epi8(which, _mm512_loadu_si512(untold.found[1] + next));
    next += static_cast<std::size_t>(__builtin_popcountll(which));
    for (int half = 0; half < 2; ++half) {
      Halves head;
      std::memcpy(&head, heads + group + 32 * half, sizeof head);
      head |= split(low, half) | split(high, half) << 8;
      std::memcpy(heads + group + 32 * half, &head, sizeof head);
    }
  }
#else
  for (std::size_t i = 0; i < width; ++i) {
    const std::uint32_t both = untold.found[0][next] | untold.found[1][next] << 8;
    heads[i / kGroup * kGroup + i % kGroup / 2 + i % 2 * 32] |=
        static_cast<std::uint16_t>(both & (0u - untold.which[i]));
    next += untold.which[i];
  }
#endif
}

// Sums of the bytes of kCount planes.
template <std::size_t kCount>
static inline void sum_bytes(const Bytes* given, std::size_t place, std::uint16_t* sums) {
  // Sums of whole words, of which the high bytes' are taken off again.
  Halves low = (Halves)given[0], high = low >> 8;
  for (std::size_t i = 1; i < kCount; ++i) {
    low += (Halves)given[i];
    high += (Halves)given[i] >> 8;
  }
  low -= high << 8;
  std::memcpy(sums + place % kGroup / 2, &low, sizeof low);
  std::memcpy(sums + place % kGroup / 2 + 32, &high, sizeof high);
}

// total += weight z for a block of n draws z.
template <typename Planes>
static void add_planes(const Planes& planes, const Fine& fine, std::int64_t weight,
                       std::int64_t* total, std::size_t n) {
  const std::size_t width = (n + kGroup - 1) / kGroup * kGroup;
  std::uint16_t heads[kFineBlock];
  std::uint8_t rests[16 * kRests];
  Untold untold;
  planes.rests(rests);
  first_look(planes, fine, width, heads, untold);
  look_up(rests, fine, untold);
  put_back(untold, width, heads);
  constexpr std::size_t k1 = kRefinements[0], k2 = kRefinements[1], k3 = kRefinements[2],
                        k4 = kRefinements[3];
  static_assert(k4 % 2 == 0, "the mean is a whole number");
  constexpr auto kMean =
      static_cast<std::int64_t>(255 * ((k1 << 24) + (k2 << 16) + (k3 << 8) + k4) / 2);
  for (std::size_t group = 0; group < n; group += kGroup) {
    std::uint16_t sums[4][kGroup];
    for (std::size_t place = group; place < group + kGroup; place += kDraws) {
      Bytes given[k1 + k2 + k3 + k4];
      constexpr std::size_t kAtOnce = sizeof given / sizeof *given / 2;
      for (std::size_t i = 0; i < 2 * kAtOnce; i += kAtOnce) {
        planes.template read<kAtOnce>(kPrefixBytes + i, place, given + i);
      }
      sum_bytes<k1>(given, place, sums[0]);
      sum_bytes<k2>(given + k1, place, sums[1]);
      sum_bytes<k3>(given + k1 + k2, place, sums[2]);
      sum_bytes<k4>(given + k1 + k2 + k3, place, sums[3]);
    }
    std::int64_t last[kGroup];
    const std::size_t here = std::min(kGroup, n - group);
    std::int64_t* found = here < kGroup ? last : total + group;
    if (here < kGroup) {
      std::memset(last, 0, sizeof last);
      std::memcpy(last, total + group, here * sizeof *last);
    }
    for (std::size_t i = 0; i < kGroup; ++i) {
      const std::int32_t magnitude = heads[group + i] & 0x7FFF, minus = -(heads[group + i] >> 15);
      const std::int32_t head = (magnitude ^ minus) - minus;
      const std::int32_t coarse = head * 256 + sums[0][i];
      const std::int32_t finer = (sums[1][i] << 16) + (sums[2][i] << 8) + sums[3][i];
      const std::int64_t draw = std::int64_t{coarse} * (1 << 24) + (finer - kMean);
      found[i] += weight * draw;
    }
    if (here < kGroup) std::memcpy(total + group, last, here * sizeof *last);
  }
}

static void add_fine(const std::uint8_t* bytes, const Fine& fine, std::int64_t weight,
                     std::int64_t* total, std::size_t n) {
  add_planes(StoredPlanes{bytes}, fine, weight, total, n);
}

#if defined(__VAES__)
// A block's bytes as they are made.
struct CipheredPlanes {
  Cipher cipher;
  std::uint32_t first;  // the block's first counter

  void rests(std::uint8_t* found) const {
    Bytes bytes[16 * kRests / kGroup];
    cipher.encrypt<16 * kRests / kGroup>(first, bytes);
    std::memcpy(found, bytes, sizeof bytes);
  }

  template <std::size_t kCount>
  void read(std::size_t plane, std::size_t place, Bytes* found) const {
    cipher.encrypt<kCount>(first + static_cast<std::uint32_t>(byte_of(plane, place) / 16), found);
  }
};

// The same for several keys, block by block, so that the total stays in the cache.
static void expand_fine(const std::uint8_t* keys, const std::int64_t* weights, std::size_t count,
                        const Fine& fine, std::int64_t* total, std::size_t n) {
  for (std::size_t start = 0; start < n; start += kFineBlock) {
    const std::size_t here = std::min(kFineBlock, n - start);
    // GCM encrypts from block 2 on.
    const std::size_t first = 2 + start / kFineBlock * (fine_bytes(kFineBlock) / 16);
    for (std::size_t i = 0; i < count; ++i) {
      const CipheredPlanes planes{Cipher(keys + 16 * i), static_cast<std::uint32_t>(first)};
      add_planes(planes, fine, weights[i], total + start, here);
    }
  }
}
constexpr auto* kExpandFine = expand_fine;
#else
constexpr decltype(Kernels::expand_fine) kExpandFine = nullptr;
#endif

// values = floor((v + noise + centre + r) / 2^fraction_bits) within the window, v the grid point
// nearest to y and r a uniform number below 2^fraction_bits.
static void saturate(const float* __restrict y, const std::uint8_t* __restrict coins,
                     const std::int64_t* __restrict noise, const Saturation& how,
                     std::uint32_t* __restrict values, std::size_t n) {
  const float limit = how.limit;
  const std::int64_t unit = how.unit, centre = how.centre, last = how.last;
  const int fraction = how.fraction_bits;
  for (std::size_t i = 0; i < n; ++i) {
    std::uint64_t coin;
    std::memcpy(&coin, coins + 8 * i, 8);
    const std::int64_t point = static_cast<std::int32_t>(std::rint(clamp(y[i], limit)));
    const std::int64_t noisy =
        point * unit + noise[i] + centre + static_cast<std::int64_t>(coin >> (64 - fraction));
    const std::int64_t level = noisy >> fraction;
    const std::int64_t within = level < 0 ? 0 : level;
    values[i] = static_cast<std::uint32_t>(within > last ? last : within);
  }
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
