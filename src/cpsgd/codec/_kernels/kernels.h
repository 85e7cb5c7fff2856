// What every SIMD level offers: one table of functions, filled in level.cpp, chosen in module.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cpsgd {

// The lattice that coordinates are rounded to, in grid units: 2^fraction_bits between two levels.
struct Lattice {
  float limit;           // (k - 1) / 2 levels, in grid units
  std::uint32_t offset;  // the same, as an integer: moves [-limit, limit] to [0, 2 limit]
  int fraction_bits;
};

// How digits below `radix` become words: `digits` of them in `bits` bits; what remains at the
// end in `last_bits`.
struct Grouping {
  std::uint64_t radix;
  std::size_t digits;
  int bits;
  int last_bits;
};

// Cumulative probabilities times 2^128; the outcome is base + how many of them a uniform number
// reaches. A bisection in steps of first_step, half of it, ... 1 finds that.
struct Thresholds {
  const std::uint8_t* blocks;  // one step's thresholds after another's, see arrange_in_blocks
  std::size_t count;
  std::size_t first_step;  // the largest power of two that is at most count
  std::uint32_t base;
};

constexpr std::size_t kMostThresholds = (1u << 20) - 1;

// A step compares with the thresholds at step, 3 step, 5 step, ... counted from 1.
constexpr std::size_t thresholds_of_step(std::size_t count, std::size_t step) {
  return (count / step + 1) / 2;
}
constexpr std::size_t blocks_of_step(std::size_t count, std::size_t step, std::size_t block) {
  return (thresholds_of_step(count, step) + block - 1) / block;
}

// How the noise is drawn: thresholds, or coins where `table.count` is zero.
struct Noise {
  std::uint32_t trials;
  Thresholds table;
};

// Biased coins for grid points within ±limit: so many per coordinate.
struct Coins {
  float limit;
  std::uint32_t count;
};

// Gaussian noise for grid points within ±limit, rounded to the levels 0, ..., last.
struct Blur {
  float limit;
  std::int32_t offset;  // half of the window, less the means of H and of the uniform bytes
  std::int32_t last;
  int fraction_bits;
  Thresholds table;
};

constexpr std::size_t kUniforms = 28;
constexpr std::size_t kFinerBytes = 10;

// Fine Gaussian draws. |H| is how many thresholds a uniform number reaches, whose first bytes
// nearly always tell; `prefixes` are the thresholds' first 23 bits.
struct Fine {
  Thresholds prefixes;
  Thresholds table;
};

// Bytes of a draw: the first ones of its number, the last of which has the sign in its lowest bit;
// then uniform bytes for each refinement by eight bits.
constexpr std::size_t kPrefixBytes = 3;
constexpr std::size_t kRefinements[] = {15, 8, 5, 4};
constexpr std::size_t kDrawBytes = kPrefixBytes + 15 + 8 + 5 + 4;
// Draws of a block, and the numbers in it whose other bytes are there.
constexpr std::size_t kFineBlock = 4096;
constexpr std::size_t kRests = 64;
// Planes of bytes have a multiple of so many.
constexpr std::size_t kGroup = 64;
constexpr std::size_t fine_bytes(std::size_t n) {
  return 16 * kRests + kDrawBytes * ((n + kGroup - 1) / kGroup * kGroup);
}

// Rounding at random of grid points within ±limit, `unit` points of the noise's grid each, to the
// levels 0, ..., last.
struct Saturation {
  float limit;
  std::int64_t unit;
  std::int64_t centre;
  std::int64_t last;
  int fraction_bits;
};

struct Kernels {
  std::size_t block;  // thresholds whose bytes of one significance lie together, see inversion.h
  double (*norm_squared_float)(const float*, std::size_t);
  double (*norm_squared_double)(const double*, std::size_t);
  double (*grid_norm_squared)(const float*, std::size_t, float limit);
  void (*scale_float)(const float*, double factor, float* out, std::size_t);
  void (*scale_double)(const double*, double factor, float* out, std::size_t);
  void (*rotate_forward_float)(const float*, double factor, const std::uint8_t* signs, float* out,
                               std::size_t);
  void (*rotate_forward_double)(const double*, double factor, const std::uint8_t* signs, float* out,
                                std::size_t);
  // The same, and the squared norm of the grid point nearest to the result.
  double (*rotate_to_grid_float)(const float*, double factor, const std::uint8_t* signs,
                                 float limit, float* out, std::size_t);
  double (*rotate_to_grid_double)(const double*, double factor, const std::uint8_t* signs,
                                  float limit, float* out, std::size_t);
  void (*rotate_backward)(float*, const std::uint8_t* signs, std::size_t);
  // Rounding and noise: values of a block of grid points, from its keystream.
  void (*round_block)(const float*, const std::uint32_t* words, const Lattice&, const Noise&,
                      std::uint32_t* values, std::size_t);
  void (*encode_block)(const float*, const std::uint32_t* words, const Lattice&, const Noise&,
                       const Grouping&, std::uint8_t* out, std::size_t);
  // The same with coins: their number of heads.
  void (*flip_block)(const float*, const std::uint16_t* words, const Coins&, std::uint32_t* values,
                     std::size_t);
  void (*encode_flips)(const float*, const std::uint16_t* words, const Coins&, const Grouping&,
                       std::uint8_t* out, std::size_t);
  // The same with Gaussian noise before the rounding.
  void (*blur_block)(const float*, const std::uint8_t* bytes, const Blur&, std::uint32_t* values,
                     std::size_t);
  void (*encode_blurred)(const float*, const std::uint8_t* bytes, const Blur&, const Grouping&,
                         std::uint8_t* out, std::size_t);
  // Noise of a lineage, and rounding at random with that noise.
  void (*add_fine)(const std::uint8_t* bytes, const Fine&, std::int64_t weight, std::int64_t* total,
                   std::size_t);
  // The same for as many keys and weights, from keystreams of AES-128-GCM; null where there are no
  // instructions for it.
  void (*expand_fine)(const std::uint8_t* keys, const std::int64_t* weights, std::size_t count,
                      const Fine&, std::int64_t* total, std::size_t);
  // Noise of a sum on one machine.
  void (*draw_finer)(const std::uint8_t* bytes, const Thresholds&, std::int32_t* out, std::size_t);
  void (*noisy_mean)(const double* sums, const std::int32_t* noise, double step, double divisor,
                     double most, float* out, std::size_t);
  void (*saturate)(const float*, const std::uint8_t* coins, const std::int64_t* noise,
                   const Saturation&, std::uint32_t* values, std::size_t);
  void (*pack)(const std::uint32_t* values, const Grouping&, std::uint8_t* out, std::size_t);
  void (*unpack)(const std::uint8_t*, const Grouping&, std::uint32_t* values, std::size_t);
  // Position of the first value that is not below `limit`, or n.
  std::size_t (*find_out_of_range)(const std::uint8_t*, const Grouping&, std::uint64_t limit,
                                   std::size_t);
  void (*add_packed_32)(const std::uint8_t*, const Grouping&, std::uint32_t* sums, std::size_t);
  void (*add_packed_64)(const std::uint8_t*, const Grouping&, std::uint64_t* sums, std::size_t);
  // Messages that hold some of the coordinates.
  std::size_t (*find_below)(const std::uint16_t* words, std::uint16_t bound, std::uint32_t first,
                            std::uint32_t* positions, std::size_t);
  void (*add_signs_32)(const std::uint8_t* bits, const std::uint32_t* positions, std::size_t count,
                       std::uint32_t* sums, std::size_t);
  void (*add_signs_64)(const std::uint8_t* bits, const std::uint32_t* positions, std::size_t count,
                       std::uint64_t* sums, std::size_t);
  // Decoding: (sums - middle) · factor, as it is or rotated back.
  void (*centre_32)(const std::uint32_t* sums, double middle, double factor, float* out,
                    std::size_t);
  void (*centre_64)(const std::uint64_t* sums, double middle, double factor, float* out,
                    std::size_t);
  void (*centre_and_rotate_32)(const std::uint32_t* sums, double middle, double factor,
                               const std::uint8_t* signs, float* out, std::size_t);
  void (*centre_and_rotate_64)(const std::uint64_t* sums, double middle, double factor,
                               const std::uint8_t* signs, float* out, std::size_t);
  // Accounting: see the NumPy twin.
  double (*cell_masses)(const double* x, const double* e, double w, double bent, double* mass,
                        std::size_t curves, std::size_t points);
  void (*tilted_sums)(const double* mass, const double* x, double step, double* sums,
                      std::size_t curves, std::size_t points, std::size_t half);
  void (*log_averages)(double w, const double* widths, const double* y0, const double* y1,
                       std::size_t parts, double* value, double* bend, std::size_t rows,
                       std::size_t cells);
  void (*chords)(const double* t, const double* values, const double* c, double* moments,
                 double* largest, std::size_t rows, std::size_t cells);
  void (*gaps)(double w, double rate, double narrow, const double* t, const double* average,
               const double* bend, const double* smallest, const double* largest,
               const double* moments, const double* c0, const double* c1, double* found,
               std::size_t rows, std::size_t cells);
  void (*bessel_ratios)(double variance, std::size_t start, double ratio, double error,
                        double* ratios, double* errors, std::size_t count);
  // Cohorts: see the NumPy twin.
  void (*permute)(const std::int64_t* numbers, std::uint64_t size, int half,
                  const std::uint64_t* keys, std::size_t rounds, std::int64_t* found,
                  std::size_t n);
  // Sums of two servers: see the NumPy twin.
  void (*modular_product)(const std::uint32_t* a, const std::uint32_t* b, std::uint32_t prime,
                          std::uint32_t* out, std::size_t rows, std::size_t inner,
                          std::size_t columns);
  void (*modular_gram)(const std::uint32_t* a, const std::uint32_t* b, std::uint32_t prime,
                       std::uint32_t* sums, std::size_t inner, std::size_t rows,
                       std::size_t columns);
  void (*extension_product)(const std::uint32_t* a, const std::uint32_t* b,
                            const std::uint32_t* powers, std::uint32_t prime, std::uint32_t* out,
                            std::size_t count, std::size_t degree, bool one);
  void (*extension_powers)(const std::uint32_t* t, const std::uint32_t* powers, std::uint32_t prime,
                           std::uint32_t* out, std::size_t count, std::size_t degree);
  void (*modular_polynomial)(const std::uint32_t* x, const std::uint32_t* coefficients,
                             std::size_t size, std::uint32_t prime, std::uint32_t* out,
                             std::size_t n);
  void (*modular_sum)(const std::uint32_t* a, const std::uint32_t* b, bool minus,
                      std::uint32_t prime, std::uint32_t* out, std::size_t n);
  std::size_t (*uniform_elements)(const std::uint32_t* words, std::uint32_t prime,
                                  std::uint32_t* out, std::size_t n, std::size_t most);
  void (*leave)();  // to be called after any of the others
};

namespace baseline { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }

}  // namespace cpsgd
