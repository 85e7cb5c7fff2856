// Python's view of the kernels that round and draw noise: parameters are fixed once, in a class.
#include <vector>

#include "bindings.h"

namespace cpsgd {
namespace {

Lattice make_lattice(std::uint32_t levels, int fraction_bits) {
  require(levels >= 2 && levels <= (1u << 24) && fraction_bits >= 1 - int(levels % 2) &&
              fraction_bits <= 16 &&
              ((std::uint64_t{levels} - 1) << fraction_bits) < (std::uint64_t{1} << 32),
          "lattice is out of range");
  const std::uint32_t offset = ((levels - 1) << fraction_bits) >> 1;
  return Lattice{static_cast<float>(offset), offset, fraction_bits};
}

// Ascending thresholds in the order of the bisection's steps. A block holds some of one step: their
// least significant bytes (of the first `bytes`), then the next ones. All are complemented, so that
// zero, which fills up a step's last block and is what the kernels find beyond it, stands for the
// largest number there is.
std::vector<std::uint8_t> arrange_in_blocks(const std::uint64_t* high, const std::uint64_t* low,
                                            std::size_t count, std::size_t first_step,
                                            std::size_t bytes = 16) {
  const std::size_t size = kernels().block;
  std::vector<std::uint8_t> blocks;
  for (std::size_t step = first_step; step != 0; step /= 2) {
    const std::size_t start = blocks.size();
    blocks.resize(start + bytes * size * blocks_of_step(count, step, size));
    for (std::size_t i = 0; i < thresholds_of_step(count, step); ++i) {
      const std::size_t threshold = (2 * i + 1) * step - 1;
      for (std::size_t byte = 0; byte < bytes; ++byte) {
        const std::size_t place = 16 - bytes + byte;
        const std::uint64_t half = place < 8 ? low[threshold] : high[threshold];
        blocks[start + bytes * size * (i / size) + size * byte + i % size] =
            static_cast<std::uint8_t>(~half >> (8 * (place % 8)));
      }
    }
  }
  return blocks;
}

// The largest power of two that is at most count; 0 for none.
std::size_t first_step(std::size_t count) {
  std::size_t step = count == 0 ? 0 : 1;
  while (step != 0 && 2 * step <= count) step *= 2;
  return step;
}

// Rounding, noise and (given a grouping) packing with fixed parameters.
class Rounder {
 public:
  Rounder(std::uint32_t levels, int fraction_bits, std::uint32_t trials,
          const Input<std::uint64_t>& high, const Input<std::uint64_t>& low, std::uint32_t base)
      : levels_(levels), lattice_(make_lattice(levels, fraction_bits)) {
    const std::size_t count = high.shape(0);
    require(count == low.shape(0), "threshold halves differ in length");
    require(count <= kMostThresholds, "too many thresholds");
    require(count != 0 || trials <= 4096, "too many coins: use thresholds");
    require(count == 0 || std::uint64_t{base} + count <= trials,
            "thresholds reach beyond the number of trials");
    const std::size_t step = first_step(count);
    blocks_ = arrange_in_blocks(aligned(high), aligned(low), count, step);
    noise_ = Noise{trials, {blocks_.data(), count, step, base}};
  }
  Rounder(const Rounder&) = delete;

  void values(const Input<float>& grid, const Input<std::uint8_t>& keystream,
              Array<std::uint32_t> values) const {
    require(values.shape(0) == grid.shape(0), "values has another length than the vector");
    const std::uint32_t* words = block_words(keystream, grid.shape(0));
    unlocked([&] {
      kernels().round_block(aligned(grid), words, lattice_, noise_, aligned(values), grid.shape(0));
    });
  }

  void packed(const Input<float>& grid, const Input<std::uint8_t>& keystream, std::uint64_t radix,
              std::size_t digits, int bits, int last_bits, Array<std::uint8_t> out) const {
    const Grouping grouping = make_grouping(radix, digits, bits, last_bits);
    require(out.shape(0) == packed_bytes(grid.shape(0), grouping), "out has the wrong length");
    require(std::uint64_t{levels_} + noise_.trials <= radix,
            "the radix is too small for the values");
    const std::uint32_t* words = block_words(keystream, grid.shape(0));
    unlocked([&] {
      kernels().encode_block(aligned(grid), words, lattice_, noise_, grouping, aligned(out),
                             grid.shape(0));
    });
  }

 private:
  // The keystream of a block as 32-bit words, checked for length and alignment.
  const std::uint32_t* block_words(const Input<std::uint8_t>& keystream, std::size_t n) const {
    const std::size_t planes = noise_.trials <= 16 ? 0 : (noise_.trials - 16 + 31) / 32;
    const std::size_t words = noise_.table.count != 0 ? 5 : 1 + planes;
    require(keystream.shape(0) >= 4 * words * n, "keystream is too short for the block");
    require(reinterpret_cast<std::uintptr_t>(keystream.data()) % 4 == 0,
            "keystream is not aligned to 4 bytes");
    return reinterpret_cast<const std::uint32_t*>(keystream.data());
  }

  std::uint32_t levels_;
  Lattice lattice_;
  std::vector<std::uint8_t> blocks_;
  Noise noise_;
};

// Biased coins and (given a grouping) packing of their heads, with fixed parameters.
class Flipper {
 public:
  Flipper(std::uint32_t limit, std::uint32_t coins) : coins_{static_cast<float>(limit), coins} {
    require(limit >= 1 && limit <= (1u << 15), "limit is out of range");
    require(coins >= 1 && coins <= 4096, "the number of coins is out of range");
  }

  void values(const Input<float>& grid, const Input<std::uint8_t>& keystream,
              Array<std::uint32_t> values) const {
    require(values.shape(0) == grid.shape(0), "values has another length than the vector");
    const std::uint16_t* words = block_words(keystream, grid.shape(0));
    unlocked([&] {
      kernels().flip_block(aligned(grid), words, coins_, aligned(values), grid.shape(0));
    });
  }

  void packed(const Input<float>& grid, const Input<std::uint8_t>& keystream, std::uint64_t radix,
              std::size_t digits, int bits, int last_bits, Array<std::uint8_t> out) const {
    const Grouping grouping = make_grouping(radix, digits, bits, last_bits);
    require(out.shape(0) == packed_bytes(grid.shape(0), grouping), "out has the wrong length");
    require(coins_.count < radix, "the radix is too small for the values");
    const std::uint16_t* words = block_words(keystream, grid.shape(0));
    unlocked([&] {
      kernels().encode_flips(aligned(grid), words, coins_, grouping, aligned(out), grid.shape(0));
    });
  }

 private:
  // The keystream of a block as 16-bit words, checked for length and alignment.
  const std::uint16_t* block_words(const Input<std::uint8_t>& keystream, std::size_t n) const {
    require(keystream.shape(0) / coins_.count / 2 >= n, "keystream is too short for the block");
    require(reinterpret_cast<std::uintptr_t>(keystream.data()) % 2 == 0,
            "keystream is not aligned to 2 bytes");
    return reinterpret_cast<const std::uint16_t*>(keystream.data());
  }

  Coins coins_;
};

// Gaussian noise, rounding and (given a grouping) packing with fixed parameters.
class GaussianRounder {
 public:
  GaussianRounder(std::uint32_t limit, std::uint32_t window, int fraction_bits,
                  const Input<std::uint64_t>& high, const Input<std::uint64_t>& low) {
    const std::size_t count = high.shape(0);
    require(count == low.shape(0), "threshold halves differ in length");
    require(count >= 2 && count % 2 == 0 && count <= (1u << 12), "thresholds are out of range");
    require(limit >= 1 && limit <= (1u << 24), "limit is out of range");
    require(fraction_bits >= 0 && fraction_bits <= 16 && window >= 2 &&
                (std::uint64_t{window} << fraction_bits) <= (1u << 30),
            "the window is out of range");
    const std::size_t step = first_step(count);
    blocks_ = arrange_in_blocks(aligned(high), aligned(low), count, step);
    const std::int64_t mean = 256 * static_cast<std::int64_t>(count / 2) + kUniforms * 255 / 2;
    const std::int64_t half = (static_cast<std::int64_t>(window) << fraction_bits) >> 1;
    blur_ = Blur{static_cast<float>(limit),
                 static_cast<std::int32_t>(half - mean),
                 static_cast<std::int32_t>(window - 1),
                 fraction_bits,
                 {blocks_.data(), count, step, 0}};
  }
  GaussianRounder(const GaussianRounder&) = delete;

  void values(const Input<float>& grid, const Input<std::uint8_t>& keystream,
              Array<std::uint32_t> values) const {
    require(values.shape(0) == grid.shape(0), "values has another length than the vector");
    check_length(keystream, grid.shape(0));
    unlocked([&] {
      kernels().blur_block(aligned(grid), keystream.data(), blur_, aligned(values), grid.shape(0));
    });
  }

  void packed(const Input<float>& grid, const Input<std::uint8_t>& keystream, std::uint64_t radix,
              std::size_t digits, int bits, int last_bits, Array<std::uint8_t> out) const {
    const Grouping grouping = make_grouping(radix, digits, bits, last_bits);
    require(out.shape(0) == packed_bytes(grid.shape(0), grouping), "out has the wrong length");
    require(static_cast<std::uint64_t>(blur_.last) < radix,
            "the radix is too small for the values");
    check_length(keystream, grid.shape(0));
    unlocked([&] {
      kernels().encode_blurred(aligned(grid), keystream.data(), blur_, grouping, aligned(out),
                               grid.shape(0));
    });
  }

 private:
  static void check_length(const Input<std::uint8_t>& keystream, std::size_t n) {
    require(keystream.shape(0) / (16 + kUniforms) >= n, "keystream is too short for the block");
  }

  std::vector<std::uint8_t> blocks_;
  Blur blur_;
};

// Fine Gaussian draws with fixed parameters.
class FineGaussian {
 public:
  FineGaussian(const Input<std::uint64_t>& high, const Input<std::uint64_t>& low) {
    const std::size_t count = high.shape(0);
    require(count == low.shape(0), "threshold halves differ in length");
    require(count >= 2 && count < (1u << 11), "thresholds are out of range");
    const std::size_t step = first_step(count);
    blocks_ = arrange_in_blocks(aligned(high), aligned(low), count, step);
    fine_.table = {blocks_.data(), count, step, 0};
    // Of those with the largest prefix, one: their numbers are looked up in any case.
    constexpr std::uint64_t kFirst = ~std::uint64_t{0} << (64 - 8 * kPrefixBytes + 1);
    std::vector<std::uint64_t> first, zero(count);
    for (std::size_t i = 0; i < count && (i == 0 || first.back() < kFirst); ++i) {
      first.push_back(high.data()[i] & kFirst);
    }
    const std::size_t few = first_step(first.size());
    prefixes_ = arrange_in_blocks(first.data(), zero.data(), first.size(), few, kPrefixBytes);
    fine_.prefixes = {prefixes_.data(), first.size(), few, 0};
  }
  FineGaussian(const FineGaussian&) = delete;

  void add(const Input<std::uint8_t>& keystream, std::int64_t weight,
           Array<std::int64_t> total) const {
    const std::size_t n = total.shape(0);
    require(n <= kFineBlock, "the block is too long");
    require(keystream.shape(0) >= fine_bytes(n), "keystream is too short for the block");
    check_weight(weight);
    unlocked([&] { kernels().add_fine(keystream.data(), fine_, weight, aligned(total), n); });
  }

  void expand(const Input<std::uint8_t>& keys, const Input<std::int64_t>& weights,
              Array<std::int64_t> total) const {
    const std::size_t count = weights.shape(0);
    require(ciphers(), "there are no instructions for AES");
    require(keys.shape(0) == 16 * count, "keys and weights differ in length");
    require(total.shape(0) <= (1u << 24), "a key does not last for so many draws");
    for (std::size_t i = 0; i < count; ++i) check_weight(weights.data()[i]);
    unlocked([&] {
      kernels().expand_fine(keys.data(), aligned(weights), count, fine_, aligned(total),
                            total.shape(0));
    });
  }

  static bool ciphers() { return kernels().expand_fine != nullptr; }

 private:
  static void check_weight(std::int64_t weight) {
    require(weight >= -(1 << 14) && weight <= (1 << 14), "the weight is out of range");
  }

  std::vector<std::uint8_t> blocks_, prefixes_;
  Fine fine_{};
};

// Gaussian draws on a grid 2^9 times finer than those of a table.
class FinerGaussian {
 public:
  FinerGaussian(const Input<std::uint64_t>& high, const Input<std::uint64_t>& low) {
    const std::size_t count = high.shape(0);
    require(count == low.shape(0), "threshold halves differ in length");
    require(count >= 2 && count % 2 == 0 && count <= (1u << 12), "thresholds are out of range");
    const std::size_t step = first_step(count);
    blocks_ = arrange_in_blocks(aligned(high), aligned(low), count, step);
    table_ = {blocks_.data(), count, step, 0};
  }
  FinerGaussian(const FinerGaussian&) = delete;

  void draw(const Input<std::uint8_t>& keystream, Array<std::int32_t> out) const {
    require(keystream.shape(0) / (16 + kUniforms + kFinerBytes + 1) >= out.shape(0),
            "keystream is too short for the block");
    unlocked([&] { kernels().draw_finer(keystream.data(), table_, aligned(out), out.shape(0)); });
  }

 private:
  std::vector<std::uint8_t> blocks_;
  Thresholds table_;
};

}  // namespace

void bind_samplers(nb::module_& m) {
  nb::class_<Rounder>(m, "Rounder")
      .def(nb::init<std::uint32_t, int, std::uint32_t, Input<std::uint64_t>, Input<std::uint64_t>,
                    std::uint32_t>(),
           nb::arg("levels"), nb::arg("fraction_bits"), nb::arg("trials"),
           nb::arg("high").noconvert(), nb::arg("low").noconvert(), nb::arg("base"))
      .def("values", &Rounder::values, nb::arg("grid").noconvert(),
           nb::arg("keystream").noconvert(), nb::arg("values").noconvert())
      .def("packed", &Rounder::packed, nb::arg("grid").noconvert(),
           nb::arg("keystream").noconvert(), nb::arg("radix"), nb::arg("digits"), nb::arg("bits"),
           nb::arg("last_bits"), nb::arg("out").noconvert());

  nb::class_<Flipper>(m, "Flipper")
      .def(nb::init<std::uint32_t, std::uint32_t>(), nb::arg("limit"), nb::arg("coins"))
      .def("values", &Flipper::values, nb::arg("grid").noconvert(),
           nb::arg("keystream").noconvert(), nb::arg("values").noconvert())
      .def("packed", &Flipper::packed, nb::arg("grid").noconvert(),
           nb::arg("keystream").noconvert(), nb::arg("radix"), nb::arg("digits"), nb::arg("bits"),
           nb::arg("last_bits"), nb::arg("out").noconvert());

  nb::class_<GaussianRounder>(m, "GaussianRounder")
      .def(nb::init<std::uint32_t, std::uint32_t, int, const Input<std::uint64_t>&,
                    const Input<std::uint64_t>&>(),
           nb::arg("limit"), nb::arg("window"), nb::arg("fraction_bits"),
           nb::arg("high").noconvert(), nb::arg("low").noconvert())
      .def("values", &GaussianRounder::values, nb::arg("grid").noconvert(),
           nb::arg("keystream").noconvert(), nb::arg("values").noconvert())
      .def("packed", &GaussianRounder::packed, nb::arg("grid").noconvert(),
           nb::arg("keystream").noconvert(), nb::arg("radix"), nb::arg("digits"), nb::arg("bits"),
           nb::arg("last_bits"), nb::arg("out").noconvert());

  nb::class_<FineGaussian>(m, "FineGaussian")
      .def(nb::init<const Input<std::uint64_t>&, const Input<std::uint64_t>&>(),
           nb::arg("high").noconvert(), nb::arg("low").noconvert())
      .def_static("ciphers", &FineGaussian::ciphers)
      .def("add", &FineGaussian::add, nb::arg("keystream").noconvert(), nb::arg("weight"),
           nb::arg("total").noconvert())
      .def("expand", &FineGaussian::expand, nb::arg("keys").noconvert(),
           nb::arg("weights").noconvert(), nb::arg("total").noconvert());

  nb::class_<FinerGaussian>(m, "FinerGaussian")
      .def(nb::init<const Input<std::uint64_t>&, const Input<std::uint64_t>&>(),
           nb::arg("high").noconvert(), nb::arg("low").noconvert())
      .def("draw", &FinerGaussian::draw, nb::arg("keystream").noconvert(),
           nb::arg("out").noconvert());

  m.def(
      "noisy_mean",
      [](Input<double> sums, Input<std::int32_t> noise, double step, double divisor, double most,
         Array<float> out) {
        const std::size_t n = sums.shape(0);
        require(noise.shape(0) == n && out.shape(0) == n,
                "noise or out have another length than the sums");
        require(most > 0.0 && most <= 4503599627370496.0, "sums are out of range");
        unlocked([&] {
          kernels().noisy_mean(aligned(sums), aligned(noise), step, divisor, most, aligned(out), n);
        });
      },
      nb::arg("sums").noconvert(), nb::arg("noise").noconvert(), nb::arg("step"),
      nb::arg("divisor"), nb::arg("most"), nb::arg("out").noconvert());
  m.def(
      "saturate",
      [](const Input<float>& grid, const Input<std::uint8_t>& keystream,
         const Input<std::int64_t>& noise, std::uint32_t limit, std::uint32_t window, int grid_bits,
         int fraction_bits, Array<std::uint32_t> values) {
        const std::size_t n = grid.shape(0);
        require(limit >= 1 && limit <= (1u << 24), "limit is out of range");
        require(grid_bits >= 0 && grid_bits <= fraction_bits && fraction_bits >= 1 &&
                    fraction_bits <= 62 && window >= 2 &&
                    window <= (std::uint64_t{1} << (64 - fraction_bits)),
                "the window is out of range");
        require(keystream.shape(0) / 8 >= n, "keystream is too short for the block");
        require(noise.shape(0) == n && values.shape(0) == n,
                "noise or values have another length than the vector");
        const std::int64_t last = static_cast<std::int64_t>(window) - 1;
        // An even number of levels has its middle between two of them.
        const Saturation how{static_cast<float>(limit),
                             std::int64_t{1} << (fraction_bits - grid_bits),
                             last << (fraction_bits - 1), last, fraction_bits};
        unlocked([&] {
          kernels().saturate(aligned(grid), keystream.data(), aligned(noise), how, aligned(values),
                             n);
        });
      },
      nb::arg("grid").noconvert(), nb::arg("keystream").noconvert(), nb::arg("noise").noconvert(),
      nb::arg("limit"), nb::arg("window"), nb::arg("grid_bits"), nb::arg("fraction_bits"),
      nb::arg("values").noconvert());
}

}  // namespace cpsgd
