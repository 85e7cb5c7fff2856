// One SIMD level: compiled several times with different flags, each time in the namespace that
// CPSGD_LEVEL names.
#include "kernels.h"

#include "accounting.h"
#include "blur.h"
#include "coins.h"
#include "inversion.h"
#include "lineage.h"
#include "modular.h"
#include "norms.h"
#include "packing.h"
#include "permutation.h"
#include "rotation.h"
#include "sampling.h"
#include "stages.h"

namespace cpsgd {
namespace CPSGD_LEVEL {

// Values from `start` on of a block of n, from the block's keystream: n words, then planes of n
// words of coins or n pairs of 64-bit words.
static void noisy_values(const float* y, const std::uint32_t* words, const Lattice& lattice,
                         const Noise& noise, std::size_t start, std::size_t count, std::size_t n,
                         std::uint32_t* values) {
  if (noise.table.count == 0) {
    const std::uint32_t first = std::min(noise.trials, kCoinsInWord);
    quantize(y + start, words + start, lattice, first, values, count);
    add_planes(words + n + start, n, noise.trials - first, values, count);
  } else {
    quantize(y + start, words + start, lattice, 0, values, count);
    add_inverted(reinterpret_cast<const std::uint8_t*>(words + n + 4 * start), noise.table, values,
                 count);
  }
}

static void round_block(const float* y, const std::uint32_t* words, const Lattice& lattice,
                        const Noise& noise, std::uint32_t* values, std::size_t n) {
  for (std::size_t start = 0; start < n; start += kTile) {
    noisy_values(y, words, lattice, noise, start, std::min(kTile, n - start), n, values + start);
  }
}

static void encode_block(const float* y, const std::uint32_t* words, const Lattice& lattice,
                         const Noise& noise, const Grouping& grouping, std::uint8_t* out,
                         std::size_t n) {
  std::uint32_t values[kTile];
  for_each_tile(n, grouping, [&](std::size_t start, std::size_t count, std::size_t byte) {
    noisy_values(y, words, lattice, noise, start, count, n, values);
    pack_tile(values, count, grouping, out + byte);
  });
}

static void flip_block(const float* y, const std::uint16_t* words, const Coins& coins,
                       std::uint32_t* values, std::size_t n) {
  for (std::size_t start = 0; start < n; start += kTile) {
    count_heads(y + start, words + start, n, coins, values + start, std::min(kTile, n - start));
  }
}

static void encode_flips(const float* y, const std::uint16_t* words, const Coins& coins,
                         const Grouping& grouping, std::uint8_t* out, std::size_t n) {
  if (coins.count == 1 && grouping.radix == 2) {
    return pack_heads(y, words, coins, out, n);
  }
  std::uint32_t values[kTile];
  for_each_tile(n, grouping, [&](std::size_t start, std::size_t count, std::size_t byte) {
    count_heads(y + start, words + start, n, coins, values, count);
    pack_tile(values, count, grouping, out + byte);
  });
}

static void blur_block(const float* y, const std::uint8_t* bytes, const Blur& parameters,
                       std::uint32_t* values, std::size_t n) {
  for (std::size_t start = 0; start < n; start += kTile) {
    blur(y + start, bytes + 16 * start, bytes + 16 * n + start, n, parameters, values + start,
         std::min(kTile, n - start));
  }
}

static void encode_blurred(const float* y, const std::uint8_t* bytes, const Blur& parameters,
                           const Grouping& grouping, std::uint8_t* out, std::size_t n) {
  std::uint32_t values[kTile];
  for_each_tile(n, grouping, [&](std::size_t start, std::size_t count, std::size_t byte) {
    blur(y + start, bytes + 16 * start, bytes + 16 * n + start, n, parameters, values, count);
    pack_tile(values, count, grouping, out + byte);
  });
}

static void pack(const std::uint32_t* values, const Grouping& grouping, std::uint8_t* out,
                 std::size_t n) {
  for_each_tile(n, grouping, [&](std::size_t start, std::size_t count, std::size_t byte) {
    pack_tile(values + start, count, grouping, out + byte);
  });
}

static void unpack(const std::uint8_t* bytes, const Grouping& grouping, std::uint32_t* values,
                   std::size_t n) {
  for_each_tile(n, grouping, [&](std::size_t start, std::size_t count, std::size_t byte) {
    unpack_tile(bytes + byte, count, grouping, values + start);
  });
}

static std::size_t find_out_of_range(const std::uint8_t* bytes, const Grouping& grouping,
                                     std::uint64_t limit, std::size_t n) {
  std::uint32_t values[kTile];
  std::size_t found = n;
  for_each_tile(n, grouping, [&](std::size_t start, std::size_t count, std::size_t byte) {
    if (found != n) return;
    unpack_tile(bytes + byte, count, grouping, values);
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, values[i]);
    if (largest < limit) return;
    for (std::size_t i = 0; i < count; ++i) {
      if (values[i] >= limit) {
        found = start + i;
        return;
      }
    }
  });
  return found;
}

template <typename Sum>
static void add_packed(const std::uint8_t* bytes, const Grouping& grouping, Sum* sums,
                       std::size_t n) {
  std::uint32_t values[kTile];
  for_each_tile(n, grouping, [&](std::size_t start, std::size_t count, std::size_t byte) {
    unpack_tile(bytes + byte, count, grouping, values);
    for (std::size_t i = 0; i < count; ++i) sums[start + i] += values[i];
  });
}

extern const Kernels kernels = {
    kBlock,
    norm_squared,
    norm_squared,
    grid_norm_squared,
    scale<float>,
    scale<double>,
    rotate_forward<float>,
    rotate_forward<double>,
    rotate_to_grid<float>,
    rotate_to_grid<double>,
    rotate_backward,
    round_block,
    encode_block,
    flip_block,
    encode_flips,
    blur_block,
    encode_blurred,
    add_fine,
    kExpandFine,
    draw_finer,
    noisy_mean,
    saturate,
    pack,
    unpack,
    find_out_of_range,
    add_packed<std::uint32_t>,
    add_packed<std::uint64_t>,
    find_below,
    add_signs<std::uint32_t>,
    add_signs<std::uint64_t>,
    centre<std::uint32_t>,
    centre<std::uint64_t>,
    centre_and_rotate<std::uint32_t>,
    centre_and_rotate<std::uint64_t>,
    cell_masses,
    tilted_sums,
    log_averages,
    chords,
    gaps,
    bessel_ratios,
    permute,
    modular_product,
    modular_gram,
    extension_product,
    extension_powers,
    modular_polynomial,
    modular_sum,
    uniform_elements,
    leave,
};

}  // namespace CPSGD_LEVEL
}  // namespace cpsgd
