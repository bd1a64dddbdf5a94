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

// A packed weight. Large ones are read end to end and fetched ahead, for which addresses must be at hand: they begin at a large page, so that
// all of them but what is left behind the last whole one lies in large pages, where the system has them.
Tensor empty_weight(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(options.dtype().itemsize());
  const int64_t pages = (bytes + 4095) / 4096 * 4096, span = pages + huge_page;
  void* const mapped = bytes < huge_page ? MAP_FAILED : mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return at::empty(sizes, options);
  char *const begin = static_cast<char*>(mapped), *const end = begin + span;
  char* const first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + huge_page - 1) / huge_page * huge_page);
  if (begin < first) munmap(begin, first - begin);
  if (first + pages < end) munmap(first + pages, end - first - pages);
  if (mprotect(first, pages, PROT_READ | PROT_WRITE) != 0) {
    munmap(first, pages);
    return at::empty(sizes, options);  // which says that there is no memory
  }
  madvise(first, bytes / huge_page * huge_page, MADV_HUGEPAGE);
  return at::from_blob(first, sizes, [pages](void* weight) { munmap(weight, pages); }, options);
}

Tensor pack(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.size(0) > 0 && weight.size(1) > 0, "pack_linear takes a weight [N, K], not ", weight.sizes());
  const Storage type = storage_of(weight.scalar_type());
  const int64_t columns = weight.size(0), depth = weight.size(1), grain = type == Storage::bfloat16 ? 2 : 1, num_tiles = linear::tiles(columns);
  const int64_t padded = linear::padded_depth({nullptr, columns, depth, type});
  Tensor packed = empty_weight({num_tiles, padded / grain, linear::tile, grain}, weight.options().requires_grad(false));
  at::parallel_for(0, num_tiles, 1, [&](int64_t first, int64_t last) {
    linear::pack_tiles(weight.data_ptr(), weight.stride(0), weight.stride(1), columns, depth, type, first, last, packed.data_ptr());
  });
  return packed;
}

// values uint8 [N, K], scales float32 [N, G], zeros uint8 [N, G] or none: G is 1 for 8 bits, and K is G groups of 32, 64 or 128 for 4.
Tensor pack_integers(const Tensor& values, const Tensor& scales, const std::optional<Tensor>& zeros, int64_t bits) {
  TORCH_CHECK(bits == 8 || bits == 4, "a weight has 8 or 4 bits, not ", bits);
  TORCH_CHECK(values.dim() == 2 && values.scalar_type() == at::kByte && values.is_contiguous() && values.numel() > 0,
              "pack_integers takes values uint8 [N, K]");
  const int64_t columns = values.size(0), depth = values.size(1), groups = scales.dim() == 2 ? scales.size(1) : 0;
  TORCH_CHECK(scales.scalar_type() == at::kFloat && scales.is_contiguous() && groups > 0 && scales.size(0) == columns && depth % groups == 0,
              "scales must be float32 [N, G] with G a divisor of K");
  const int64_t group = depth / groups;
  TORCH_CHECK(bits == 8 ? groups == 1 && !zeros : group == 32 || group == 64 || group == 128,
              "8 bits have one scale a column and no zeros, 4 bits groups of 32, 64 or 128, not of ", group);
  TORCH_CHECK(depth < 131072, "sums over ", depth, " products do not fit");
  TORCH_CHECK(!zeros || (zeros->scalar_type() == at::kByte && zeros->is_contiguous() && zeros->sizes() == scales.sizes()),
              "zeros must be uint8 [N, G]");
  const linear::Integers integers{static_cast<int>(bits), bits == 4 ? group : 0, zeros.has_value()};
  const linear::Weight weight{nullptr, columns, depth, Storage::float32, integers};
  Tensor packed = empty_weight({linear::tiles(columns), linear::tile_bytes(weight)}, values.options());
  const linear::Quantised source{values.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>(),
                                 zeros ? zeros->const_data_ptr<uint8_t>() : nullptr};
  at::parallel_for(0, linear::tiles(columns), 1,
                   [&](int64_t first, int64_t last) { linear::pack_tiles(source, weight, first, last, packed.data_ptr()); });
  return packed;
}

// A weight [N, K] of any strides along N to values uint8 [N, K] and scales float32 [N, G].
std::tuple<Tensor, Tensor> round_weight(const Tensor& weight, int64_t bits, int64_t group) {
  TORCH_CHECK(weight.dim() == 2 && weight.stride(1) == 1, "round_weight takes a weight [N, K] by rows");
  const int64_t columns = weight.size(0), depth = weight.size(1);
  TORCH_CHECK(bits == 8 || (bits == 4 && (group == 32 || group == 64 || group == 128) && depth % group == 0), "no weight of depth ", depth, " has ",
              bits, " bits in groups of ", group);
  const Storage type = storage_of(weight.scalar_type());
  const int64_t groups = bits == 8 ? 1 : depth / group, row_bytes = weight.stride(0) * weight.element_size();
  Tensor values = at::empty({columns, depth}, weight.options().dtype(at::kByte)), scales = at::empty({columns, groups}, weight.options().dtype(at::kFloat));
  const char* const from = static_cast<const char*>(weight.const_data_ptr());
  uint8_t* const to = values.mutable_data_ptr<uint8_t>();
  float* const to_scales = scales.mutable_data_ptr<float>();
  const linear::Integers integers{static_cast<int>(bits), group, false};
  at::parallel_for(0, columns, 4, [&](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; ++n) linear::round_weight(from + n * row_bytes, depth, type, integers, to + n * depth, to_scales + n * groups);
  });
  return {values, scales};
}

void work(const linear::Pass& pass, Worker worker, Shares& shares, char* x, char* sums) {
  pass.pack(worker, x);
  worker.wait();
  shares.take(worker, linear::tiles(pass.problem.weight.columns), linear::tiles_at_once, [&](int64_t first, int64_t last) {
    pass.multiply(first, last, x, reinterpret_cast<float*>(sums + worker.part * pass.sums_bytes()));
  });
}

void run(const linear::Pass& pass, int64_t weight_bytes) {
  const bool alone = at::in_parallel_region() || weight_bytes * (1 + pass.rows / 16) < worth_sharing;
  const int64_t parts = alone ? 1 : at::get_num_threads();
  const int64_t x_bytes = (pass.x_bytes() + 63) / 64 * 64;
  char* x = scratch(x_bytes + parts * pass.sums_bytes());
  Shares shares(parts);
  if (parts == 1) return work(pass, {}, shares, x, x + x_bytes);
#pragma omp parallel num_threads(parts)
  work(pass, {omp_get_thread_num(), omp_get_num_threads()}, shares, x, x + x_bytes);
}

Tensor multiply(const linear::Family& family, const Tensor& input, const Tensor& packed, int64_t columns, const IntegerArguments& integers,
                const std::optional<Tensor>& bias, int64_t activation, bool float32) {
  const Clocked clocked(Part::linear);
  TORCH_CHECK(input.dim() >= 1, "packed_linear takes x [..., K], not a number");
  const Tensor flat = input.dim() == 2 ? input : input.reshape({-1, input.size(-1)});
  const Tensor x = flat.stride(1) == 1 ? flat : flat.contiguous();
  const int64_t rows = x.size(0);
  const linear::Weight weight = weight_of(packed, columns, x.size(1), x.scalar_type(), integers);
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
  const linear::Weight weight = weight_of(packed, columns, depth, packed.scalar_type(), {0, 0, false});
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

const linear::Family& family_of(at::ScalarType dtype, int64_t bits) {
  return linear::family(active_features(), storage_of(dtype), static_cast<int>(bits));
}

Tensor packed_linear(const Tensor& x, const Tensor& packed, int64_t columns, const IntegerArguments& integers, const std::optional<Tensor>& bias,
                     int64_t activation, bool float32) {
  return multiply(family_of(x.scalar_type(), std::get<0>(integers)), x, packed, columns, integers, bias, activation, float32);
}

// For tests: in float32, by emulated tile registers.
Tensor emulated_amx_linear(const Tensor& x, const Tensor& packed, int64_t columns, const IntegerArguments& integers) {
  const int64_t bits = std::get<0>(integers);
  TORCH_CHECK(bits == 8 || packed.scalar_type() == at::kBFloat16, "AMX is emulated for bfloat16 and for 8 bits");
  return multiply(linear::emulated_amx(static_cast<int>(bits)), x, packed, columns, integers, std::nullopt, 0, true);
}

}  // namespace

char* scratch(int64_t bytes) {
  thread_local Scratch memory;
  return memory.reserve(bytes);
}

linear::Weight weight_of(const Tensor& packed, int64_t columns, int64_t depth, at::ScalarType type, const IntegerArguments& integers) {
  const auto& [bits, group, has_zeros] = integers;
  const linear::Weight weight{packed.data_ptr(), columns, depth, storage_of(type), {static_cast<int>(bits), group, has_zeros}};
  TORCH_CHECK(packed.scalar_type() == (bits ? at::kByte : type), "x is ", type, ", the weight ", packed.scalar_type());
  TORCH_CHECK(bits == 0 || bits == 8 || (bits == 4 && (group == 32 || group == 64 || group == 128) && depth % group == 0),
              "no weight has ", bits, " bits in groups of ", group);
  TORCH_CHECK(packed.is_contiguous() && static_cast<int64_t>(packed.nbytes()) == linear::bytes_of(weight), "a packed weight of shape ",
              packed.sizes(), " does not hold ", columns, " × ", depth, " entries");
  return weight;
}

const float* bias_of(const std::optional<Tensor>& bias, int64_t columns) {
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->is_contiguous() && bias->numel() == columns),
              "the bias must be float32 [", columns, "]");
  return bias ? bias->const_data_ptr<float>() : nullptr;
}

void bind_linear(pybind11::module_& module) {
  using Release = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("pack_linear", &pack, Release());
  module.def("round_weight", &round_weight, Release());
  module.def("pack_integers", &pack_integers, Release());
  module.def("packed_linear", &packed_linear, Release());
  module.def("emulated_amx_linear", &emulated_amx_linear, Release(), pybind11::arg("x"), pybind11::arg("packed"), pybind11::arg("columns"),
             pybind11::arg("integers") = IntegerArguments{0, 0, false});
  module.def("packed_rows", &packed_rows, Release());
  module.def("linear_family", [](at::ScalarType dtype, int64_t bits) { return family_of(dtype, bits).name; }, pybind11::arg("dtype"), pybind11::arg("bits") = 0);
}

}  // namespace echelon
