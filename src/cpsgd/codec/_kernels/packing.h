// Values below `radix` to bytes and back (see codec/pack.py for the format).
#pragma once

#include "simd.h"

namespace cpsgd {
namespace CPSGD_LEVEL {

// Values are handled in tiles that begin on a byte and on a group.
constexpr std::size_t kTile = 1024;

static std::size_t tile_size(const Grouping& grouping) {
  const std::size_t unit = 8 * grouping.digits;
  return kTile / unit * unit;
}

static std::uint64_t read_bytes(const std::uint8_t* bytes, std::size_t available) {
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, available < 8 ? available : 8);
  return word;
}

// ---------------------------------------------------------------- radix 2^1 to 2^8
// Every eight values become `kBits` bytes.

// The low `bits` bits of each lane of kWidth bits.
template <int kWidth>
static constexpr std::uint64_t low_bits(int bits) {
  std::uint64_t mask = 0;
  for (int lane = 0; lane < 64; lane += kWidth) {
    mask |= (bits >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1) << lane;
  }
  return mask;
}

// Every two neighbouring fields, kBits wide in slots of kSlot bits, are moved together (or
// apart again).
template <int kSlot, int kBits>
static inline std::uint64_t join(std::uint64_t x) {
  constexpr std::uint64_t lower = low_bits<2 * kSlot>(kBits);
  return (x & lower) | ((x >> (kSlot - kBits)) & (lower << kBits));
}

template <int kSlot, int kBits>
static inline std::uint64_t part(std::uint64_t x) {
  constexpr std::uint64_t lower = low_bits<2 * kSlot>(kBits);
  return (x & lower) | ((x & (lower << kBits)) << (kSlot - kBits));
}

template <int kBits>
static inline std::uint64_t squeeze(std::uint64_t x) {
  return join<32, 4 * kBits>(join<16, 2 * kBits>(join<8, kBits>(x)));
}

template <int kBits>
static inline std::uint64_t spread(std::uint64_t x) {
  return part<8, kBits>(part<16, 2 * kBits>(part<32, 4 * kBits>(x)));
}

template <int kBits>
static void pack_bytes(const std::uint32_t* values, std::size_t n, std::uint8_t* out) {
  std::uint64_t eights[kTile / 8];
  std::uint8_t* narrow = reinterpret_cast<std::uint8_t*>(eights);
  const std::size_t blocks = (n + 7) / 8;
  for (std::size_t i = 0; i < n; ++i) narrow[i] = static_cast<std::uint8_t>(values[i]);
  for (std::size_t i = n; i < 8 * blocks; ++i) narrow[i] = 0;
  for (std::size_t i = 0; i < blocks; ++i) eights[i] = squeeze<kBits>(eights[i]);
  const std::size_t bytes = (n * kBits + 7) / 8;
  if constexpr (kBits == 4) {
    for (std::size_t i = 0; i < n / 8; ++i) {
      const std::uint32_t word = static_cast<std::uint32_t>(eights[i]);
      std::memcpy(out + 4 * i, &word, 4);
    }
    if (n % 8 != 0) std::memcpy(out + n / 8 * 4, &eights[blocks - 1], bytes - n / 8 * 4);
  } else {
    for (std::size_t i = 0; i < blocks; ++i) {
      const std::size_t left = bytes - i * kBits;
      std::memcpy(out + i * kBits, &eights[i], left < kBits ? left : kBits);
    }
  }
}

#if CPSGD_LANES == 16
// The same, with an instruction for it: two values in the low byte of a 64-bit lane.
static void pack_nibbles(const std::uint32_t* values, std::size_t n, std::uint8_t* out) {
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m512i pairs = _mm512_loadu_si512(values + i);
    const __m512i joined = _mm512_or_si512(pairs, _mm512_srli_epi64(pairs, 28));
    _mm_storel_epi64((__m128i*)(out + i / 2), _mm512_cvtepi64_epi8(joined));
  }
  pack_bytes<4>(values + i, n - i, out + i / 2);
}
#endif

template <int kBits>
static void unpack_bytes(const std::uint8_t* bytes, std::size_t n, std::uint32_t* values) {
  std::uint64_t eights[kTile / 8];
  const std::uint8_t* narrow = reinterpret_cast<const std::uint8_t*>(eights);
  const std::size_t blocks = (n + 7) / 8, size = (n * kBits + 7) / 8;
  if constexpr (kBits == 4) {
    for (std::size_t i = 0; i < n / 8; ++i) {
      std::uint32_t word;
      std::memcpy(&word, bytes + 4 * i, 4);
      eights[i] = word;
    }
    if (n % 8 != 0) eights[blocks - 1] = read_bytes(bytes + n / 8 * 4, size - n / 8 * 4);
  } else {
    for (std::size_t i = 0; i < blocks; ++i) {
      const std::size_t left = size - i * kBits;
      eights[i] = read_bytes(bytes + i * kBits, left);
    }
  }
  for (std::size_t i = 0; i < blocks; ++i) eights[i] = spread<kBits>(eights[i]);
  for (std::size_t i = 0; i < n; ++i) values[i] = narrow[i];
}

// ---------------------------------------------------------------- any radix
// Groups of digits become words of `bits` bits, the least significant digit and bit first.

// A queue of bits; 128 of them, so that a 64-bit word always fits behind at most 7 waiting bits.
struct BitQueue {
  unsigned __int128 bits = 0;
  int waiting = 0;

  void push(std::uint64_t word, int width) {
    bits |= static_cast<unsigned __int128>(word) << waiting;
    waiting += width;
  }
  std::uint64_t pop(int width) {
    const std::uint64_t word = static_cast<std::uint64_t>(bits) &
                               (width == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << width) - 1);
    bits >>= width;
    waiting -= width;
    return word;
  }
};

static void pack_groups(const std::uint32_t* values, std::size_t n, const Grouping& grouping,
                        std::uint8_t* out) {
  BitQueue queue;
  for (std::size_t i = 0; i < n; i += grouping.digits) {
    const std::size_t digits = n - i < grouping.digits ? n - i : grouping.digits;
    std::uint64_t word = 0;
    for (std::size_t j = digits; j-- > 0;) word = word * grouping.radix + values[i + j];
    queue.push(word, digits == grouping.digits ? grouping.bits : grouping.last_bits);
    for (; queue.waiting >= 8; ++out) *out = static_cast<std::uint8_t>(queue.pop(8));
  }
  if (queue.waiting > 0) *out = static_cast<std::uint8_t>(queue.pop(queue.waiting));
}

// Quotients by multiplication: exact for every 64-bit word (Granlund and Montgomery 1994,
// with a 65-bit multiplier).
struct Divider {
  std::uint64_t multiplier;
  int shift;

  explicit Divider(std::uint64_t divisor) {
    const int bits = 64 - __builtin_clzll(divisor - 1);
    const unsigned __int128 numerator =
        static_cast<unsigned __int128>((std::uint64_t{1} << (bits - 1)) * 2 - divisor) << 64;
    multiplier = static_cast<std::uint64_t>(numerator / divisor) + 1;
    shift = bits - 1;
  }
  std::uint64_t operator()(std::uint64_t x) const {
    const std::uint64_t high =
        static_cast<std::uint64_t>((static_cast<unsigned __int128>(multiplier) * x) >> 64);
    return (((x - high) >> 1) + high) >> shift;
  }
};

// Writes the digits of a word. What is left is the last digit, or too large for one if no client
// packed it: the caller's range check sees it.
static void write_digits(std::uint64_t word, std::size_t digits, std::uint64_t radix,
                         const Divider& divide, std::uint32_t* values) {
  for (std::size_t j = 0; j + 1 < digits; ++j) {
    const std::uint64_t quotient = divide(word);
    values[j] = static_cast<std::uint32_t>(word - quotient * radix);
    word = quotient;
  }
  values[digits - 1] = word > 0xFFFFFFFFu ? 0xFFFFFFFFu : static_cast<std::uint32_t>(word);
}

static void unpack_groups(const std::uint8_t* bytes, std::size_t n, const Grouping& grouping,
                          std::uint32_t* values) {
  const Divider divide(grouping.radix);
  const std::size_t full = n / grouping.digits, rest = n % grouping.digits;
  const std::size_t size = (full * grouping.bits + (rest ? grouping.last_bits : 0) + 7) / 8;
  std::size_t group = 0, bit = 0;
  if (grouping.bits <= 57) {
    // Eight bytes hold a whole group, wherever in the first byte it begins.
    const std::uint64_t mask = (std::uint64_t{1} << grouping.bits) - 1;
    for (; group < full && bit / 8 + 8 <= size; ++group, bit += grouping.bits) {
      std::uint64_t word;
      std::memcpy(&word, bytes + bit / 8, 8);
      word = (word >> bit % 8) & mask;
      std::uint32_t* digits = values + group * grouping.digits;
      if (grouping.digits == 1) {
        *digits = word > 0xFFFFFFFFu ? 0xFFFFFFFFu : static_cast<std::uint32_t>(word);
      } else {
        write_digits(word, grouping.digits, grouping.radix, divide, digits);
      }
    }
  }
  BitQueue queue;
  bytes += bit / 8;
  if (bit % 8 != 0) {
    queue.push(*bytes++ >> bit % 8, 8 - static_cast<int>(bit % 8));
  }
  for (std::size_t i = group * grouping.digits; i < n; i += grouping.digits) {
    const std::size_t digits = n - i < grouping.digits ? n - i : grouping.digits;
    const int width = digits == grouping.digits ? grouping.bits : grouping.last_bits;
    for (; queue.waiting < width; ++bytes) queue.push(*bytes, 8);
    write_digits(queue.pop(width), digits, grouping.radix, divide, values + i);
  }
}

// ---------------------------------------------------------------- one tile either way

static void pack_tile(const std::uint32_t* values, std::size_t n, const Grouping& grouping,
                      std::uint8_t* out) {
  switch (grouping.digits == 1 && grouping.radix == (std::uint64_t{1} << grouping.bits)
              ? grouping.bits
              : 0) {
    case 1: return pack_bytes<1>(values, n, out);
    case 2: return pack_bytes<2>(values, n, out);
    case 3: return pack_bytes<3>(values, n, out);
#if CPSGD_LANES == 16
    case 4: return pack_nibbles(values, n, out);
#else
    case 4: return pack_bytes<4>(values, n, out);
#endif
    case 5: return pack_bytes<5>(values, n, out);
    case 6: return pack_bytes<6>(values, n, out);
    case 7: return pack_bytes<7>(values, n, out);
    case 8: return pack_bytes<8>(values, n, out);
    default: return pack_groups(values, n, grouping, out);
  }
}

static void unpack_tile(const std::uint8_t* bytes, std::size_t n, const Grouping& grouping,
                        std::uint32_t* values) {
  switch (grouping.digits == 1 && grouping.radix == (std::uint64_t{1} << grouping.bits)
              ? grouping.bits
              : 0) {
    case 1: return unpack_bytes<1>(bytes, n, values);
    case 2: return unpack_bytes<2>(bytes, n, values);
    case 3: return unpack_bytes<3>(bytes, n, values);
    case 4: return unpack_bytes<4>(bytes, n, values);
    case 5: return unpack_bytes<5>(bytes, n, values);
    case 6: return unpack_bytes<6>(bytes, n, values);
    case 7: return unpack_bytes<7>(bytes, n, values);
    case 8: return unpack_bytes<8>(bytes, n, values);
    default: return unpack_groups(bytes, n, grouping, values);
  }
}

// Calls `body(first value, values, first byte)` for each tile of n values.
template <typename Body>
static void for_each_tile(std::size_t n, const Grouping& grouping, const Body& body) {
  const std::size_t tile = tile_size(grouping),
                    tile_bytes = tile / grouping.digits * grouping.bits / 8;
  for (std::size_t start = 0, byte = 0; start < n; start += tile, byte += tile_bytes) {
    body(start, n - start < tile ? n - start : tile, byte);
  }
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
