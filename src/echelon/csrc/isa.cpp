#include "isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <stdexcept>

namespace echelon {
namespace {

constexpr std::array<const char*, 5> names = {"generic", "avx2", "avx512", "avx512_bf16", "amx"};

// Tile registers exist, and the operating system lets this process use them.
bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool has_tiles = (d >> 24 & 1) && (d >> 22 & 1);  // AMX-TILE, AMX-BF16
  constexpr int request_permission = 0x1023, tile_data = 18;
  return has_tiles && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}

Isa detect() {
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return Isa::generic;
  if (!has_avx512()) return Isa::avx2;
  if (!__builtin_cpu_supports("avx512bf16")) return Isa::avx512;
  return has_amx() ? Isa::amx : Isa::avx512_bf16;
}

Isa& active() {
  static Isa isa = detected_isa();
  return isa;
}

}  // namespace

Isa detected_isa() {
  static const Isa isa = detect();
  return isa;
}

Isa active_isa() { return active(); }

void set_isa(const std::string& name) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (name != names[i]) continue;
    if (static_cast<Isa>(i) > detected_isa()) throw std::invalid_argument("this machine has no " + name);
    active() = static_cast<Isa>(i);
    return;
  }
  throw std::invalid_argument("unknown instruction family " + name);
}

std::string isa_name(Isa isa) { return names[static_cast<size_t>(isa)]; }

}  // namespace echelon
