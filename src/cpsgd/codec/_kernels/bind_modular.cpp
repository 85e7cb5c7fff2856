// Python's view of the arithmetic of sums of two servers.
#include "bindings.h"

namespace cpsgd {
namespace {

using Elements = Matrix<const std::uint32_t>;

std::uint32_t checked(std::uint32_t prime) {
  require(prime >= 2 && prime < (1u << 31), "the prime is out of range");
  return prime;
}

}  // namespace

void bind_modular(nb::module_& m) {
  m.def(
      "modular_product",
      [](Elements a, Elements b, std::uint32_t prime, Matrix<std::uint32_t> out) {
        require(a.shape(1) == b.shape(0) && same_shape(out, a.shape(0), b.shape(1)),
                "matrices have other shapes than each other");
        unlocked([&] {
          kernels().modular_product(aligned(a), aligned(b), checked(prime), aligned(out),
                                    a.shape(0), a.shape(1), b.shape(1));
        });
      },
      nb::arg("a").noconvert(), nb::arg("b").noconvert(), nb::arg("prime"),
      nb::arg("out").noconvert());
  m.def(
      "modular_gram",
      [](Elements a, Elements b, std::uint32_t prime, Matrix<std::uint32_t> sums) {
        require(a.shape(0) == b.shape(0) && same_shape(sums, a.shape(1), b.shape(1)),
                "matrices have other shapes than each other");
        unlocked([&] {
          kernels().modular_gram(aligned(a), aligned(b), checked(prime), aligned(sums), a.shape(0),
                                 a.shape(1), b.shape(1));
        });
      },
      nb::arg("a").noconvert(), nb::arg("b").noconvert(), nb::arg("prime"),
      nb::arg("sums").noconvert());
  m.def(
      "extension_product",
      [](Elements a, Elements b, Elements powers, std::uint32_t prime, Matrix<std::uint32_t> out) {
        const std::size_t degree = a.shape(1);
        const bool one = b.shape(0) == 1;
        require(degree >= 1 && degree <= 128 && same_shape(b, one ? 1 : a.shape(0), degree) &&
                    same_shape(out, a.shape(0), degree) && same_shape(powers, degree - 1, degree),
                "elements have other degrees than each other, or one above 128");
        unlocked([&] {
          kernels().extension_product(aligned(a), aligned(b), aligned(powers), checked(prime),
                                      aligned(out), a.shape(0), degree, one);
        });
      },
      nb::arg("a").noconvert(), nb::arg("b").noconvert(), nb::arg("powers").noconvert(),
      nb::arg("prime"), nb::arg("out").noconvert());
  m.def(
      "extension_powers",
      [](Elements t, Elements powers, std::uint32_t prime, Matrix<std::uint32_t> out) {
        const std::size_t degree = t.shape(1);
        require(degree >= 1 && degree <= 128 && t.shape(0) == 1 && out.shape(0) >= 1 &&
                    out.shape(1) == degree && same_shape(powers, degree - 1, degree),
                "elements have other degrees than each other, or one above 128");
        unlocked([&] {
          kernels().extension_powers(aligned(t), aligned(powers), checked(prime), aligned(out),
                                     out.shape(0), degree);
        });
      },
      nb::arg("t").noconvert(), nb::arg("powers").noconvert(), nb::arg("prime"),
      nb::arg("out").noconvert());
  m.def(
      "modular_polynomial",
      [](Input<std::uint32_t> x, Input<std::uint32_t> coefficients, std::uint32_t prime,
         Array<std::uint32_t> out) {
        require(x.shape(0) == out.shape(0) && coefficients.shape(0) >= 1,
                "out has another length than x, or there is no coefficient");
        unlocked([&] {
          kernels().modular_polynomial(aligned(x), aligned(coefficients), coefficients.shape(0),
                                       checked(prime), aligned(out), x.shape(0));
        });
      },
      nb::arg("x").noconvert(), nb::arg("coefficients").noconvert(), nb::arg("prime"),
      nb::arg("out").noconvert());
  m.def(
      "modular_sum",
      [](Input<std::uint32_t> a, Input<std::uint32_t> b, bool minus, std::uint32_t prime,
         Array<std::uint32_t> out) {
        require(a.shape(0) == b.shape(0) && a.shape(0) == out.shape(0),
                "vectors have other lengths than each other");
        unlocked([&] {
          kernels().modular_sum(aligned(a), aligned(b), minus, checked(prime), aligned(out),
                                a.shape(0));
        });
      },
      nb::arg("a").noconvert(), nb::arg("b").noconvert(), nb::arg("minus"), nb::arg("prime"),
      nb::arg("out").noconvert());
  m.def(
      "uniform_elements",
      [](Input<std::uint32_t> words, std::uint32_t prime, Array<std::uint32_t> out) {
        require(out.shape(0) >= 1, "there is no room for an element");
        return unlocked([&] {
          return kernels().uniform_elements(aligned(words), checked(prime), aligned(out),
                                            words.shape(0), out.shape(0));
        });
      },
      nb::arg("words").noconvert(), nb::arg("prime"), nb::arg("out").noconvert());
}

}  // namespace cpsgd
