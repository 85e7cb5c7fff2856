// Python's view of the kernels: checks every size, releases the interpreter lock, chooses the
// SIMD level once.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "checksum.h"
#include "kernels.h"

namespace nb = nanobind;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "messages and keystream are read as little-endian words");

namespace {

using cpsgd::Blur;
using cpsgd::Coins;
using cpsgd::Grouping;
using cpsgd::Kernels;
using cpsgd::Lattice;
using cpsgd::Noise;

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Input = Array<const T>;
template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

struct Level {
  const char* name;
  const Kernels* kernels;
};

bool supported(const std::string& name) {
#if defined(CPSGD_X86)
  __builtin_cpu_init();
  if (name == "avx2") {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi2");
  }
  if (name == "avx512") {
    return supported("avx2") && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd") &&
           __builtin_cpu_supports("avx512vpopcntdq");
  }
#endif
  return name == "baseline";
}

Level choose_level() {
  const Level levels[] = {
#if defined(CPSGD_X86)
      {"avx512", &cpsgd::avx512::kernels},
      {"avx2", &cpsgd::avx2::kernels},
#endif
      {"baseline", &cpsgd::baseline::kernels},
  };
  const char* requested = std::getenv("CPSGD_SIMD");
  for (const Level& level : levels) {
    if ((requested == nullptr || *requested == '\0' || level.name == std::string(requested)) &&
        supported(level.name)) {
      return level;
    }
  }
  throw std::runtime_error(
      "CPSGD_SIMD=" + std::string(requested) +
      " is not a level this processor has; use baseline, avx2 or avx512, or unset it");
}

const Level& level() {
  static const Level chosen = choose_level();
  return chosen;
}

const Kernels& kernels() { return *level().kernels; }

void require(bool condition, const char* message) {
  if (!condition) throw nb::value_error(message);
}

// The data of an array, which must be aligned for its type.
template <typename Any>
auto* aligned(const Any& array) {
  auto* data = array.data();
  require(reinterpret_cast<std::uintptr_t>(data) %
                  alignof(std::remove_cv_t<std::remove_pointer_t<decltype(data)>>) ==
              0,
          "array is not aligned");
  return data;
}

template <typename Any>
bool same_shape(const Any& matrix, std::size_t rows, std::size_t columns) {
  return matrix.shape(0) == rows && matrix.shape(1) == columns;
}

// Runs `body` without the interpreter lock and leaves the processor's registers as other code
// likes them.
template <typename Body>
auto unlocked(const Body& body) {
  struct Leave {
    ~Leave() { kernels().leave(); }
  };
  nb::gil_scoped_release release;
  const Leave leave;
  return body();
}

std::size_t packed_bytes(std::size_t n, const Grouping& grouping) {
  // Beyond this the number of bits might not fit its type.
  require(n <= (std::size_t{1} << 40), "the number of values is out of range");
  const std::size_t groups = n / grouping.digits;
  return (groups * grouping.bits + (n % grouping.digits ? grouping.last_bits : 0) + 7) / 8;
}

std::size_t sign_bytes(std::size_t n) {
  require(n >= 1 && n <= (std::size_t{1} << 40), "the number of coordinates is out of range");
  std::size_t size = 1;
  while (size * 2 <= n) size *= 2;
  const std::size_t rounded = (size + 15) / 16 * 16;
  return (size == n ? rounded : 2 * rounded) / 8;
}

Grouping make_grouping(std::uint64_t radix, std::size_t digits, int bits, int last_bits) {
  require(radix >= 2 && radix <= 0xFFFFFFFFu && digits >= 1 && digits <= 64 && bits >= 1 &&
              bits <= 64 && last_bits >= 0 && last_bits <= bits && (digits > 1 || bits <= 32),
          "grouping is out of range");
  return Grouping{radix, digits, bits, last_bits};
}

Lattice make_lattice(std::uint32_t levels, int fraction_bits) {
  require(levels >= 2 && levels <= (1u << 24) && fraction_bits >= 1 && fraction_bits <= 16 &&
              ((std::uint64_t{levels} - 1) << fraction_bits) < (std::uint64_t{1} << 32),
          "lattice is out of range");
  const std::uint32_t offset = (levels - 1) << (fraction_bits - 1);
  return Lattice{static_cast<float>(offset), offset, fraction_bits};
}

// Ascending thresholds in the order of the bisection's steps. A block holds sixteen of one step:
// their least significant bytes, then the next ones. All are complemented, so that zero, which
// fills up a step's last block and is what the kernels find beyond it, stands for the largest
// number there is.
std::vector<std::uint8_t> arrange_in_blocks(const std::uint64_t* high, const std::uint64_t* low,
                                            std::size_t count, std::size_t first_step) {
  std::vector<std::uint8_t> blocks;
  for (std::size_t step = first_step; step != 0; step /= 2) {
    const std::size_t start = blocks.size();
    blocks.resize(start + cpsgd::kBlockBytes * cpsgd::blocks_of_step(count, step));
    for (std::size_t i = 0; i < cpsgd::thresholds_of_step(count, step); ++i) {
      const std::size_t threshold = (2 * i + 1) * step - 1;
      for (std::size_t byte = 0; byte < 16; ++byte) {
        const std::uint64_t half = byte < 8 ? low[threshold] : high[threshold];
        blocks[start + cpsgd::kBlockBytes * (i / 16) + 16 * byte + i % 16] =
            static_cast<std::uint8_t>(~half >> (8 * (byte % 8)));
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
    require(count <= cpsgd::kMostThresholds, "too many thresholds");
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
    require(fraction_bits >= 1 && fraction_bits <= 16 && window >= 2 &&
                (std::uint64_t{window} << fraction_bits) <= (1u << 30),
            "the window is out of range");
    const std::size_t step = first_step(count);
    blocks_ = arrange_in_blocks(aligned(high), aligned(low), count, step);
    const std::int64_t mean =
        256 * static_cast<std::int64_t>(count / 2) + cpsgd::kUniforms * 255 / 2;
    const std::int64_t half = static_cast<std::int64_t>(window) << (fraction_bits - 1);
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
    require(keystream.shape(0) / (16 + cpsgd::kUniforms) >= n,
            "keystream is too short for the block");
  }

  std::vector<std::uint8_t> blocks_;
  Blur blur_;
};

template <typename T>
double norm_squared(Input<T> x) {
  const T* data = aligned(x);
  const std::size_t n = x.shape(0);
  return unlocked([=] {
    if constexpr (sizeof(T) == 4) {
      return kernels().norm_squared_float(data, n);
    } else {
      return kernels().norm_squared_double(data, n);
    }
  });
}

template <typename T>
void scale(Input<T> x, double factor, Array<float> out) {
  require(x.shape(0) == out.shape(0), "out has another length than the vector");
  unlocked([&] {
    if constexpr (sizeof(T) == 4) {
      kernels().scale_float(aligned(x), factor, aligned(out), x.shape(0));
    } else {
      kernels().scale_double(aligned(x), factor, aligned(out), x.shape(0));
    }
  });
}

template <typename T>
void rotate_forward(Input<T> x, double factor, Input<std::uint8_t> signs, Array<float> out) {
  require(x.shape(0) == out.shape(0) && x.shape(0) >= 1, "out has another length than the vector");
  require(signs.shape(0) >= sign_bytes(x.shape(0)), "too few signs");
  unlocked([&] {
    if constexpr (sizeof(T) == 4) {
      kernels().rotate_forward_float(aligned(x), factor, aligned(signs), aligned(out), x.shape(0));
    } else {
      kernels().rotate_forward_double(aligned(x), factor, aligned(signs), aligned(out), x.shape(0));
    }
  });
}

template <typename Sum>
void add_packed(Input<std::uint8_t> payload, std::uint64_t radix, std::size_t digits, int bits,
                int last_bits, Array<Sum> sums) {
  const Grouping grouping = make_grouping(radix, digits, bits, last_bits);
  require(payload.shape(0) == packed_bytes(sums.shape(0), grouping),
          "payload has the wrong length");
  unlocked([&] {
    if constexpr (sizeof(Sum) == 4) {
      kernels().add_packed_32(aligned(payload), grouping, aligned(sums), sums.shape(0));
    } else {
      kernels().add_packed_64(aligned(payload), grouping, aligned(sums), sums.shape(0));
    }
  });
}

std::size_t find_below(Input<std::uint8_t> words, std::uint16_t bound, std::uint32_t first,
                       Array<std::uint32_t> positions) {
  require(words.shape(0) % 2 == 0 && positions.shape(0) >= words.shape(0) / 2,
          "positions is too short for the words");
  require(reinterpret_cast<std::uintptr_t>(words.data()) % 2 == 0,
          "words are not aligned to 2 bytes");
  return unlocked([&] {
    return kernels().find_below(reinterpret_cast<const std::uint16_t*>(words.data()), bound, first,
                                aligned(positions), words.shape(0) / 2);
  });
}

template <typename Sum>
void add_signs(Input<std::uint8_t> bits, Input<std::uint32_t> positions, Array<Sum> sums) {
  const std::size_t count = positions.shape(0);
  require(bits.shape(0) == (count + 7) / 8, "bits has the wrong length");
  const std::uint32_t* places = aligned(positions);
  std::uint32_t last = 0;
  for (std::size_t i = 0; i < count; ++i) last = places[i] > last ? places[i] : last;
  require(count == 0 || last < sums.shape(0), "a position is out of range");
  unlocked([&] {
    if constexpr (sizeof(Sum) == 4) {
      kernels().add_signs_32(aligned(bits), places, count, aligned(sums), sums.shape(0));
    } else {
      kernels().add_signs_64(aligned(bits), places, count, aligned(sums), sums.shape(0));
    }
  });
}

template <typename Sum>
void centre(Input<Sum> sums, double middle, double factor, Array<float> out) {
  require(sums.shape(0) == out.shape(0), "out has another length than the sums");
  unlocked([&] {
    if constexpr (sizeof(Sum) == 4) {
      kernels().centre_32(aligned(sums), middle, factor, aligned(out), sums.shape(0));
    } else {
      kernels().centre_64(aligned(sums), middle, factor, aligned(out), sums.shape(0));
    }
  });
}

}  // namespace

NB_MODULE(_native, m) {
  level();  // a wrong CPSGD_SIMD is an error at import, not in the middle of a round

  m.def("simd_level", [] { return std::string(level().name); });
  m.def("supported_levels", [] {
    nb::list names;
    for (const char* name : {"baseline", "avx2", "avx512"}) {
      if (supported(name)) names.append(name);
    }
    return names;
  });

  m.def("norm_squared", &norm_squared<float>, nb::arg("x").noconvert());
  m.def("norm_squared", &norm_squared<double>, nb::arg("x").noconvert());
  m.def(
      "grid_norm_squared",
      [](Input<float> y, double limit) {
        return unlocked([&] {
          return kernels().grid_norm_squared(aligned(y), y.shape(0), static_cast<float>(limit));
        });
      },
      nb::arg("y").noconvert(), nb::arg("limit"));
  m.def("scale", &scale<float>, nb::arg("x").noconvert(), nb::arg("factor"),
        nb::arg("out").noconvert());
  m.def("scale", &scale<double>, nb::arg("x").noconvert(), nb::arg("factor"),
        nb::arg("out").noconvert());

  m.def("sign_bytes", &sign_bytes);
  m.def("rotate_forward", &rotate_forward<float>, nb::arg("x").noconvert(), nb::arg("factor"),
        nb::arg("signs").noconvert(), nb::arg("out").noconvert());
  m.def("rotate_forward", &rotate_forward<double>, nb::arg("x").noconvert(), nb::arg("factor"),
        nb::arg("signs").noconvert(), nb::arg("out").noconvert());
  m.def(
      "rotate_backward",
      [](Array<float> data, Input<std::uint8_t> signs) {
        require(data.shape(0) >= 1 && signs.shape(0) >= sign_bytes(data.shape(0)), "too few signs");
        unlocked([&] { kernels().rotate_backward(aligned(data), aligned(signs), data.shape(0)); });
      },
      nb::arg("data").noconvert(), nb::arg("signs").noconvert());

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

  m.def(
      "pack",
      [](Input<std::uint32_t> values, std::uint64_t radix, std::size_t digits, int bits,
         int last_bits, Array<std::uint8_t> out) {
        const Grouping grouping = make_grouping(radix, digits, bits, last_bits);
        require(out.shape(0) == packed_bytes(values.shape(0), grouping),
                "out has the wrong length");
        unlocked([&] { kernels().pack(aligned(values), grouping, aligned(out), values.shape(0)); });
      },
      nb::arg("values").noconvert(), nb::arg("radix"), nb::arg("digits"), nb::arg("bits"),
      nb::arg("last_bits"), nb::arg("out").noconvert());
  m.def(
      "unpack",
      [](Input<std::uint8_t> payload, std::uint64_t radix, std::size_t digits, int bits,
         int last_bits, Array<std::uint32_t> values) {
        const Grouping grouping = make_grouping(radix, digits, bits, last_bits);
        require(payload.shape(0) == packed_bytes(values.shape(0), grouping),
                "payload has the wrong length");
        unlocked([&] {
          kernels().unpack(aligned(payload), grouping, aligned(values), values.shape(0));
        });
      },
      nb::arg("payload").noconvert(), nb::arg("radix"), nb::arg("digits"), nb::arg("bits"),
      nb::arg("last_bits"), nb::arg("values").noconvert());
  m.def(
      "find_out_of_range",
      [](Input<std::uint8_t> payload, std::uint64_t radix, std::size_t digits, int bits,
         int last_bits, std::uint64_t limit, std::size_t n) {
        const Grouping grouping = make_grouping(radix, digits, bits, last_bits);
        require(payload.shape(0) == packed_bytes(n, grouping), "payload has the wrong length");
        return unlocked(
            [&] { return kernels().find_out_of_range(aligned(payload), grouping, limit, n); });
      },
      nb::arg("payload").noconvert(), nb::arg("radix"), nb::arg("digits"), nb::arg("bits"),
      nb::arg("last_bits"), nb::arg("limit"), nb::arg("n"));
  m.def("add_packed", &add_packed<std::uint32_t>, nb::arg("payload").noconvert(), nb::arg("radix"),
        nb::arg("digits"), nb::arg("bits"), nb::arg("last_bits"), nb::arg("sums").noconvert());
  m.def("add_packed", &add_packed<std::uint64_t>, nb::arg("payload").noconvert(), nb::arg("radix"),
        nb::arg("digits"), nb::arg("bits"), nb::arg("last_bits"), nb::arg("sums").noconvert());
  m.def("find_below", &find_below, nb::arg("words").noconvert(), nb::arg("bound"), nb::arg("first"),
        nb::arg("positions").noconvert());
  m.def("add_signs", &add_signs<std::uint32_t>, nb::arg("bits").noconvert(),
        nb::arg("positions").noconvert(), nb::arg("sums").noconvert());
  m.def("add_signs", &add_signs<std::uint64_t>, nb::arg("bits").noconvert(),
        nb::arg("positions").noconvert(), nb::arg("sums").noconvert());
  m.def("centre", &centre<std::uint32_t>, nb::arg("sums").noconvert(), nb::arg("middle"),
        nb::arg("factor"), nb::arg("out").noconvert());
  m.def("centre", &centre<std::uint64_t>, nb::arg("sums").noconvert(), nb::arg("middle"),
        nb::arg("factor"), nb::arg("out").noconvert());

  m.def(
      "cell_masses",
      [](Matrix<const double> x, Matrix<const double> e, double w, double bent,
         Matrix<double> mass) {
        require(x.shape(0) == e.shape(0) && x.shape(1) == e.shape(1) &&
                    x.shape(0) == mass.shape(0) && x.shape(1) == mass.shape(1),
                "x, e and mass have other shapes than each other");
        require(x.shape(1) >= 2, "a curve has at least one cell");
        return unlocked([&] {
          return kernels().cell_masses(aligned(x), aligned(e), w, bent, aligned(mass), x.shape(0),
                                       x.shape(1));
        });
      },
      nb::arg("x").noconvert(), nb::arg("e").noconvert(), nb::arg("w"), nb::arg("bent"),
      nb::arg("mass").noconvert());
  m.def(
      "tilted_sums",
      [](Matrix<const double> mass, Matrix<const double> x, double step, Matrix<double> sums) {
        require(mass.shape(0) == x.shape(0) && mass.shape(1) == x.shape(1) &&
                    mass.shape(0) == sums.shape(0) && sums.shape(1) % 2 == 1,
                "mass, x and sums have other shapes than each other, or the sums are even");
        unlocked([&] {
          kernels().tilted_sums(aligned(mass), aligned(x), step, aligned(sums), x.shape(0),
                                x.shape(1), sums.shape(1) / 2);
        });
      },
      nb::arg("mass").noconvert(), nb::arg("x").noconvert(), nb::arg("step"),
      nb::arg("sums").noconvert());
  m.def(
      "log_averages",
      [](Matrix<const double> constant, Matrix<const double> slope,
         Matrix<const double> mean_constant, Matrix<const double> mean_slope, Input<double> y,
         Input<double> least, Input<double> enough, Matrix<double> value, Matrix<double> bend) {
        const std::size_t rows = mean_slope.shape(0), parts = mean_slope.shape(1);
        const std::size_t cells = y.shape(0);
        require(parts >= 1 && same_shape(constant, rows, parts + 1) &&
                    same_shape(slope, rows, parts + 1) && same_shape(mean_constant, rows, parts) &&
                    least.shape(0) == cells && enough.shape(0) == rows &&
                    same_shape(value, rows, cells) && same_shape(bend, rows, cells),
                "arrays have other shapes than each other");
        unlocked([&] {
          kernels().log_averages(aligned(constant), aligned(slope), aligned(mean_constant),
                                 aligned(mean_slope), aligned(y), aligned(least), aligned(enough),
                                 aligned(value), aligned(bend), rows, parts, cells);
        });
      },
      nb::arg("constant").noconvert(), nb::arg("slope").noconvert(),
      nb::arg("mean_constant").noconvert(), nb::arg("mean_slope").noconvert(),
      nb::arg("y").noconvert(), nb::arg("least").noconvert(), nb::arg("enough").noconvert(),
      nb::arg("value").noconvert(), nb::arg("bend").noconvert());
  m.def(
      "log_sums",
      [](Matrix<const double> a, Matrix<const double> b, Matrix<double> sums,
         Matrix<double> shares) {
        const std::size_t rows = a.shape(0), cells = a.shape(1);
        require(same_shape(b, rows, cells) && same_shape(sums, rows, cells) &&
                    same_shape(shares, rows, cells),
                "arrays have other shapes than each other");
        unlocked([&] {
          kernels().log_sums(aligned(a), aligned(b), aligned(sums), aligned(shares), rows * cells);
        });
      },
      nb::arg("a").noconvert(), nb::arg("b").noconvert(), nb::arg("sums").noconvert(),
      nb::arg("shares").noconvert());
  m.def(
      "largest_excess",
      [](Matrix<const double> start, Matrix<const double> rise, Matrix<const double> value,
         Matrix<const double> bend, Matrix<const bool> wanted, Input<double> y, Input<double> c0,
         Input<double> c1) {
        const std::size_t rows = start.shape(0), cells = y.shape(0);
        require(same_shape(start, rows, cells) && same_shape(rise, rows, cells) &&
                    same_shape(value, rows, cells) && same_shape(bend, rows, cells) &&
                    same_shape(wanted, rows, cells) && c0.shape(0) == cells && c1.shape(0) == cells,
                "arrays have other shapes than each other");
        return unlocked([&] {
          return kernels().largest_excess(aligned(start), aligned(rise), aligned(value),
                                          aligned(bend), aligned(wanted), aligned(y), aligned(c0),
                                          aligned(c1), rows, cells);
        });
      },
      nb::arg("start").noconvert(), nb::arg("rise").noconvert(), nb::arg("value").noconvert(),
      nb::arg("bend").noconvert(), nb::arg("wanted").noconvert(), nb::arg("y").noconvert(),
      nb::arg("c0").noconvert(), nb::arg("c1").noconvert());
  m.def(
      "bessel_ratios",
      [](double variance, std::size_t start, double ratio, double error, Array<double> ratios,
         Array<double> errors) {
        require(ratios.shape(0) == errors.shape(0), "errors has another length than the ratios");
        require(start >= ratios.shape(0), "the recurrence starts below the first ratio");
        unlocked([&] {
          kernels().bessel_ratios(variance, start, ratio, error, aligned(ratios), aligned(errors),
                                  ratios.shape(0));
        });
      },
      nb::arg("variance"), nb::arg("start"), nb::arg("ratio"), nb::arg("error"),
      nb::arg("ratios").noconvert(), nb::arg("errors").noconvert());

  m.def(
      "crc32c",
      [](Input<std::uint8_t> data, std::uint32_t prior) {
        return unlocked([&] { return cpsgd::crc32c(aligned(data), data.shape(0), prior); });
      },
      nb::arg("data").noconvert(), nb::arg("prior") = 0);
}
