#include "kernel/reduce/level.h"

#include <string>

#include "base/config.h"
#include "base/log.h"

#ifdef NVX_LEVEL_V3
#include <cpuid.h>
#endif

namespace nvx::kernel {

// The build defines NVX_LEVEL_V3 if it also compiles the levels of x86-64.
namespace base {
extern const Level kLevel;
}
namespace v3 {
extern const Level kLevel;
}
namespace v4 {
extern const Level kLevel;
}

#ifdef NVX_LEVEL_V3
namespace {

bool has(unsigned leaf, unsigned bits) {
  unsigned a, b, c = 0, d;
  return __get_cpuid(leaf, &a, &b, &c, &d) && (c & bits) == bits;
}

// Listed one by one, because clang 14 supports neither the levels nor f16c by name. The operating system saves the
// registers of every feature that is reported here.
bool runs_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("fma") && has(1, bit_F16C | bit_MOVBE) && has(0x80000001, bit_LZCNT);
}

bool runs_v4() {
  return runs_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace
#endif

std::span<const Level* const> levels() {
#ifdef NVX_LEVEL_V3
  static const Level* const kAll[] = {&base::kLevel, &v3::kLevel, &v4::kLevel};
  static const size_t runnable = runs_v4() ? 3 : runs_v3() ? 2 : 1;
#else
  static const Level* const kAll[] = {&base::kLevel};
  static const size_t runnable = 1;
#endif
  return {kAll, runnable};
}

namespace {

const Level& choose() {
  const std::string& wanted = config().cpu_level;
  for (const Level* level : levels()) {
    if (wanted == level->name) return *level;
  }
  if (!wanted.empty())
    NVX_LOG(kWarn, "this processor does not support NVX_CPU_LEVEL=%s; using %s", wanted.c_str(), levels().back()->name);
  return *levels().back();
}

}  // namespace

const Level& level() {
  static const Level& chosen = choose();
  return chosen;
}

}  // namespace nvx::kernel
