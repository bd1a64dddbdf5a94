#include "elementwise.h"
#include "round.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "../numbers.h"

namespace echelon {
namespace {

constexpr int64_t lanes = 16;  // independent partial sums of a reduction

template <Activation kind>
INLINE float activation(float x) {
  if constexpr (kind == Activation::none) return x;
  if constexpr (kind == Activation::relu) return x < 0.0f ? 0.0f : x;
  if constexpr (kind == Activation::silu) return x / (1.0f + exponential(-x));
  if constexpr (kind == Activation::gelu_tanh) {
    const float twice = 1.59576912f * (x + 0.044715f * x * x * x);  // (1 + tanh u) / 2 = 1 / (1 + exp(−2u))
    return x / (1.0f + exponential(-twice));
  }
  return x * 0.5f * (1.0f + std::erf(x * 0.70710678f));
}

// Σ f(x[i]) in an order that depends on `size` alone.
template <typename Term>
INLINE float sum(int64_t size, Term term) {
  float parts[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= size; i += lanes)
    for (int64_t j = 0; j < lanes; ++j) parts[j] += term(i + j);
  for (int64_t j = 0; i + j < size; ++j) parts[j] += term(i + j);
  for (int64_t width = lanes / 2; width > 0; width /= 2)
    for (int64_t j = 0; j < width; ++j) parts[j] += parts[j + width];
  return parts[0];
}

template <Storage type>
INLINE void rms_norm_rows(Rows x, const void* weight, void* out, int64_t begin, int64_t end, int64_t size, float eps, RmsWeight how) {
  using N = Number<type>;
  const auto* w = static_cast<const typename N::Stored*>(weight);
  for (int64_t row = begin; row < end; ++row) {
    const auto* in = static_cast<const typename N::Stored*>(x.data) + row * x.stride;
    auto* to = static_cast<typename N::Stored*>(out) + row * size;
    const float squares = sum(size, [&](int64_t i) __attribute__((always_inline)) {
      const float v = N::widen(in[i]);
      return v * v;
    });
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
    if (how == RmsWeight::after_rounding)
      for (int64_t i = 0; i < size; ++i) to[i] = N::narrow(N::widen(w[i]) * N::widen(N::narrow(N::widen(in[i]) * scale)));
    else if (how == RmsWeight::in_float32)
      for (int64_t i = 0; i < size; ++i) to[i] = N::narrow(N::widen(w[i]) * (N::widen(in[i]) * scale));
    else
      for (int64_t i = 0; i < size; ++i) to[i] = N::narrow((1.0f + N::widen(w[i])) * (N::widen(in[i]) * scale));
  }
}

template <Storage type>
INLINE void layer_norm_rows(Rows x, const void* weight, const void* bias, void* out, int64_t begin, int64_t end, int64_t size, float eps) {
  using N = Number<type>;
  const auto* w = static_cast<const typename N::Stored*>(weight);
  const auto* b = static_cast<const typename N::Stored*>(bias);
  for (int64_t row = begin; row < end; ++row) {
    const auto* in = static_cast<const typename N::Stored*>(x.data) + row * x.stride;
    auto* to = static_cast<typename N::Stored*>(out) + row * size;
    const float mean = sum(size, [&](int64_t i) __attribute__((always_inline)) { return N::widen(in[i]); }) / static_cast<float>(size);
    const float squares = sum(size, [&](int64_t i) __attribute__((always_inline)) {
      const float v = N::widen(in[i]) - mean;
      return v * v;
    });
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
    if (w && b)
      for (int64_t i = 0; i < size; ++i) to[i] = N::narrow((N::widen(in[i]) - mean) * scale * N::widen(w[i]) + N::widen(b[i]));
    else if (w)
      for (int64_t i = 0; i < size; ++i) to[i] = N::narrow((N::widen(in[i]) - mean) * scale * N::widen(w[i]));
    else if (b)
      for (int64_t i = 0; i < size; ++i) to[i] = N::narrow((N::widen(in[i]) - mean) * scale + N::widen(b[i]));
    else
      for (int64_t i = 0; i < size; ++i) to[i] = N::narrow((N::widen(in[i]) - mean) * scale);
  }
}

template <Storage type, Activation kind>
INLINE void activate_rows(Rows x, Rows other, void* out, int64_t begin, int64_t end, int64_t size) {
  using N = Number<type>;
  for (int64_t row = begin; row < end; ++row) {
    const auto* in = static_cast<const typename N::Stored*>(x.data) + row * x.stride;
    auto* to = static_cast<typename N::Stored*>(out) + row * size;
    if (other.data) {
      const auto* by = static_cast<const typename N::Stored*>(other.data) + row * other.stride;
      for (int64_t i = 0; i < size; ++i) to[i] = N::narrow(activation<kind>(N::widen(in[i])) * N::widen(by[i]));
    } else {
      for (int64_t i = 0; i < size; ++i) to[i] = N::narrow(activation<kind>(N::widen(in[i])));
    }
  }
}

// One head: pairs (low, high) turned by their angles. Nothing overlaps.
template <Storage type, Storage angle_type>
INLINE void rotate_head(const typename Number<type>::Stored* low, const typename Number<type>::Stored* high,
                        const typename Number<angle_type>::Stored* cos, const typename Number<angle_type>::Stored* sin,
                        typename Number<type>::Stored* __restrict__ to_low, typename Number<type>::Stored* __restrict__ to_high, int64_t half) {
  using N = Number<type>;
  using A = Number<angle_type>;
  for (int64_t i = 0; i < half; ++i) {
    const float a = N::widen(low[i]), b = N::widen(high[i]);
    to_low[i] = N::narrow(a * A::widen(cos[i]) - b * A::widen(sin[i]));
  }
  for (int64_t i = 0; i < half; ++i) {
    const float a = N::widen(low[i]), b = N::widen(high[i]);
    to_high[i] = N::narrow(b * A::widen(cos[half + i]) + a * A::widen(sin[half + i]));
  }
}

template <Storage type, Storage angle_type>
INLINE void rotate_tokens(const void* x, int64_t token_stride, int64_t head_stride, const void* cos, const void* sin, void* out,
                          int64_t begin, int64_t end, int64_t heads, int64_t size, int64_t rotary) {
  using N = Number<type>;
  using A = Number<angle_type>;
  const int64_t half = rotary / 2;
  for (int64_t token = begin; token < end; ++token) {
    const auto* c = static_cast<const typename A::Stored*>(cos) + token * rotary;
    const auto* s = static_cast<const typename A::Stored*>(sin) + token * rotary;
    for (int64_t head = 0; head < heads; ++head) {
      const auto* in = static_cast<const typename N::Stored*>(x) + token * token_stride + head * head_stride;
      auto* to = static_cast<typename N::Stored*>(out) + (token * heads + head) * size;
      rotate_head<type, angle_type>(in, in + half, c, s, to, to + half, half);
      if (rotary < size) std::memcpy(to + rotary, in + rotary, sizeof(*to) * static_cast<size_t>(size - rotary));
    }
  }
}

template <Storage type>
INLINE void add_numbers(const void* a, const void* b, void* out, int64_t count) {
  using N = Number<type>;
  const auto *x = static_cast<const typename N::Stored*>(a), *y = static_cast<const typename N::Stored*>(b);
  auto* to = static_cast<typename N::Stored*>(out);
  for (int64_t i = 0; i < count; ++i) to[i] = N::narrow(N::widen(x[i]) + N::widen(y[i]));
}

template <Storage type>
INLINE void activate_kind(Activation kind, Rows x, Rows other, void* out, int64_t begin, int64_t end, int64_t size) {
  switch (kind) {
    case Activation::none: return activate_rows<type, Activation::none>(x, other, out, begin, end, size);
    case Activation::relu: return activate_rows<type, Activation::relu>(x, other, out, begin, end, size);
    case Activation::silu: return activate_rows<type, Activation::silu>(x, other, out, begin, end, size);
    case Activation::gelu: return activate_rows<type, Activation::gelu>(x, other, out, begin, end, size);
    case Activation::gelu_tanh: return activate_rows<type, Activation::gelu_tanh>(x, other, out, begin, end, size);
  }
}

template <Storage type>
INLINE void rotate_type(Storage angle_type, const void* x, int64_t token_stride, int64_t head_stride, const void* cos, const void* sin,
                        void* out, int64_t begin, int64_t end, int64_t heads, int64_t size, int64_t rotary) {
  if (angle_type == type)
    rotate_tokens<type, type>(x, token_stride, head_stride, cos, sin, out, begin, end, heads, size, rotary);
  else
    rotate_tokens<type, Storage::float32>(x, token_stride, head_stride, cos, sin, out, begin, end, heads, size, rotary);
}

}  // namespace

#define BY_STORAGE(call, ...)                                            \
  by_features([&]() ALWAYS_INLINE {                                      \
    switch (type) {                                                      \
      case Storage::float32: return call<Storage::float32>(__VA_ARGS__);  \
      case Storage::bfloat16: return call<Storage::bfloat16>(__VA_ARGS__); \
      case Storage::float16: return call<Storage::float16>(__VA_ARGS__);  \
    }                                                                    \
  })

void rms_norm(Storage type, Rows x, const void* weight, void* out, int64_t begin, int64_t end, int64_t size, float eps, RmsWeight how) {
  BY_STORAGE(rms_norm_rows, x, weight, out, begin, end, size, eps, how);
}

void layer_norm(Storage type, Rows x, const void* weight, const void* bias, void* out, int64_t begin, int64_t end, int64_t size, float eps) {
  BY_STORAGE(layer_norm_rows, x, weight, bias, out, begin, end, size, eps);
}

void activate(Storage type, Activation kind, Rows x, Rows other, void* out, int64_t begin, int64_t end, int64_t size) {
  BY_STORAGE(activate_kind, kind, x, other, out, begin, end, size);
}

void rotate(Storage type, Storage angle_type, const void* x, int64_t token_stride, int64_t head_stride, const void* cos, const void* sin, void* out,
            int64_t begin, int64_t end, int64_t heads, int64_t size, int64_t rotary) {
  BY_STORAGE(rotate_type, angle_type, x, token_stride, head_stride, cos, sin, out, begin, end, heads, size, rotary);
}

void add(Storage type, const void* a, const void* b, void* out, int64_t count) { BY_STORAGE(add_numbers, a, b, out, count); }

void write_slots(Storage type, const void* from, int64_t token_stride, int64_t head_stride, int64_t size, const int64_t* slots, int64_t begin,
                 int64_t end, HeadSlots to) {
  const int64_t number = type == Storage::float32 ? 4 : 2;
  for (int64_t i = begin; i < end; ++i) {
    char* slot = static_cast<char*>(to.data) + (slots[i] / to.block_size * to.heads * to.block_size + slots[i] % to.block_size) * to.bytes;
    for (int64_t head = 0; head < to.heads; ++head, slot += to.block_size * to.bytes) {
      const char* source = static_cast<const char*>(from) + (i * token_stride + head * head_stride) * number;
      if (!to.is_rounded) {
        std::memcpy(slot, source, static_cast<size_t>(to.bytes));
        continue;
      }
      int32_t unused;
      const float scale = round_row(source, size, type, size, reinterpret_cast<int8_t*>(slot), &unused);
      std::memcpy(slot + size, &scale, scale_bytes);
    }
  }
}

}  // namespace echelon
