// Tensors as PyTorch hands them over by its stable interface, which is the same for every version from STABLE on: no symbol of C++ crosses it.
#pragma once

#include <omp.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../isa.h"

namespace echelon {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
using List = const std::vector<T>&;

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream words;
  (words << ... << parts);
  throw std::runtime_error(words.str());
}

// What is not met is refused in these words, which come out as a RuntimeError.
#define CHECK(is_met, ...)                     \
  do {                                         \
    if (!(is_met)) ::echelon::refuse(__VA_ARGS__); \
  } while (false)

inline std::vector<int64_t> strides_of(List<int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return strides;
}

inline Tensor empty(List<int64_t> sizes, ScalarType type) {
  const std::vector<int64_t> strides = strides_of(sizes);
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                         torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)),
                                                         aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

inline std::vector<int64_t> sizes_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }
inline int64_t last_size(const Tensor& x) { return x.size(x.dim() - 1); }
inline int64_t bytes_in(const Tensor& x) { return x.numel() * static_cast<int64_t>(x.element_size()); }
inline Tensor whole(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

template <typename T>
const T* data_of(const Tensor& x) {
  return static_cast<const T*>(x.const_data_ptr());
}

template <typename T>
T* to_data_of(const Tensor& x) {
  return static_cast<T*>(x.mutable_data_ptr());
}

// The numbers of x by its last dimension, as rows `stride` apart: where they lie, or in a copy where its dimensions do not collapse into one.
struct RowsOf {
  explicit RowsOf(const Tensor& x) : kept(is_by_rows(x) ? x : torch::stable::contiguous(x)), data(kept.const_data_ptr()), size(last_size(x)) {
    rows = size ? x.numel() / size : 0, stride = size;
    int64_t d = kept.dim() - 2;
    while (d >= 0 && kept.size(d) == 1) --d;
    if (d >= 0) stride = kept.stride(d);
  }

  Tensor kept;  // x, or the copy
  const void* data;
  int64_t rows, size, stride;

 private:
  static bool is_by_rows(const Tensor& x) {
    if (last_size(x) != 1 && x.stride(x.dim() - 1) != 1) return false;
    int64_t next = -1;  // the stride of the next dimension outwards that has more than one entry
    for (int64_t d = x.dim() - 1; d-- > 0;) {
      if (x.size(d) == 1) continue;
      if (next >= 0 && x.stride(d) != next) return false;
      next = x.stride(d) * x.size(d);
    }
    return true;
  }
};

// PyTorch's lists hold no unsigned numbers: those beyond 2^63 come as what is left of 2^64.
inline uint64_t unsigned_of(int64_t number) { return static_cast<uint64_t>(number); }

// Calls work(first, last) for parts of `count` things by PyTorch's threads. Nothing may be thrown in there: what there is to say about
// ECHELON_ISA is said before.
template <typename Work>
void in_parallel(int64_t count, int64_t grain, const Work& work) {
  active_features();
  torch::stable::parallel_for(0, count, grain, work);
}

inline int64_t num_threads() { return torch::stable::get_num_threads(); }

}  // namespace echelon
