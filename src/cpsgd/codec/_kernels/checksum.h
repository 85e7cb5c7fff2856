// CRC-32C (Castagnoli), as in RFC 3720: the polynomial that processors have an instruction for.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE4_2__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace cpsgd {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;  // reflected

constexpr std::uint32_t advance(std::uint32_t state, int bits) {
  for (int i = 0; i < bits; ++i) state = (state >> 1) ^ ((state & 1u) ? kPolynomial : 0u);
  return state;
}

constexpr std::array<std::uint32_t, 256> make_byte_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) table[byte] = advance(byte, 8);
  return table;
}

constexpr std::array<std::uint32_t, 256> kByteTable = make_byte_table();

inline std::uint32_t step_byte(std::uint32_t state, std::uint8_t byte) {
  return kByteTable[(state ^ byte) & 255u] ^ (state >> 8);
}

inline std::uint32_t step_word(std::uint32_t state, std::uint64_t word) {
#if defined(__SSE4_2__)
  return static_cast<std::uint32_t>(_mm_crc32_u64(state, word));
#elif defined(__ARM_FEATURE_CRC32)
  return __crc32cd(state, word);
#else
  for (int i = 0; i < 8; ++i, word >>= 8) state = step_byte(state, static_cast<std::uint8_t>(word));
  return state;
#endif
}

// The state after `kLane` zero bytes is linear in the state, so four table look-ups move it
// across a lane.
constexpr std::size_t kLane = 1024;
using LaneTable = std::array<std::array<std::uint32_t, 256>, 4>;

inline LaneTable make_lane_table() {
  LaneTable table{};
  for (int byte = 0; byte < 4; ++byte) {
    for (std::uint32_t value = 0; value < 256; ++value) {
      table[byte][value] = advance(value << (8 * byte), 8 * kLane);
    }
  }
  return table;
}

// The checksum of `prior` bytes followed by these, given that of the prior ones (0 for none).
inline std::uint32_t crc32c(const std::uint8_t* data, std::size_t size, std::uint32_t prior) {
  static const LaneTable lanes = make_lane_table();
  const auto across_lane = [](std::uint32_t state) {
    return lanes[0][state & 255u] ^ lanes[1][(state >> 8) & 255u] ^ lanes[2][(state >> 16) & 255u] ^
           lanes[3][state >> 24];
  };
  const auto word_at = [data](std::size_t offset) {
    std::uint64_t word;
    std::memcpy(&word, data + offset, 8);
    return word;
  };
  std::uint32_t state = ~prior;
  std::size_t i = 0;
  // Three lanes side by side: the instruction can start every cycle but takes three to finish.
  for (; i + 3 * kLane <= size; i += 3 * kLane) {
    std::uint32_t first = state, second = 0, third = 0;
    for (std::size_t j = i; j < i + kLane; j += 8) {
      first = step_word(first, word_at(j));
      second = step_word(second, word_at(j + kLane));
      third = step_word(third, word_at(j + 2 * kLane));
    }
    state = across_lane(across_lane(first) ^ second) ^ third;
  }
  for (; i + 8 <= size; i += 8) state = step_word(state, word_at(i));
  for (; i < size; ++i) state = step_byte(state, data[i]);
  return ~state;
}

}  // namespace cpsgd
