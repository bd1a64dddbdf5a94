// Tensors in, tensors out: checks, memory and threads around the linear layers.
#include <ATen/Parallel.h>
#include <omp.h>
#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <string>

#include "../clock.h"
#include "bindings.h"

namespace echelon {
namespace {

using at::Tensor;

constexpr int64_t huge_page = 2 << 20;
constexpr int64_t worth_sharing = 128 * 1024;  // bytes of weight that one worker reads in about the time it takes to wake another

// Memory that a calling thread keeps between calls, so that no call pays for fresh pages. It grows to the largest pass. In a large
// page its parts do not compete for the same sets of the second-level cache, as scattered small pages may.
class Scratch {
 public:
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      const int64_t whole = (bytes + huge_page - 1) / huge_page * huge_page;
      memory_.reset(static_cast<char*>(std::aligned_alloc(huge_page, whole)));
      size_ = memory_ ? whole : 0;
      if (!memory_) throw std::bad_alloc();
      madvise(memory_.get(), whole, MADV_HUGEPAGE);
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

// Large weights are read end to end: in large pages, where the system has them, fewer addresses need translating.
void advise_large_pages(const Tensor& tensor) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const auto first = (begin + huge_page - 1) / huge_page * huge_page, last = (begin + tensor.nbytes()) / huge_page * huge_page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

Tensor pack(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.size(0) > 0 && weight.size(1) > 0, "pack_linear takes a weight [N, K], not ", weight.sizes());
  const Storage type = storage_of(weight.scalar_type());
  const int64_t columns = weight.size(0), depth = weight.size(1), grain = type == Storage::bfloat16 ? 2 : 1, num_tiles = linear::tiles(columns);
  Tensor packed = at::empty({num_tiles, linear::padded_depth(depth, type) / grain, linear::tile, grain}, weight.options().requires_grad(false));
  advise_large_pages(packed);
  at::parallel_for(0, num_tiles, 1, [&](int64_t first, int64_t last) {
    linear::pack_tiles(weight.data_ptr(), weight.stride(0), weight.stride(1), columns, depth, type, first, last, packed.data_ptr());
  });
  return packed;
}

void work(const linear::Pass& pass, Worker worker, char* x, char* sums) {
  const int64_t tiles = linear::tiles(pass.problem.weight.columns);
  pass.pack(worker, x);
  worker.wait();
  pass.multiply(worker.first(tiles), worker.last(tiles), x, reinterpret_cast<float*>(sums + worker.part * pass.sums_bytes()));
}

void run(const linear::Pass& pass, int64_t weight_bytes) {
  const bool alone = at::in_parallel_region() || weight_bytes * (1 + pass.rows / 16) < worth_sharing;
  const int64_t parts = alone ? 1 : at::get_num_threads();
  const int64_t x_bytes = (pass.x_bytes() + 63) / 64 * 64;
  char* x = scratch(x_bytes + parts * pass.sums_bytes());
  if (parts == 1) return work(pass, {}, x, x + x_bytes);
#pragma omp parallel num_threads(parts)
  work(pass, {omp_get_thread_num(), omp_get_num_threads()}, x, x + x_bytes);
}

Tensor multiply(const linear::Family& family, const Tensor& input, const Tensor& packed, int64_t columns, const std::optional<Tensor>& bias,
                int64_t activation, bool float32) {
  const Clocked clocked(Part::linear);
  TORCH_CHECK(input.dim() >= 1, "packed_linear takes x [..., K], not a number");
  TORCH_CHECK(input.scalar_type() == packed.scalar_type(), "x is ", input.scalar_type(), ", the weight ", packed.scalar_type());
  const Tensor flat = input.dim() == 2 ? input : input.reshape({-1, input.size(-1)});
  const Tensor x = flat.stride(1) == 1 ? flat : flat.contiguous();
  const int64_t rows = x.size(0);
  const linear::Weight weight = weight_of(packed, columns, x.size(1));
  at::DimVector shape(input.sizes());
  shape.back() = columns;
  Tensor out = at::empty(shape, x.options().dtype(float32 ? at::kFloat : x.scalar_type()));
  const linear::Problem problem{x.data_ptr(),
                                rows,
                                x.stride(0),
                                weight,
                                bias_of(bias, columns),
                                activation_of(activation),
                                out.data_ptr(),
                                columns,
                                float32};
  for (int64_t first = 0; first < rows; first += linear::most_rows)
    run({problem, family, first, std::min(linear::most_rows, rows - first)}, packed.nbytes());
  return out;
}

Tensor packed_rows(const Tensor& packed, int64_t columns, int64_t depth, const Tensor& ids) {
  const linear::Weight weight = weight_of(packed, columns, depth);
  const Tensor flat = ids.to(at::kLong).contiguous().flatten();
  TORCH_CHECK(flat.numel() == 0 || (flat.min().item<int64_t>() >= 0 && flat.max().item<int64_t>() < columns),
              "an index is outside the table of ", columns, " rows");
  Tensor out = at::empty({flat.numel(), depth}, packed.options());
  const int64_t* id = flat.data_ptr<int64_t>();
  char* to = static_cast<char*>(out.data_ptr());
  at::parallel_for(0, flat.numel(), 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) linear::unpack_row(weight, id[i], to + i * depth * packed.element_size());
  });
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(depth);
  return out.view(shape);
}

const linear::Family& family_of(at::ScalarType dtype) { return linear::family(active_features(), storage_of(dtype)); }

Tensor packed_linear(const Tensor& x, const Tensor& packed, int64_t columns, const std::optional<Tensor>& bias, int64_t activation,
                     bool float32) {
  return multiply(family_of(packed.scalar_type()), x, packed, columns, bias, activation, float32);
}

// For tests: in float32, by emulated tile registers.
Tensor emulated_amx_linear(const Tensor& x, const Tensor& packed, int64_t columns) {
  TORCH_CHECK(packed.scalar_type() == at::kBFloat16, "AMX is emulated for bfloat16 alone");
  return multiply(linear::emulated_amx(), x, packed, columns, std::nullopt, 0, true);
}

}  // namespace

char* scratch(int64_t bytes) {
  thread_local Scratch memory;
  return memory.reserve(bytes);
}

linear::Weight weight_of(const Tensor& packed, int64_t columns, int64_t depth) {
  const Storage type = storage_of(packed.scalar_type());
  TORCH_CHECK(packed.dim() == 4 && packed.is_contiguous() && packed.size(0) == linear::tiles(columns) &&
                  packed.size(1) * packed.size(3) == linear::padded_depth(depth, type) && packed.size(2) == linear::tile,
              "a packed weight of shape ", packed.sizes(), " does not hold ", columns, " × ", depth, " entries");
  return {packed.data_ptr(), columns, depth, type};
}

const float* bias_of(const std::optional<Tensor>& bias, int64_t columns) {
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->is_contiguous() && bias->numel() == columns),
              "the bias must be float32 [", columns, "]");
  return bias ? bias->const_data_ptr<float>() : nullptr;
}

void bind_linear(pybind11::module_& module) {
  using Release = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("pack_linear", &pack, Release());
  module.def("packed_linear", &packed_linear, Release());
  module.def("emulated_amx_linear", &emulated_amx_linear, Release());
  module.def("packed_rows", &packed_rows, Release());
  module.def("linear_family", [](at::ScalarType dtype) { return family_of(dtype).name; });
}

}  // namespace echelon
