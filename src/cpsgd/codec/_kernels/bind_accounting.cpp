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
      [](double w, Input<double> widths, Input<double> y0, Input<double> y1, std::size_t parts,
         Matrix<double> value, Matrix<double> bend) {
        const std::size_t rows = widths.shape(0), cells = y0.shape(0);
        require(parts >= 1 && parts <= 1024 && y1.shape(0) == cells &&
                    same_shape(value, rows, cells) && same_shape(bend, rows, cells),
                "arrays have other shapes than each other, or the parts are out of range");
        unlocked([&] {
          kernels().log_averages(w, aligned(widths), aligned(y0), aligned(y1), parts,
                                 aligned(value), aligned(bend), rows, cells);
        });
      },
      nb::arg("w"), nb::arg("widths").noconvert(), nb::arg("y0").noconvert(),
      nb::arg("y1").noconvert(), nb::arg("parts"), nb::arg("value").noconvert(),
      nb::arg("bend").noconvert());
  m.def(
      "chords",
      [](Input<double> t, Matrix<const double> values, Input<double> c, Matrix<double> moments,
         Matrix<double> largest) {
        const std::size_t rows = t.shape(0), cells = c.shape(0) - 1;
        require(rows >= 1 && c.shape(0) >= 2, "there are no distances, or no cells");
        require(same_shape(values, rows, cells + 1) && same_shape(moments, 2 * rows, cells) &&
                    same_shape(largest, 2 * (rows - 1), cells),
                "arrays have other shapes than each other");
        unlocked([&] {
          kernels().chords(aligned(t), aligned(values), aligned(c), aligned(moments),
                           aligned(largest), rows, cells);
        });
      },
      nb::arg("t").noconvert(), nb::arg("values").noconvert(), nb::arg("c").noconvert(),
      nb::arg("moments").noconvert(), nb::arg("largest").noconvert());
  m.def(
      "gaps",
      [](double w, double rate, double narrow, Input<double> t, Matrix<const double> average,
         Matrix<const double> bend, Matrix<const double> smallest, Matrix<const double> largest,
         Matrix<const double> moments, Input<double> c0, Input<double> c1, Array<double> found) {
        const std::size_t rows = t.shape(0), cells = c0.shape(0);
        require(rows >= 1 && cells >= 1, "there are no distances, or no cells");
        require(same_shape(average, rows, cells) && same_shape(bend, rows, cells) &&
                    same_shape(smallest, 2, cells) && same_shape(largest, 2 * (rows - 1), cells) &&
                    same_shape(moments, 2 * rows, cells) && c1.shape(0) == cells &&
                    found.shape(0) == rows,
                "arrays have other shapes than each other");
        unlocked([&] {
          kernels().gaps(w, rate, narrow, aligned(t), aligned(average), aligned(bend),
                         aligned(smallest), aligned(largest), aligned(moments), aligned(c0),
                         aligned(c1), aligned(found), rows, cells);
        });
      },
      nb::arg("w"), nb::arg("rate"), nb::arg("narrow"), nb::arg("t").noconvert(),
      nb::arg("average").noconvert(), nb::arg("bend").noconvert(), nb::arg("smallest").noconvert(),
      nb::arg("largest").noconvert(), nb::arg("moments").noconvert(), nb::arg("c0").noconvert(),
      nb::arg("c1").noconvert(), nb::arg("found").noconvert());
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
