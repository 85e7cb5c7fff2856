// Where a permutation that a key fixes sends numbers: who takes part in a round.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpsgd {
namespace CPSGD_LEVEL {

// The finalizer of MurmurHash3.
static inline std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ x >> 33) * 0xFF51AFD7ED558CCDu;
  x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53u;
  return x ^ x >> 33;
}

// A Feistel network over numbers of 2 `half` bits; one that lands at `size` or beyond is sent on
// until it lands below. Numbers go through it side by side, and those that are done make room.
static void permute(const std::int64_t* numbers, std::uint64_t size, int half,
                    const std::uint64_t* keys, std::size_t rounds, std::int64_t* found,
                    std::size_t n) {
  constexpr std::size_t kBatch = 64;
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  std::uint64_t left[kBatch] = {}, right[kBatch] = {};
  std::size_t places[kBatch];
  std::size_t held = 0, next = 0;
  while (held > 0 || next < n) {
    for (; held < kBatch && next < n; ++held, ++next) {
      const auto number = static_cast<std::uint64_t>(numbers[next]);
      left[held] = number >> half;
      right[held] = number & mask;
      places[held] = next;
    }
    for (std::size_t round = 0; round < rounds; ++round) {
      const std::uint64_t key = keys[round];
      for (std::size_t i = 0; i < kBatch; ++i) {
        const std::uint64_t following = left[i] ^ (mixed(right[i] ^ key) & mask);
        left[i] = right[i];
        right[i] = following;
      }
    }
    std::size_t left_over = 0;
    for (std::size_t i = 0; i < held; ++i) {
      const std::uint64_t value = left[i] << half | right[i];
      const std::uint64_t a = left[i], b = right[i];
      const std::size_t place = places[i];
      left[left_over] = a;
      right[left_over] = b;
      places[left_over] = place;
      found[place] = static_cast<std::int64_t>(value);  // written again if it was not the last
      left_over += value >= size;
    }
    held = left_over;
  }
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
