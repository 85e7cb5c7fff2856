// The module: chooses the SIMD level once, and gathers the bindings.
#include <nanobind/stl/string.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "bindings.h"
#if defined(CPSGD_X86)
#include <cpuid.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "messages and keystream are read as little-endian words");

namespace cpsgd {
namespace {

struct Level {
  const char* name;
  const Kernels* kernels;
};

#if defined(CPSGD_X86)
// Clang 18 has no name for this feature, and neither have older compilers.
bool has_vaes() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & bit_VAES);
}
#endif

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
           __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("aes") && has_vaes();
  }
#endif
  return name == "baseline";
}

Level choose_level() {
  const Level levels[] = {
#if defined(CPSGD_X86)
      {"avx512", &avx512::kernels},
      {"avx2", &avx2::kernels},
#endif
      {"baseline", &baseline::kernels},
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

}  // namespace

const Kernels& kernels() { return *level().kernels; }

}  // namespace cpsgd

NB_MODULE(_native, m) {
  cpsgd::level();  // a wrong CPSGD_SIMD is an error at import, not in the middle of a round

  m.def("simd_level", [] { return std::string(cpsgd::level().name); });
  m.def("supported_levels", [] {
    nb::list names;
    for (const char* name : {"baseline", "avx2", "avx512"}) {
      if (cpsgd::supported(name)) names.append(name);
    }
    return names;
  });

  cpsgd::bind_codec(m);
  cpsgd::bind_samplers(m);
  cpsgd::bind_accounting(m);
  cpsgd::bind_modular(m);
}
