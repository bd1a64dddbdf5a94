// Tensors in, tensors out: checks, allocation and threads around elementwise.cpp.
#include <ATen/Parallel.h>

#include <cstring>
#include <string>

#include "bindings.h"

namespace echelon {
namespace {

using at::Tensor;

constexpr int64_t values_per_task = 16384;  // less is not worth another thread

// The last dimension as rows: a view where the others collapse into one stride, otherwise a copy.
Tensor as_rows(const Tensor& x) {
  const Tensor flat = x.reshape({-1, x.size(-1)});
  return flat.stride(1) == 1 ? flat : flat.contiguous();
}

Rows rows_of(const Tensor& flat) { return {flat.const_data_ptr(), flat.stride(0)}; }

template <typename Work>
void over_rows(int64_t rows, int64_t size, Work work) {
  at::parallel_for(0, rows, std::max<int64_t>(1, values_per_task / std::max<int64_t>(1, size)), work);
}

const void* same_type(const std::optional<Tensor>& t, const Tensor& x, int64_t size) {
  if (!t) return nullptr;
  TORCH_CHECK(t->scalar_type() == x.scalar_type() && t->is_contiguous() && t->numel() == size, "weight must fit the rows in dtype and size");
  return t->const_data_ptr();
}

Tensor rms_norm_tensor(const Tensor& x, const Tensor& weight, double eps, int64_t how) {
  const Tensor flat = as_rows(x);
  const int64_t size = x.size(-1);
  const void* w = same_type(weight, x, size);
  Tensor out = at::empty(x.sizes(), x.options());
  over_rows(flat.size(0), size, [&](int64_t begin, int64_t end) {
    rms_norm(storage_of(x.scalar_type()), rows_of(flat), w, out.data_ptr(), begin, end, size, static_cast<float>(eps), static_cast<RmsWeight>(how));
  });
  return out;
}

Tensor layer_norm_tensor(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps) {
  const Tensor flat = as_rows(x);
  const int64_t size = x.size(-1);
  const void *w = same_type(weight, x, size), *b = same_type(bias, x, size);
  Tensor out = at::empty(x.sizes(), x.options());
  over_rows(flat.size(0), size, [&](int64_t begin, int64_t end) {
    layer_norm(storage_of(x.scalar_type()), rows_of(flat), w, b, out.data_ptr(), begin, end, size, static_cast<float>(eps));
  });
  return out;
}

Tensor activate_tensor(const Tensor& x, int64_t kind, const std::optional<Tensor>& other) {
  const Activation function = activation_of(kind);
  const Tensor flat = as_rows(x), by = other ? as_rows(*other) : flat;
  TORCH_CHECK(by.sizes() == flat.sizes() && by.scalar_type() == flat.scalar_type(), "gate and value must have the same shape and dtype");
  Tensor out = at::empty(x.sizes(), x.options());
  const Rows factor = other ? rows_of(by) : Rows{nullptr, 0};
  over_rows(flat.size(0), x.size(-1), [&](int64_t begin, int64_t end) {
    activate(storage_of(x.scalar_type()), function, rows_of(flat), factor, out.data_ptr(), begin, end, x.size(-1));
  });
  return out;
}

// x [1, H, T, D] with any strides but the last, cos and sin [1, T, R] -> [1, H, T, D], stored as [T, H, D].
Tensor rotate_tensor(const Tensor& given, const Tensor& cos, const Tensor& sin) {
  const Tensor x = given.stride(3) == 1 ? given : given.contiguous();
  const int64_t heads = x.size(1), tokens = x.size(2), size = x.size(3), rotary = cos.size(-1);
  TORCH_CHECK(x.size(0) == 1 && rotary % 2 == 0 && rotary <= size, "x must be [1, H, T, D] and cos [1, T, R] with even R <= D");
  const Tensor c = cos.contiguous(), s = sin.contiguous();
  TORCH_CHECK(c.numel() == tokens * rotary && s.numel() == tokens * rotary && c.scalar_type() == s.scalar_type(), "cos and sin must be alike");
  const Storage angle_type = storage_of(c.scalar_type());
  TORCH_CHECK(angle_type == storage_of(x.scalar_type()) || angle_type == Storage::float32, "cos and sin must have the dtype of x or float32");
  Tensor out = at::empty({1, tokens, heads, size}, x.options());
  over_rows(tokens, heads * size, [&](int64_t begin, int64_t end) {
    rotate(storage_of(x.scalar_type()), angle_type, x.const_data_ptr(), x.stride(2), x.stride(1), c.const_data_ptr(), s.const_data_ptr(), out.data_ptr(),
           begin, end, heads, size, rotary);
  });
  return out.transpose(1, 2);
}

// Rows of `from` [T, H, D] go to `slots` of `to` [blocks, H, block_size, D], or int8 [blocks, H, block_size, D + 4].
void scatter_rows(const Tensor& from, const Tensor& to, const int64_t* slots) {
  const Tensor rows = from.stride(2) == 1 ? from : from.contiguous();
  const int64_t size = numbers_of(to);
  TORCH_CHECK(from.dim() == 3 && from.size(1) == to.size(1) && from.size(2) == size && (is_rounded(to) || from.scalar_type() == to.scalar_type()),
              "rows must fit the cache in dtype and size");
  const Storage type = storage_of(rows.scalar_type());
  over_rows(rows.size(0), to.size(1) * size, [&](int64_t begin, int64_t end) {
    write_slots(type, rows.const_data_ptr(), rows.stride(0), rows.stride(1), size, slots, begin, end, slots_of(to));
  });
}

void write_slots_tensor(const Tensor& keys, const Tensor& values, const Tensor& key_cache, const Tensor& value_cache, const Tensor& slots) {
  TORCH_CHECK(slots.numel() == keys.size(0) && slots.numel() == values.size(0), "slots must be one a token");
  check_slots(slots, key_cache, value_cache);
  scatter_rows(keys, key_cache, slots.const_data_ptr<int64_t>());
  scatter_rows(values, value_cache, slots.const_data_ptr<int64_t>());
}

}  // namespace

bool is_rounded(const Tensor& cache) { return cache.scalar_type() == at::kChar; }

int64_t numbers_of(const Tensor& cache) { return cache.size(3) - (is_rounded(cache) ? scale_bytes : 0); }

HeadSlots slots_of(const Tensor& cache) {
  return {cache.mutable_data_ptr(), cache.size(1), cache.size(2), cache.size(3) * cache.element_size(), is_rounded(cache)};
}

void check_slots(const Tensor& slots, const Tensor& keys, const Tensor& values) {
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous(), "slots must be int64");
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (const Tensor* cache : {&keys, &values}) {
    TORCH_CHECK(cache->dim() == 4 && cache->is_contiguous(), "keys and values must be contiguous [blocks, heads, block_size, size]");
    const int64_t limit = cache->size(0) * cache->size(2);
    for (int64_t i = 0; i < slots.numel(); ++i)
      TORCH_CHECK(slot[i] >= 0 && slot[i] < limit, "slot ", slot[i], " is outside the cache of ", limit);
  }
}

void bind_elementwise(pybind11::module_& module) {
  using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("rms_norm", &rms_norm_tensor, Unlocked());
  module.def("layer_norm", &layer_norm_tensor, Unlocked());
  module.def("activate", &activate_tensor, Unlocked());
  module.def("rotate", &rotate_tensor, Unlocked());
  module.def("write_slots", &write_slots_tensor, Unlocked());
}

}  // namespace echelon
