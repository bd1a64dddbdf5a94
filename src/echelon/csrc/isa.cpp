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
  Features byte_products;  // that belong to it, where the processor has them
};

constexpr Isa isas[] = {
    {"generic", 0, 0},
    {"avx2", avx2, avx_vnni},
    {"avx512", avx2 | avx512, avx_vnni | avx512_vnni},
    {"avx512_bf16", avx2 | avx512 | avx512_bf16, avx_vnni | avx512_vnni},
    {"amx", avx2 | avx512 | avx512_bf16 | amx_bf16, avx_vnni | avx512_vnni | amx_int8},
};

// Tile registers exist, and the operating system lets this process use them.
Features detect_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  const bool has_tiles = (d >> 24 & 1) && (d >> 22 & 1);  // AMX-TILE, AMX-BF16
  constexpr int request_permission = 0x1023, tile_data = 18;
  if (!has_tiles || syscall(SYS_arch_prctl, request_permission, tile_data) != 0) return 0;
  return d >> 25 & 1 ? amx_bf16 | amx_int8 : amx_bf16;
}

bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

// Everything that code for x86-64-v3 may use: a virtual machine may hide some of it behind AVX2.
bool has_v3() {
  unsigned a, b, c1, c2, d;
  if (!__get_cpuid(1, &a, &b, &c1, &d) || !__get_cpuid(0x80000001, &a, &b, &c2, &d)) return false;
  const bool has_rest = (c1 >> 29 & 1) && (c1 >> 22 & 1) && (c2 >> 5 & 1);  // F16C, MOVBE, LZCNT
  return has_rest && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");
}

bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

Features detect() {
  __builtin_cpu_init();
  Features found = 0;
  if (has_v3()) found |= avx2;
  if (has_v4()) found |= avx512;
  if (__builtin_cpu_supports("avx512bf16")) found |= avx512_bf16;
  if (has(found, avx2) && has_avx_vnni()) found |= avx_vnni;
  if (has(found, avx512) && __builtin_cpu_supports("avx512vnni")) found |= avx512_vnni;
  if (__builtin_cpu_is("intel")) found |= fetches_late;
  return found | detect_amx();
}

Features detected_features() {
  static const Features features = detect();
  return features;
}

Features features_of(const std::string& name, bool byte_products) {
  std::string offered;
  for (const Isa& one : isas) {
    if (!has(detected_features(), one.features)) continue;
    if (name == one.name) return one.features | (detected_features() & (fetches_late | (byte_products ? one.byte_products : 0)));
    offered += (offered.empty() ? "" : ", ") + std::string(one.name);
  }
  throw std::invalid_argument("no instruction family " + name + " on this machine; it offers " + offered);
}

Features initial_features() {
  const char* const name = std::getenv("ECHELON_ISA");
  return name && *name ? features_of(name, true) : detected_features();
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

void set_isa(const std::string& name, bool byte_products) { active() = features_of(name, byte_products); }

}  // namespace echelon
