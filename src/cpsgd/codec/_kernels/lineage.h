// Noise that follows from the seeds of a lineage: fine Gaussian draws times a weight, added to what
// is there; and rounding at random of grid points with this noise, kept within a window.
#pragma once

#include "blur.h"

namespace cpsgd {
namespace CPSGD_LEVEL {

// total += weight · z for a block of n draws z. A block's bytes are n numbers of 128 bits, then
// planes of n bytes: the uniform numbers of a draw in cells, and those of each refinement.
static void add_fine(const std::uint8_t* bytes, const Fine& fine, std::int64_t weight,
                     std::int64_t* __restrict total, std::size_t n) {
  std::uint16_t sums[kTile];
  std::uint32_t cells[kTile], finer[kTile];
  for (std::size_t start = 0; start < n; start += kTile) {
    const std::size_t count = std::min(kTile, n - start);
    const std::uint8_t* planes = bytes + 16 * n + start;
    for (std::size_t i = 0; i < count; ++i) cells[i] = finer[i] = 0;
    add_inverted(bytes + 16 * start, fine.table, cells, count);
    sum_planes(planes, n, kUniforms, 0, sums, count);
    for (std::size_t i = 0; i < count; ++i) cells[i] = (cells[i] << 8) + sums[i];
    planes += kUniforms * n;
    for (const Refinement& each : fine.refinements) {
      sum_planes(planes, n, each.uniforms, 8 - each.bits, sums, count);
      for (std::size_t i = 0; i < count; ++i) finer[i] = (finer[i] << each.bits) + sums[i];
      planes += each.uniforms * n;
    }
    std::int64_t* __restrict found = total + start;
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t high = static_cast<std::int64_t>(cells[i]) << fine.bits;
      found[i] += weight * (high + static_cast<std::int64_t>(finer[i]) - fine.mean);
    }
  }
}

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
