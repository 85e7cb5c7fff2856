// AES-128 in counter mode, as GCM has it, by instructions for four blocks at a time.
#pragma once

#include "simd.h"

#if defined(__VAES__)
namespace cpsgd {
namespace CPSGD_LEVEL {

class Cipher {
 public:
  explicit Cipher(const std::uint8_t* key) {
    __m128i round = _mm_loadu_si128(reinterpret_cast<const __m128i*>(key));
    keys_[0] = _mm512_broadcast_i32x4(round);
    add_key<1, 0x01>(round);
    add_key<2, 0x02>(round);
    add_key<3, 0x04>(round);
    add_key<4, 0x08>(round);
    add_key<5, 0x10>(round);
    add_key<6, 0x20>(round);
    add_key<7, 0x40>(round);
    add_key<8, 0x80>(round);
    add_key<9, 0x1B>(round);
    add_key<10, 0x36>(round);
  }

  // The blocks of keystream from counter `first` on, four to a register.
  template <std::size_t kCount, typename Register>
  void encrypt(std::uint32_t first, Register* found) const {
    // Counters are the last four bytes of a block, the most significant first.
    const __m512i order = _mm512_broadcast_i32x4(
        _mm_set_epi8(12, 13, 14, 15, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m512i lanes = _mm512_set_epi32(3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0);
    const __m512i steps = _mm512_set1_epi32(4);
    __m512i counters = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<std::int32_t>(first)));
    __m512i states[kCount];
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kCount; ++i) {
      states[i] = _mm512_xor_si512(_mm512_shuffle_epi8(counters, order), keys_[0]);
      counters = _mm512_add_epi32(counters, steps);
    }
#pragma GCC unroll 9
    for (int round = 1; round < 10; ++round) {
#pragma GCC unroll 16
      for (std::size_t i = 0; i < kCount; ++i) {
        states[i] = _mm512_aesenc_epi128(states[i], keys_[round]);
      }
    }
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kCount; ++i) {
      found[i] = (Register)_mm512_aesenclast_epi128(states[i], keys_[10]);
    }
  }

 private:
  template <int kRound, int kConstant>
  void add_key(__m128i& round) {
    const __m128i word =
        _mm_shuffle_epi32(_mm_aeskeygenassist_si128(round, kConstant), _MM_SHUFFLE(3, 3, 3, 3));
    round = _mm_xor_si128(round, _mm_slli_si128(round, 4));
    round = _mm_xor_si128(round, _mm_slli_si128(round, 8));
    round = _mm_xor_si128(round, word);
    keys_[kRound] = _mm512_broadcast_i32x4(round);
  }

  __m512i keys_[11];
};

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
#endif
