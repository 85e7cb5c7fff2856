// The kernels of two servers on memory that valgrind takes for undefined: it counts every branch and address that
// depends on such memory. Prints a line for each kernel that has any; the draws by rejection must be among them.
#include <valgrind/memcheck.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "kernels.h"
#include "packing.h"
#include "modular.h"

using namespace cpsgd;
using namespace cpsgd::CPSGD_LEVEL;

template <typename T>
static T* secret(std::size_t n, std::uint64_t below) {
  T* found = static_cast<T*>(std::malloc(n * sizeof(T)));
  for (std::size_t i = 0; i < n; ++i) found[i] = static_cast<T>((i * 2654435761u >> 3) % below);
  VALGRIND_MAKE_MEM_UNDEFINED(found, n * sizeof(T));
  return found;
}

// Arguments: prime, digits, bits, last bits of each grouping in turn, of kCount numbers.
constexpr std::size_t kCount = 1031, kRows = 9, kInner = 64, kColumns = 70, kDegree = 11;

int main(int count, char** words) {
  unsigned before = 0;
  const auto report = [&](const char* name) {
    const unsigned now = VALGRIND_COUNT_ERRORS;
    if (now != before) std::printf("%s\n", name);
    before = now;
  };
  for (int i = 1; i + 3 < count; i += 4) {
    const std::uint32_t p = static_cast<std::uint32_t>(std::stoul(words[i]));
    const Grouping grouping{p, std::stoul(words[i + 1]), std::stoi(words[i + 2]), std::stoi(words[i + 3])};
    const auto make = [&](std::size_t n) { return secret<std::uint32_t>(n, p); };
    std::uint32_t *a = make(kCount), *b = make(kCount), *out = make(kCount);
    modular_sum(a, b, false, p, out, kCount);
    modular_sum(a, b, true, p, out, kCount);
    report("modular_sum");
    modular_product(make(kRows * kInner), make(kInner * kColumns), p, make(kRows * kColumns), kRows, kInner, kColumns);
    report("modular_product");
    modular_gram(make(kRows * kDegree), make(kRows * kColumns), p, make(kDegree * kColumns), kRows, kDegree, kColumns);
    report("modular_gram");
    std::uint32_t *x = make(kRows * kDegree), *y = make(kRows * kDegree), *powers = make(kDegree * kDegree);
    extension_product(x, y, powers, p, make(kRows * kDegree), kRows, kDegree, false);
    extension_powers(x, powers, p, make(kRows * kDegree), kRows, kDegree);
    report("extension");
    const std::uint32_t coefficients[3] = {1, p - 1, 0};
    modular_polynomial(a, coefficients, 3, p, out, kCount);
    report("modular_polynomial");
    std::uint8_t* bytes = secret<std::uint8_t>(8 * kCount, 256);
    for_each_tile(kCount, grouping, [&](std::size_t start, std::size_t n, std::size_t byte) {
      pack_tile(a + start, n, grouping, bytes + byte);
    });
    report("pack");
    VALGRIND_MAKE_MEM_UNDEFINED(bytes, 8 * kCount);
    for_each_tile(kCount, grouping, [&](std::size_t start, std::size_t n, std::size_t byte) {
      unpack_tile(bytes + byte, n, grouping, out + start);
    });
    report("unpack");
    uniform_elements(secret<std::uint32_t>(kCount, std::uint64_t{1} << 32), p, out, kCount, kCount);
    report("uniform_elements");
  }
}
