// Tensors in, tensors out: checks, memory and threads around the linear layers.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "../clock.h"
#include "bindings.h"

namespace echelon {
namespace {

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
Tensor empty_weight(List<int64_t> sizes, ScalarType type, int64_t entry_bytes) {
  const int64_t bytes = std::accumulate(sizes.begin(), sizes.end(), entry_bytes, std::multiplies<>());
  const int64_t pages = (bytes + 4095) / 4096 * 4096, span = pages + huge_page;
  void* const mapped = bytes < huge_page ? MAP_FAILED : mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return empty(sizes, type);
  char *const begin = static_cast<char*>(mapped), *const end = begin + span;
  char* const first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + huge_page - 1) / huge_page * huge_page);
  if (begin < first) munmap(begin, first - begin);
  if (first + pages < end) munmap(first + pages, end - first - pages);
  if (mprotect(first, pages, PROT_READ | PROT_WRITE) != 0) {
    munmap(first, pages);
    return empty(sizes, type);  // which says that there is no memory
  }
  madvise(first, bytes / huge_page * huge_page, MADV_HUGEPAGE);
  return torch::stable::from_blob(first, sizes, strides_of(sizes), torch::stable::Device(torch::headeronly::DeviceType::CPU), type,
                                  [pages](void* weight) { munmap(weight, pages); });
}

Tensor pack(const Tensor& weight) {
  CHECK(weight.dim() == 2 && weight.size(0) > 0 && weight.size(1) > 0, "pack_linear takes a weight [N, K], not one of ", weight.dim(), " dimensions");
  const Storage type = storage_of(weight.scalar_type());
  const int64_t columns = weight.size(0), depth = weight.size(1), grain = type == Storage::bfloat16 ? 2 : 1, num_tiles = linear::tiles(columns);
  const int64_t padded = linear::padded_depth({nullptr, columns, depth, type});
  const Tensor packed = empty_weight({num_tiles, padded / grain, linear::tile, grain}, weight.scalar_type(), weight.element_size());
  const void* const from = weight.const_data_ptr();
  void* const to = packed.mutable_data_ptr();
  in_parallel(num_tiles, 1, [&](int64_t first, int64_t last) {
    linear::pack_tiles(from, weight.stride(0), weight.stride(1), columns, depth, type, first, last, to);
  });
  return packed;
}

// values uint8 [N, K], scales float32 [N, G], zeros uint8 [N, G] or none: G is 1 for 8 bits, and K is G groups of 32, 64 or 128 for 4.
Tensor pack_integers(const Tensor& values, const Tensor& scales, const std::optional<Tensor>& zeros, int64_t bits) {
  CHECK(bits == 8 || bits == 4, "a weight has 8 or 4 bits, not ", bits);
  CHECK(values.dim() == 2 && values.scalar_type() == ScalarType::Byte && values.is_contiguous() && values.numel() > 0,
              "pack_integers takes values uint8 [N, K]");
  const int64_t columns = values.size(0), depth = values.size(1), groups = scales.dim() == 2 ? scales.size(1) : 0;
  CHECK(scales.scalar_type() == ScalarType::Float && scales.is_contiguous() && groups > 0 && scales.size(0) == columns && depth % groups == 0,
              "scales must be float32 [N, G] with G a divisor of K");
  const int64_t group = depth / groups;
  CHECK(bits == 8 ? groups == 1 && !zeros : group == 32 || group == 64 || group == 128,
              "8 bits have one scale a column and no zeros, 4 bits groups of 32, 64 or 128, not of ", group);
  CHECK(depth < 131072, "sums over ", depth, " products do not fit");
  CHECK(!zeros || (zeros->scalar_type() == ScalarType::Byte && zeros->is_contiguous() && sizes_of(*zeros) == sizes_of(scales)),
              "zeros must be uint8 [N, G]");
  const linear::Integers integers{static_cast<int>(bits), bits == 4 ? group : 0, zeros.has_value()};
  const linear::Weight weight{nullptr, columns, depth, Storage::float32, integers};
  const Tensor packed = empty_weight({linear::tiles(columns), linear::tile_bytes(weight)}, ScalarType::Byte, 1);
  void* const to = packed.mutable_data_ptr();
  const linear::Quantised source{data_of<uint8_t>(values), data_of<float>(scales), zeros ? data_of<uint8_t>(*zeros) : nullptr};
  in_parallel(linear::tiles(columns), 1, [&](int64_t first, int64_t last) { linear::pack_tiles(source, weight, first, last, to); });
  return packed;
}

// A weight [N, K] of any strides along N to values uint8 [N, K] and scales float32 [N, G].
std::tuple<Tensor, Tensor> round_weight(const Tensor& weight, int64_t bits, int64_t group) {
  CHECK(weight.dim() == 2 && weight.stride(1) == 1, "round_weight takes a weight [N, K] by rows");
  const int64_t columns = weight.size(0), depth = weight.size(1);
  CHECK(bits == 8 || (bits == 4 && (group == 32 || group == 64 || group == 128) && depth % group == 0), "no weight of depth ", depth, " has ",
              bits, " bits in groups of ", group);
  const Storage type = storage_of(weight.scalar_type());
  const int64_t groups = bits == 8 ? 1 : depth / group, row_bytes = weight.stride(0) * static_cast<int64_t>(weight.element_size());
  const Tensor values = empty({columns, depth}, ScalarType::Byte), scales = empty({columns, groups}, ScalarType::Float);
  const char* const from = data_of<char>(weight);
  uint8_t* const to = to_data_of<uint8_t>(values);
  float* const to_scales = to_data_of<float>(scales);
  const linear::Integers integers{static_cast<int>(bits), group, false};
  in_parallel(columns, 4, [&](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; ++n) linear::round_weight(from + n * row_bytes, depth, type, integers, to + n * depth, to_scales + n * groups);
  });
  return {values, scales};
}

void work(const linear::Pass& pass, Worker worker, Shares& shares, char* x, char* sums) {
  pass.pack(worker, x);
  worker.wait();
  shares.take(worker, linear::tiles(pass.problem.weight.columns), linear::tiles_at_once, pass.least(), [&](int64_t first, int64_t last) {
    pass.multiply(first, last, x, reinterpret_cast<float*>(sums + worker.part * pass.sums_bytes()));
  });
}

void run(const linear::Pass& pass, int64_t weight_bytes) {
  const bool alone = omp_in_parallel() || weight_bytes * (1 + pass.rows / 16) < worth_sharing;
  const int64_t parts = alone ? 1 : num_threads();
  const int64_t x_bytes = linear::whole_pages(pass.x_bytes());
  char* x = scratch(x_bytes + parts * pass.sums_bytes());
  Shares shares(parts);
  if (parts == 1) return work(pass, {}, shares, x, x + x_bytes);
#pragma omp parallel num_threads(parts)
  work(pass, {omp_get_thread_num(), omp_get_num_threads()}, shares, x, x + x_bytes);
}

Tensor multiply(const linear::Family& family, const Tensor& input, const Tensor& packed, int64_t columns, IntegerArguments integers,
                const std::optional<Tensor>& bias, int64_t activation, bool float32) {
  const Clocked clocked(Part::linear);
  CHECK(input.dim() >= 1, "packed_linear takes x [..., K], not a number");
  const RowsOf x(input);
  const ScalarType type = input.scalar_type();
  const linear::Weight weight = weight_of(packed, columns, x.size, type, integers);
  std::vector<int64_t> shape = sizes_of(input);
  shape.back() = columns;
  const Tensor out = empty(shape, float32 ? ScalarType::Float : type);
  const linear::Problem problem{x.data,
                                x.rows,
                                x.stride,
                                weight,
                                bias_of(bias, columns),
                                activation_of(activation),
                                out.mutable_data_ptr(),
                                columns,
                                float32};
  const int64_t weight_bytes = bytes_in(packed);
  for (int64_t first = 0; first < x.rows; first += linear::most_rows)
    run({problem, family, first, std::min(linear::most_rows, x.rows - first)}, weight_bytes);
  return out;
}

Tensor packed_rows(const Tensor& packed, int64_t columns, int64_t depth, const Tensor& ids) {
  const linear::Weight weight = weight_of(packed, columns, depth, packed.scalar_type(), {});
  const Tensor flat = whole(ids.scalar_type() == ScalarType::Long ? ids : torch::stable::to(ids, ScalarType::Long));
  const int64_t* const id = data_of<int64_t>(flat);
  CHECK(std::all_of(id, id + flat.numel(), [&](int64_t i) { return i >= 0 && i < columns; }), "an index is outside the table of ", columns, " rows");
  std::vector<int64_t> shape = sizes_of(ids);
  shape.push_back(depth);
  const Tensor out = empty(shape, packed.scalar_type());
  char* const to = to_data_of<char>(out);
  const int64_t row_bytes = depth * static_cast<int64_t>(packed.element_size());
  in_parallel(flat.numel(), 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) linear::unpack_row(weight, id[i], to + i * row_bytes);
  });
  return out;
}

const linear::Family& family_of(const Tensor& x, int64_t bits) {
  const int64_t depth = x.dim() ? last_size(x) : 0, rows = depth ? x.numel() / depth : 1;
  return linear::family(active_features(), storage_of(x.scalar_type()), static_cast<int>(bits), rows);
}

Tensor packed_linear(const Tensor& x, const Tensor& packed, int64_t columns, int64_t bits, int64_t group, bool has_zeros,
                     const std::optional<Tensor>& bias, int64_t activation, bool float32) {
  return multiply(family_of(x, bits), x, packed, columns, {bits, group, has_zeros}, bias, activation, float32);
}

std::string linear_family(const Tensor& like, int64_t bits) { return family_of(like, bits).name; }

// For tests: in float32, by emulated tile registers.
Tensor emulated_amx_linear(const Tensor& x, const Tensor& packed, int64_t columns, int64_t bits, int64_t group, bool has_zeros) {
  CHECK(bits || packed.scalar_type() == ScalarType::BFloat16, "AMX is emulated for bfloat16 and for integers");
  return multiply(linear::emulated_amx(static_cast<int>(bits)), x, packed, columns, {bits, group, has_zeros}, std::nullopt, 0, true);
}

}  // namespace

char* scratch(int64_t bytes) {
  thread_local Scratch memory;
  return memory.reserve(bytes);
}

linear::Weight weight_of(const Tensor& packed, int64_t columns, int64_t depth, ScalarType type, IntegerArguments integers) {
  const auto [bits, group, has_zeros] = integers;
  const linear::Weight weight{packed.const_data_ptr(), columns, depth, storage_of(type), {static_cast<int>(bits), group, has_zeros}};
  CHECK(packed.scalar_type() == (bits ? ScalarType::Byte : type), "x is ", type, ", the weight ", packed.scalar_type());
  CHECK(bits == 0 || bits == 8 || (bits == 4 && (group == 32 || group == 64 || group == 128) && depth % group == 0),
              "no weight has ", bits, " bits in groups of ", group);
  CHECK(packed.is_contiguous() && bytes_in(packed) == linear::bytes_of(weight), "a packed weight of ", bytes_in(packed),
        " bytes does not hold ", columns, " × ", depth, " entries");
  return weight;
}

const float* bias_of(const std::optional<Tensor>& bias, int64_t columns) {
  CHECK(!bias || (bias->scalar_type() == ScalarType::Float && bias->is_contiguous() && bias->numel() == columns),
              "the bias must be float32 [", columns, "]");
  return bias ? data_of<float>(*bias) : nullptr;
}

void define_linear(Library& library) {
  library.def("pack_linear(Tensor weight) -> Tensor");
  library.def("round_weight(Tensor weight, int bits, int group) -> (Tensor, Tensor)");
  library.def("pack_integers(Tensor values, Tensor scales, Tensor? zeros, int bits) -> Tensor");
  library.def("packed_linear(Tensor x, Tensor packed, int columns, int bits, int group, bool has_zeros, Tensor? bias, int activation, "
              "bool float32) -> Tensor");
  library.def("emulated_amx_linear(Tensor x, Tensor packed, int columns, int bits=0, int group=0, bool has_zeros=False) -> Tensor");
  library.def("packed_rows(Tensor packed, int columns, int depth, Tensor ids) -> Tensor");
  library.def("linear_family(Tensor like, int bits) -> str");
  library.impl("pack_linear", TORCH_BOX(&pack));
  library.impl("round_weight", TORCH_BOX(&round_weight));
  library.impl("pack_integers", TORCH_BOX(&pack_integers));
  library.impl("packed_linear", TORCH_BOX(&packed_linear));
  library.impl("emulated_amx_linear", TORCH_BOX(&emulated_amx_linear));
  library.impl("packed_rows", TORCH_BOX(&packed_rows));
  library.impl("linear_family", TORCH_BOX(&linear_family));
}

}  // namespace echelon
