// Python's view of the kernels of accounting and cohorts.
#include "bindings.h"

namespace cpsgd {

void bind_accounting(nb::module_& m) {
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
      "raise_to_excess",
      [](Matrix<const double> start, Matrix<const double> rise, Matrix<const double> value,
         Matrix<const double> bend, Matrix<const bool> wanted, Input<double> y, Input<double> c0,
         Input<double> c1, Array<double> found) {
        const std::size_t rows = start.shape(0), cells = y.shape(0);
        require(same_shape(start, rows, cells) && same_shape(rise, rows, cells) &&
                    same_shape(value, rows, cells) && same_shape(bend, rows, cells) &&
                    same_shape(wanted, rows, cells) && c0.shape(0) == cells &&
                    c1.shape(0) == cells && found.shape(0) == rows,
                "arrays have other shapes than each other");
        unlocked([&] {
          kernels().raise_to_excess(aligned(start), aligned(rise), aligned(value), aligned(bend),
                                    aligned(wanted), aligned(y), aligned(c0), aligned(c1),
                                    aligned(found), rows, cells);
        });
      },
      nb::arg("start").noconvert(), nb::arg("rise").noconvert(), nb::arg("value").noconvert(),
      nb::arg("bend").noconvert(), nb::arg("wanted").noconvert(), nb::arg("y").noconvert(),
      nb::arg("c0").noconvert(), nb::arg("c1").noconvert(), nb::arg("found").noconvert());
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
      "permute",
      [](Input<std::int64_t> numbers, std::uint64_t size, int half, Input<std::uint64_t> keys,
         Array<std::int64_t> found) {
        require(numbers.shape(0) == found.shape(0), "found has another length than the numbers");
        require(half >= 1 && half <= 32 && size >= 1 && (half == 32 || (size - 1) >> 2 * half == 0),
                "size is out of range");
        const auto* begin = aligned(numbers);
        // Whatever is not below the size may never come back.
        for (std::size_t i = 0; i < numbers.shape(0); ++i) {
          require(begin[i] >= 0 && static_cast<std::uint64_t>(begin[i]) < size,
                  "a number is out of range");
        }
        unlocked([&] {
          kernels().permute(begin, size, half, aligned(keys), keys.shape(0), aligned(found),
                            numbers.shape(0));
        });
      },
      nb::arg("numbers").noconvert(), nb::arg("size"), nb::arg("half"), nb::arg("keys").noconvert(),
      nb::arg("found").noconvert());
}

}  // namespace cpsgd
