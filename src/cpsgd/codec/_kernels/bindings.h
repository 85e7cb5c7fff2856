// What the bindings share: arrays with their sizes checked, and the kernels of the chosen SIMD
// level.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <type_traits>

#include "kernels.h"

namespace nb = nanobind;

namespace cpsgd {

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Input = Array<const T>;
template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Those of the level that was chosen when the module was imported.
const Kernels& kernels();

inline void require(bool condition, const char* message) {
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

inline std::size_t packed_bytes(std::size_t n, const Grouping& grouping) {
  // Beyond this the number of bits might not fit its type.
  require(n <= (std::size_t{1} << 40), "the number of values is out of range");
  const std::size_t groups = n / grouping.digits;
  return (groups * grouping.bits + (n % grouping.digits ? grouping.last_bits : 0) + 7) / 8;
}

inline Grouping make_grouping(std::uint64_t radix, std::size_t digits, int bits, int last_bits) {
  require(radix >= 2 && radix <= 0xFFFFFFFFu && digits >= 1 && digits <= 64 && bits >= 1 &&
              bits <= 64 && last_bits >= 0 && last_bits <= bits && (digits > 1 || bits <= 32),
          "grouping is out of range");
  return Grouping{radix, digits, bits, last_bits};
}

// One per part of the module.
void bind_codec(nb::module_& m);
void bind_samplers(nb::module_& m);
void bind_accounting(nb::module_& m);
void bind_modular(nb::module_& m);

}  // namespace cpsgd
