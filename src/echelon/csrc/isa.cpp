#include "isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>

namespace echelon {
namespace {

struct Isa {
  const char* name;
  Features features;
};

constexpr Isa isas[] = {
    {"generic", 0},
    {"avx2", avx2},
    {"avx512", avx2 | avx512},
    {"avx512_bf16", avx2 | avx512 | avx512_bf16},
    {"amx", avx2 | avx512 | avx512_bf16 | amx_bf16},
};

// Tile registers exist, and the operating system lets this process use them.
bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool has_tiles = (d >> 24 & 1) && (d >> 22 & 1);  // AMX-TILE, AMX-BF16
  constexpr int request_permission = 0x1023, tile_data = 18;
  return has_tiles && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

Features detect() {
  __builtin_cpu_init();
  Features found = 0;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found |= avx2;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    found |= avx512;
  if (__builtin_cpu_supports("avx512bf16")) found |= avx512_bf16;
  if (has_amx()) found |= amx_bf16;
  return found;
}

Features detected_features() {
  static const Features features = detect();
  return features;
}

Features features_of(const std::string& name) {
  std::string offered;
  for (const Isa& one : isas) {
    if (!has(detected_features(), one.features)) continue;
    if (name == one.name) return one.features;
    offered += (offered.empty() ? "" : ", ") + std::string(one.name);
  }
  throw std::invalid_argument("no instruction family " + name + " on this machine; it offers " + offered);
}

Features initial_features() {
  const char* const name = std::getenv("ECHELON_ISA");
  return name && *name ? features_of(name) : detected_features();
}

Features& active() {
  static Features features = initial_features();
  return features;
}

}  // namespace

Features active_features() { return active(); }

std::string isa() {
  std::string largest;
  for (const Isa& one : isas)
    if (has(active(), one.features)) largest = one.name;
  return largest;
}

std::vector<std::string> offered_isas() {
  std::vector<std::string> names;
  for (const Isa& one : isas)
    if (has(detected_features(), one.features)) names.push_back(one.name);
  return names;
}

void set_isa(const std::string& name) { active() = features_of(name); }

}  // namespace echelon
