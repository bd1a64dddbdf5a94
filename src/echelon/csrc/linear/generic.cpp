// Linear layers for any processor: four lanes, no fused multiply-add.
#include "linear.h"

namespace echelon::linear {
namespace {

struct Vector {
  typedef float Register __attribute__((vector_size(16), aligned(2), may_alias));
  typedef uint32_t Bits __attribute__((vector_size(16), aligned(2), may_alias));
  static constexpr const char* name = "generic";
  static constexpr int width = 4, most_rows = 4, most_sums = 8;

  static Register load(const float* p) { return *reinterpret_cast<const Register*>(p); }
  static void store(float* p, Register v) { *reinterpret_cast<Register*>(p) = v; }
  static Register broadcast(const float* p) { return Register{*p, *p, *p, *p}; }
  static Register fma(Register a, Register b, Register c) { return a * b + c; }
  static Register even(const uint16_t* p) { return reinterpret_cast<Register>(*reinterpret_cast<const Bits*>(p) << 16); }
  static Register odd(const uint16_t* p) { return reinterpret_cast<Register>(*reinterpret_cast<const Bits*>(p) & 0xffff0000u); }
  static Register f16(const uint16_t* p);
};

}  // namespace
}  // namespace echelon::linear

#include "fma.h"

namespace echelon::linear {

Vector::Register Vector::f16(const uint16_t* p) {
  return Register{to_float(p[0], Storage::float16), to_float(p[1], Storage::float16), to_float(p[2], Storage::float16), to_float(p[3], Storage::float16)};
}

const Family& generic_family(Storage type) { return fma_family(type); }

}  // namespace echelon::linear
