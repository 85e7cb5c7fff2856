// A finely resolved Gaussian, then rounding to the nearest level: noise is 2^8 H + U_1 + ... + U_28
// less its mean, H by inversion (inversion.h) and the U single bytes of keystream.
#pragma once

#include "inversion.h"
#include "packing.h"
#include "stages.h"

namespace cpsgd {
namespace CPSGD_LEVEL {

// Sums of n uniform numbers from planes of bytes `stride` apart, of which the lowest bits are
// dropped.
static void sum_planes(const std::uint8_t* __restrict planes, std::size_t stride, std::size_t count,
                       int dropped, std::uint16_t* __restrict sums, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) sums[i] = 0;
  for (std::size_t plane = 0; plane < count; ++plane, planes += stride) {
    for (std::size_t i = 0; i < n; ++i) {
      sums[i] = static_cast<std::uint16_t>(sums[i] + (planes[i] >> dropped));
    }
  }
}

// values = floor((v + noise + window/2 levels) / 2^fraction_bits), kept within the window, for up
// to kTile grid points. The 128-bit numbers of a block come first, `planes` of bytes `stride`
// apart.
static void blur(const float* __restrict y, const std::uint8_t* draws,
                 const std::uint8_t* __restrict planes, std::size_t stride, const Blur& blur,
                 std::uint32_t* __restrict values, std::size_t n) {
  std::uint16_t sums[kTile];
  sum_planes(planes, stride, kUniforms, 0, sums, n);
  for (std::size_t i = 0; i < n; ++i) values[i] = 0;
  add_inverted(draws, blur.table, values, n);
  const float limit = blur.limit;
  const std::int32_t offset = blur.offset, last = blur.last;
  const int fraction = blur.fraction_bits;
  for (std::size_t i = 0; i < n; ++i) {
    const std::int32_t point = static_cast<std::int32_t>(std::rint(clamp(y[i], limit)));
    const std::int32_t noisy = point + static_cast<std::int32_t>(values[i] << 8) + sums[i] + offset;
    const std::int32_t level = noisy >> fraction;
    const std::int32_t within = level < 0 ? 0 : level;
    values[i] = static_cast<std::uint32_t>(within > last ? last : within);
  }
}

// Draws on a grid 2^9 times finer than blur's noise Z: 2^9 Z + 2 (V_1 + ... + V_10) + W_1 + ... +
// W_8, less its mean, V single bytes and W the bits of one. A block's 128-bit numbers come first,
// then planes of n bytes.
static void draw_finer(const std::uint8_t* bytes, const Thresholds& table,
                       std::int32_t* __restrict out, std::size_t n) {
  std::uint16_t sums[kTile], finer[kTile];
  std::uint32_t cells[kTile];
  const std::uint32_t coarse_mean =
      256 * static_cast<std::uint32_t>(table.count / 2) + kUniforms * 255 / 2;
  const std::uint32_t mean = (coarse_mean << 9) + kFinerBytes * 255 + 4;
  for (std::size_t start = 0; start < n; start += kTile) {
    const std::size_t count = std::min(kTile, n - start);
    const std::uint8_t* planes = bytes + 16 * n + start;
    sum_planes(planes, n, kUniforms, 0, sums, count);
    sum_planes(planes + kUniforms * n, n, kFinerBytes, 0, finer, count);
    const std::uint8_t* __restrict coins = planes + (kUniforms + kFinerBytes) * n;
    for (std::size_t i = 0; i < count; ++i) cells[i] = 0;
    add_inverted(bytes + 16 * start, table, cells, count);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t coarse = (cells[i] << 8) + sums[i];
      const std::uint32_t fine = 2u * finer[i] + count_ones<std::uint32_t>(coins[i]);
      out[start + i] = static_cast<std::int32_t>((coarse << 9) + fine - mean);
    }
  }
}

// Sums, rounded to multiples of `step` of which there are at most `most`, with noise, over a
// divisor; what is not a number counts as zero.
static void noisy_mean(const double* __restrict sums, const std::int32_t* __restrict noise,
                       double step, double divisor, double most, float* __restrict out,
                       std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    double point = sums[i] / step;
    point = point == point ? point : 0.0;
    point = point < -most ? -most : point;
    point = point > most ? most : point;
    out[i] = static_cast<float>((std::rint(point) + noise[i]) * step / divisor);
  }
}

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
