// Python's view of the codec's kernels: norms, rotation, packing, sums of messages, checksums.
#include "bindings.h"
#include "checksum.h"

namespace cpsgd {
namespace {

std::size_t sign_bytes(std::size_t n) {
  require(n >= 1 && n <= (std::size_t{1} << 40), "the number of coordinates is out of range");
  std::size_t size = 1;
  while (size * 2 <= n) size *= 2;
  const std::size_t rounded = (size + 15) / 16 * 16;
  return (size == n ? rounded : 2 * rounded) / 8;
}

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

template <typename T>
double rotate_to_grid(Input<T> x, double factor, Input<std::uint8_t> signs, double limit,
                      Array<float> out) {
  require(x.shape(0) == out.shape(0) && x.shape(0) >= 1, "out has another length than the vector");
  require(signs.shape(0) >= sign_bytes(x.shape(0)), "too few signs");
  const float bound = static_cast<float>(limit);
  return unlocked([&] {
    if constexpr (sizeof(T) == 4) {
      return kernels().rotate_to_grid_float(aligned(x), factor, aligned(signs), bound, aligned(out),
                                            x.shape(0));
    } else {
      return kernels().rotate_to_grid_double(aligned(x), factor, aligned(signs), bound,
                                             aligned(out), x.shape(0));
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

template <typename Sum>
void centre_and_rotate(Input<Sum> sums, double middle, double factor, Input<std::uint8_t> signs,
                       Array<float> out) {
  require(sums.shape(0) == out.shape(0) && sums.shape(0) >= 1,
          "out has another length than the sums");
  require(signs.shape(0) >= sign_bytes(sums.shape(0)), "too few signs");
  unlocked([&] {
    if constexpr (sizeof(Sum) == 4) {
      kernels().centre_and_rotate_32(aligned(sums), middle, factor, aligned(signs), aligned(out),
                                     sums.shape(0));
    } else {
      kernels().centre_and_rotate_64(aligned(sums), middle, factor, aligned(signs), aligned(out),
                                     sums.shape(0));
    }
  });
}

// A message while it is written: bytes that nobody else has seen yet, so that they need not be
// copied when they are complete. They are first touched, which is when the operating system finds
// pages for them, by kernels, without the interpreter lock.
class MessageBuffer {
 public:
  explicit MessageBuffer(std::size_t size) {
    require(size >= 2, "a message is too short");  // shorter ones might be shared
    bytes_ =
        nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
    if (!bytes_.is_valid()) throw nb::python_error();
  }
  MessageBuffer(const MessageBuffer&) = delete;

  nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>, nb::c_contig> array() const {
    char* data = PyBytes_AsString(bytes_.ptr());
    return {reinterpret_cast<std::uint8_t*>(data), {bytes_.size()}, bytes_};
  }

  nb::bytes finished() const { return bytes_; }

 private:
  nb::bytes bytes_ = nb::steal<nb::bytes>(nullptr);
};

}  // namespace

void bind_codec(nb::module_& m) {
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
  m.def("rotate_to_grid", &rotate_to_grid<float>, nb::arg("x").noconvert(), nb::arg("factor"),
        nb::arg("signs").noconvert(), nb::arg("limit"), nb::arg("out").noconvert());
  m.def("rotate_to_grid", &rotate_to_grid<double>, nb::arg("x").noconvert(), nb::arg("factor"),
        nb::arg("signs").noconvert(), nb::arg("limit"), nb::arg("out").noconvert());
  m.def(
      "rotate_backward",
      [](Array<float> data, Input<std::uint8_t> signs) {
        require(data.shape(0) >= 1 && signs.shape(0) >= sign_bytes(data.shape(0)), "too few signs");
        unlocked([&] { kernels().rotate_backward(aligned(data), aligned(signs), data.shape(0)); });
      },
      nb::arg("data").noconvert(), nb::arg("signs").noconvert());

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
  m.def("centre_and_rotate", &centre_and_rotate<std::uint32_t>, nb::arg("sums").noconvert(),
        nb::arg("middle"), nb::arg("factor"), nb::arg("signs").noconvert(),
        nb::arg("out").noconvert());
  m.def("centre_and_rotate", &centre_and_rotate<std::uint64_t>, nb::arg("sums").noconvert(),
        nb::arg("middle"), nb::arg("factor"), nb::arg("signs").noconvert(),
        nb::arg("out").noconvert());

  nb::class_<MessageBuffer>(m, "MessageBuffer")
      .def(nb::init<std::size_t>(), nb::arg("size"))
      .def("array", &MessageBuffer::array)
      .def("finished", &MessageBuffer::finished);
  m.def(
      "crc32c",
      [](Input<std::uint8_t> data, std::uint32_t prior) {
        const auto sum = [&] { return cpsgd::crc32c(aligned(data), data.shape(0), prior); };
        // Giving the lock away for a header's sake costs more than its sum.
        return data.shape(0) < 4096 ? sum() : unlocked(sum);
      },
      nb::arg("data").noconvert(), nb::arg("prior") = 0);
}

}  // namespace cpsgd
