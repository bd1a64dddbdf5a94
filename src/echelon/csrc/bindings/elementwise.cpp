// Tensors in, tensors out: checks, allocation and threads around elementwise.cpp.
#include <cstring>
#include <string>

#include "bindings.h"

namespace echelon {
namespace {

constexpr int64_t values_per_task = 16384;  // less is not worth another thread

Rows rows_of(const RowsOf& x) { return {x.data, x.stride}; }

template <typename Work>
void over_rows(int64_t rows, int64_t size, Work work) {
  in_parallel(rows, std::max<int64_t>(1, values_per_task / std::max<int64_t>(1, size)), work);
}

const void* same_type(const std::optional<Tensor>& t, const Tensor& x, int64_t size) {
  if (!t) return nullptr;
  CHECK(t->scalar_type() == x.scalar_type() && t->is_contiguous() && t->numel() == size, "weight must fit the rows in dtype and size");
  return t->const_data_ptr();
}

Tensor rms_norm_tensor(const Tensor& x, const Tensor& weight, double eps, int64_t how) {
  const RowsOf flat(x);
  const int64_t size = flat.size;
  const Storage type = storage_of(x.scalar_type());
  const void* w = same_type(weight, x, size);
  const Tensor out = empty(sizes_of(x), x.scalar_type());
  void* const to = out.mutable_data_ptr();
  over_rows(flat.rows, size, [&](int64_t begin, int64_t end) {
    rms_norm(type, rows_of(flat), w, to, begin, end, size, static_cast<float>(eps), static_cast<RmsWeight>(how));
  });
  return out;
}

Tensor layer_norm_tensor(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps) {
  const RowsOf flat(x);
  const int64_t size = flat.size;
  const Storage type = storage_of(x.scalar_type());
  const void *w = same_type(weight, x, size), *b = same_type(bias, x, size);
  const Tensor out = empty(sizes_of(x), x.scalar_type());
  void* const to = out.mutable_data_ptr();
  over_rows(flat.rows, size, [&](int64_t begin, int64_t end) {
    layer_norm(type, rows_of(flat), w, b, to, begin, end, size, static_cast<float>(eps));
  });
  return out;
}

Tensor activate_tensor(const Tensor& x, int64_t kind, const std::optional<Tensor>& other) {
  const Activation function = activation_of(kind);
  const Storage type = storage_of(x.scalar_type());
  CHECK(!other || (sizes_of(*other) == sizes_of(x) && other->scalar_type() == x.scalar_type()), "gate and value must have the same shape and dtype");
  const RowsOf flat(x);
  const std::optional<RowsOf> by = other ? std::optional<RowsOf>(*other) : std::nullopt;
  const Tensor out = empty(sizes_of(x), x.scalar_type());
  const Rows factor = by ? rows_of(*by) : Rows{nullptr, 0};
  void* const to = out.mutable_data_ptr();
  over_rows(flat.rows, flat.size, [&](int64_t begin, int64_t end) {
    activate(type, function, rows_of(flat), factor, to, begin, end, flat.size);
  });
  return out;
}

// x [1, H, T, D] with any strides but the last, cos and sin [1, T, R] -> [1, H, T, D], stored as [T, H, D].
Tensor rotate_tensor(const Tensor& given, const Tensor& cos, const Tensor& sin) {
  const Tensor x = given.stride(3) == 1 ? given : torch::stable::contiguous(given);
  const int64_t heads = x.size(1), tokens = x.size(2), size = x.size(3), rotary = last_size(cos);
  CHECK(x.size(0) == 1 && rotary % 2 == 0 && rotary <= size, "x must be [1, H, T, D] and cos [1, T, R] with even R <= D");
  const Tensor c = whole(cos), s = whole(sin);
  CHECK(c.numel() == tokens * rotary && s.numel() == tokens * rotary && c.scalar_type() == s.scalar_type(), "cos and sin must be alike");
  const Storage type = storage_of(x.scalar_type()), angle_type = storage_of(c.scalar_type());
  CHECK(angle_type == type || angle_type == Storage::float32, "cos and sin must have the dtype of x or float32");
  const Tensor out = empty({1, tokens, heads, size}, x.scalar_type());
  void* const to = out.mutable_data_ptr();
  over_rows(tokens, heads * size, [&](int64_t begin, int64_t end) {
    rotate(type, angle_type, x.const_data_ptr(), x.stride(2), x.stride(1), c.const_data_ptr(), s.const_data_ptr(), to,
           begin, end, heads, size, rotary);
  });
  return torch::stable::transpose(out, 1, 2);
}

// Rows of `from` [T, H, D] go to `slots` of `to` [blocks, H, block_size, D], or int8 [blocks, H, block_size, D + 4].
void scatter_rows(const Tensor& from, const Tensor& to, const int64_t* slots) {
  const Tensor rows = from.stride(2) == 1 ? from : torch::stable::contiguous(from);
  const int64_t size = numbers_of(to);
  CHECK(from.dim() == 3 && from.size(1) == to.size(1) && from.size(2) == size && (is_rounded(to) || from.scalar_type() == to.scalar_type()),
              "rows must fit the cache in dtype and size");
  const Storage type = storage_of(rows.scalar_type());
  over_rows(rows.size(0), to.size(1) * size, [&](int64_t begin, int64_t end) {
    write_slots(type, rows.const_data_ptr(), rows.stride(0), rows.stride(1), size, slots, begin, end, slots_of(to));
  });
}

void write_slots_tensor(const Tensor& keys, const Tensor& values, const Tensor& key_cache, const Tensor& value_cache, const Tensor& slots) {
  CHECK(slots.numel() == keys.size(0) && slots.numel() == values.size(0), "slots must be one a token");
  check_slots(slots, key_cache, value_cache);
  scatter_rows(keys, key_cache, data_of<int64_t>(slots));
  scatter_rows(values, value_cache, data_of<int64_t>(slots));
}

}  // namespace

bool is_rounded(const Tensor& cache) { return cache.scalar_type() == ScalarType::Char; }

int64_t numbers_of(const Tensor& cache) { return cache.size(3) - (is_rounded(cache) ? scale_bytes : 0); }

HeadSlots slots_of(const Tensor& cache) {
  return {cache.mutable_data_ptr(), cache.size(1), cache.size(2), cache.size(3) * static_cast<int64_t>(cache.element_size()), is_rounded(cache)};
}

void check_slots(const Tensor& slots, const Tensor& keys, const Tensor& values) {
  CHECK(slots.scalar_type() == ScalarType::Long && slots.is_contiguous(), "slots must be int64");
  const int64_t* slot = data_of<int64_t>(slots);
  for (const Tensor* cache : {&keys, &values}) {
    CHECK(cache->dim() == 4 && cache->is_contiguous(), "keys and values must be contiguous [blocks, heads, block_size, size]");
    const int64_t limit = cache->size(0) * cache->size(2);
    for (int64_t i = 0; i < slots.numel(); ++i)
      CHECK(slot[i] >= 0 && slot[i] < limit, "slot ", slot[i], " is outside the cache of ", limit);
  }
}

void define_elementwise(Library& library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps, int how) -> Tensor");
  library.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  library.def("activate(Tensor x, int kind, Tensor? other) -> Tensor");
  library.def("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor");
  library.def("write_slots(Tensor keys, Tensor values, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots) -> ()");
  library.impl("rms_norm", TORCH_BOX(&rms_norm_tensor));
  library.impl("layer_norm", TORCH_BOX(&layer_norm_tensor));
  library.impl("activate", TORCH_BOX(&activate_tensor));
  library.impl("rotate", TORCH_BOX(&rotate_tensor));
  library.impl("write_slots", TORCH_BOX(&write_slots_tensor));
}

}  // namespace echelon
