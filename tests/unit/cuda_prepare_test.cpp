// What the backward's small kernels hand to the main one, on its own: which queries a key tile meets and in which
// order, dO's codes and D, the records of tiles of queries, transposed codes; and what becomes of the sums of dQ and
// dK. What the forward saves of its rows is made up here, so that every number that it can have is met.
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "arguments/rotation.hpp"
#include "cuda/backward.hpp"
#include "cuda/plan.hpp"
#include "mxflash/quantize.hpp"
#include "unit/capture_support.hpp"
#include "unit/cuda_support.hpp"

namespace mxflash {
namespace {

using test::Case;
using test::DeviceCase;
using test::Guarded;

class CudaPrepare : public test::OnDevice {};

constexpr float kScale = 0.09F;

template <class T>
std::vector<T> downloaded(const Guarded& memory) {
  const Bytes bytes = memory.read();
  std::vector<T> out(bytes.size() / sizeof(T));
  std::memcpy(out.data(), bytes.data(), out.size() * sizeof(T));
  return out;
}

cuda::DeviceMemory uploaded(std::span<const std::byte> bytes) {
  Result<cuda::DeviceMemory> memory = cuda::upload(bytes, "a test");
  EXPECT_TRUE(memory.ok()) << (memory.ok() ? "" : memory.error().message);
  return memory.ok() ? *std::move(memory) : cuda::DeviceMemory{};
}
template <class T>
cuda::DeviceMemory uploaded(const std::vector<T>& values) {
  return uploaded(std::as_bytes(std::span(values)));
}

cuda::BackwardSizes backward_sizes(const cuda::Sizes& forward, DqAccumulation dq_accumulation) {
  const std::int32_t most = std::max(forward.head_dim, forward.value_dim);
  const std::int32_t dims = most <= 64 ? 64 : most <= 128 ? 128 : 256;
  return {forward, dims, dims > 128 ? 2 : 1, dq_accumulation};
}

/// The arrays of a backward, each guarded, all bytes 0xFF before: NaN as E4M3 and as FP32.
class Tables {
 public:
  explicit Tables(const cuda::BackwardSizes& sizes) {
    const cuda::Sizes& f = sizes.forward;
    const std::int64_t queries = f.rows_q() * f.heads;
    const std::int64_t columns = sizes.query_columns() * f.heads * sizes.dims;
    const std::int64_t tiles = sizes.query_slots() * f.heads;
    work.sort_bytes = static_cast<std::size_t>(cuda::sort_scratch_bytes(f.tile_slots()));
    take(work.control, 1);
    take(work.items, f.tile_slots());
    take(work.costs, f.tile_slots());
    take(work.slots, f.tile_slots());
    take(work.costs_out, f.tile_slots());
    take(work.order, f.tile_slots());
    std::byte* sort = nullptr;
    take(sort, static_cast<std::int64_t>(work.sort_bytes));
    work.sort = sort;
    take(work.turns, tiles * sizes.parts);
    take(work.dout_base, std::int64_t{f.heads} * f.documents);
    take(work.dout_records, queries);
    take(work.query_tiles, tiles);
    take(work.dout_codes, (queries + 128) * sizes.dims);
    take(work.dout_columns, columns);
    take(work.query_columns, columns);
    take(work.key_columns, f.columns() * f.kv_heads * sizes.dims);
    take(work.value_rows, (f.rows_k() * f.kv_heads + 128) * sizes.dims);
    float* dq_sums = nullptr;
    take(dq_sums, queries * sizes.dims);
    work.dq_sums = dq_sums;
    take(work.dk_sums, f.rows_k() * f.kv_heads * sizes.dims);
    if (!sizes.has_prescale()) return;
    take(work.prescale, sizes.prescale_rows());
    take(work.key_most, sizes.most_tiles() * cuda::kTileRows);
    take(work.tile_most, sizes.most_tiles());
  }

  template <class T>
  [[nodiscard]] std::vector<T> read(const T* array) const {
    return downloaded<T>(of(array));
  }
  [[nodiscard]] bool untouched(const void* array) const { return of(array).untouched(); }
  void expect_intact(const std::string& where) const {
    for (const Guarded& memory : arrays_) EXPECT_TRUE(memory.intact()) << where;
  }

  cuda::BackwardWorkspace work;

 private:
  template <class T>
  void take(T*& array, std::int64_t count) {
    arrays_.emplace_back(static_cast<std::size_t>(count) * sizeof(T), 0xFF);
    array = reinterpret_cast<T*>(arrays_.back().data());
  }
  [[nodiscard]] const Guarded& of(const void* array) const {
    return *std::ranges::find_if(arrays_, [&](const Guarded& memory) { return memory.data() == array; });
  }

  std::vector<Guarded> arrays_;
};

/// A forward that has run, and what it would have saved of its rows.
struct Saved {
  DeviceCase device;
  cuda::Launches launches;
  cuda::BackwardSizes sizes;
  cuda::Workspace work;

  Saved(const Case& c, const Recipe& recipe, const test::Offsets& offsets) : device(c, offsets) {
    device.reserve(recipe);
    EXPECT_TRUE(device.run(recipe).ok());
    const Result<cuda::Launches> made = cuda::prepare(device.call, recipe, device.execution);
    EXPECT_TRUE(made.ok());
    launches = *made;
    sizes = backward_sizes(launches.schedule.sizes, recipe.dq_accumulation);
    work = launches.schedule.workspace;
  }
  Saved(const Case& c, const Recipe& recipe) : Saved(c, recipe, test::offsets_of(c.problem.packing)) {}

  void schedule(const Tables& tables, bool deterministic) const {
    EXPECT_EQ(
        cuda::launch_key_schedule(
            {sizes, launches.schedule.offsets, launches.schedule.band, work, tables.work, deterministic}, nullptr),
        0);
  }
  void schedule(const Tables& tables) const { schedule(tables, false); }
};

bool rotates(const Recipe& recipe, std::int64_t dims) { return rotation_of(recipe, dims).on; }

Quantized reference(const Tensor& tensor, const Case& c, const QuantizeOptions& options) {
  Result<Quantized> out = quantize(test::view(tensor), c.problem.packing, options, 0);
  EXPECT_TRUE(out.ok());
  return *std::move(out);
}

std::uint8_t code_of(const Quantized& of, std::int64_t token, std::int64_t head, std::int64_t dim) {
  if (dim >= of.shape[2]) return 0;
  return of.codes[static_cast<std::size_t>((token * of.shape[1] + head) * of.shape[2] + dim)];
}

// ---- Which queries a key tile meets ----

/// Queries of the document that see a key of [first, end); begin == end: none.
KeyRange queries_that_see(const Document& document, const Mask& mask, std::int64_t first, std::int64_t end) {
  KeyRange seen{0, 0};
  for (std::int64_t query = 0; query < document.q_length; ++query) {
    const KeyRange keys = visible_keys(document, mask, query);
    if (std::max(keys.begin, first) >= std::min(keys.end, end)) continue;
    if (seen.empty()) seen.begin = query;
    seen.end = query + 1;
  }
  return seen;
}

void expect_item(const cuda::KeyItem& item, const Document& document, const Mask& mask, const std::string& where) {
  const std::int64_t end = std::min<std::int64_t>(item.first_key + 128, document.k_length);
  EXPECT_EQ(item.key_row, document.k_begin + item.first_key) << where;
  EXPECT_EQ(item.keys, end - item.first_key) << where;
  EXPECT_EQ(item.column, (document.k_begin / 16 + item.document) * 16 + item.first_key) << where;
  EXPECT_EQ(item.tile_slot, document.k_begin / 128 + item.document + item.first_key / 128) << where;
  EXPECT_EQ(item.query_row, document.q_begin) << where;
  EXPECT_EQ(item.queries, document.q_length) << where;
  EXPECT_EQ(item.query_column, (document.q_begin / 16 + item.document) * 16) << where;
  EXPECT_EQ(item.query_slot, document.q_begin / 64 + item.document) << where;
  EXPECT_EQ(item.keys_of_document, document.k_length) << where;
  const KeyRange seen = queries_that_see(document, mask, item.first_key, end);
  EXPECT_EQ(item.first_tile, seen.begin / 64) << where;
  EXPECT_EQ(item.end_tile, (seen.end + 63) / 64) << where;
}

void expect_schedule(const Case& c, const std::string& where) {
  const Saved saved(c, test::recipe_named("mxfp8"));
  const Tables tables(saved.sizes);
  saved.schedule(tables);
  const std::vector<cuda::KeyItem> items = tables.read(tables.work.items);
  const std::vector<std::uint64_t> costs = tables.read(tables.work.costs_out);
  const std::vector<std::int32_t> order = tables.read(tables.work.order);
  ASSERT_TRUE(std::ranges::is_sorted(costs, std::greater<>())) << where;
  const std::vector<Document>& documents = c.problem.packing.documents();
  std::vector<std::int64_t> next(documents.size());  // Key that the document's next tile has to begin with.
  for (std::size_t i = 0; i < costs.size(); ++i) {
    if (costs[i] == 0) continue;
    const cuda::KeyItem& item = items[static_cast<std::size_t>(order[i])];
    EXPECT_EQ(item.tile_slot, order[i]) << where;
    const auto d = static_cast<std::size_t>(item.document);
    const std::string at = fmt::format("{}, document {}, key {}", where, d, item.first_key);
    ASSERT_EQ(item.first_key, next[d]) << at;  // A tile before those that follow it.
    next[d] += 128;
    expect_item(item, documents[d], c.problem.mask, at);
  }
  for (std::size_t d = 0; d < documents.size(); ++d) {
    EXPECT_EQ(next[d], (documents[d].k_length + 127) / 128 * 128) << where << ", document " << d;
  }
  EXPECT_TRUE(std::ranges::all_of(tables.read(tables.work.turns), [](auto turn) { return turn == 0; })) << where;
  EXPECT_TRUE(std::ranges::all_of(tables.read(static_cast<const float*>(tables.work.dq_sums)), [](float sum) {
    return sum == 0;
  })) << where;
  const Tables in_order(saved.sizes);
  saved.schedule(in_order, true);
  EXPECT_TRUE(in_order.untouched(in_order.work.dq_sums)) << where;
  for (const std::int32_t base : tables.read(tables.work.dout_base)) {
    EXPECT_EQ(base, std::numeric_limits<std::int32_t>::min()) << where;
  }
  const cuda::Control control = tables.read(tables.work.control)[0];
  EXPECT_EQ(control.status, 0U) << where;
  EXPECT_EQ(control.next, 0U) << where;
  tables.expect_intact(where);
}

TEST_F(CudaPrepare, KeyTilesMeetTheQueriesThatSeeThem) {
  const auto packings = {test::pack({{40, 40}, {0, 3}, {129, 200}, {1, 1}, {5, 0}, {600, 257}, {63, 700}, {0, 0}}),
                         test::pack_self({1, 64, 128, 0, 129, 1000}), test::pack({{0, 0}}), test::pack({{3, 0}})};
  const Mask masks[] = {Mask::causal(),
                        {Mask::unbounded, Mask::unbounded},
                        {0, 0},
                        {200, 0},
                        {7, 90},
                        {-70, 90},
                        {300, -150},
                        {-5, 4},
                        {0, Mask::unbounded}};
  for (const Packing& packing : packings) {
    for (const Mask& mask : masks) {
      Case c = test::random_case(packing, {2, 1, 64, 64}, DType::bf16);
      c.problem.mask = mask;
      expect_schedule(
          c, fmt::format("{} documents, left {}, right {}", packing.documents().size(), mask.left, mask.right));
    }
  }
}

// ---- Codes and records ----

/// What the forward leaves of a query: mostly tame, here and there what it can be at worst.
cuda::RowRecord row_record(std::int64_t index) {
  if (index % 89 == 7) return {};  // Sees no key.
  const auto at = [&](std::uint64_t stream) { return static_cast<float>(test::uniform(5, stream, index)); };
  cuda::RowRecord row{std::floor(at(1) * 100) - 50, 0.1F + at(2), std::floor(at(3) * 40) - 20, std::floor(at(4) * 30)};
  if (index % 5 != 0) row.most = -INFINITY;
  if (index % 397 == 13) row.unit = 90;
  constexpr float kBases[] = {-1e31F, -2'049, -2'048, 2'048, 2'049, 1e5F};
  if (index % 331 == 5) row.base = kBases[index / 331 % std::ssize(kBases)];
  return row;
}

/// O as the forward rounded it, and what rounding took from it: only O of other types than FP32 has that.
struct Rounded {
  Tensor o, rest;

  explicit Rounded(const Case& c)
      : o(test::random_tensor(c.q.dtype, c.dout.shape, test::Distribution::wide, 77)),
        rest(test::scaled(test::random_tensor(c.q.dtype, c.dout.shape, test::Distribution::wide, 78),
                          c.q.dtype == DType::f32 ? 0.0F : 0x1p-9F)) {}
};

/// Everything before the main kernel has run; dO is read by the element, if it is said to be no vectors.
struct Prepared {
  const Case& c;
  const Rounded& rounded;
  std::vector<cuda::RowRecord> rows;
  Saved saved;
  Tables tables;

  Prepared(const Case& of, const Rounded& outputs, const Recipe& recipe, bool vectors)
      : c(of), rounded(outputs), saved(of, recipe), tables(saved.sizes) {
    for (std::int64_t i = 0; i < saved.sizes.forward.rows_q() * saved.sizes.forward.heads; ++i) {
      rows.push_back(row_record(i));
    }
    saved.schedule(tables);
    run(recipe, vectors);
  }

 private:
  void run(const Recipe& recipe, bool vectors) const {
    const cuda::DeviceMemory dout = uploaded(c.dout.data);
    const cuda::DeviceMemory o = uploaded(rounded.o.data);
    const cuda::DeviceMemory rest = uploaded(rounded.rest.data);
    const cuda::DeviceMemory records = uploaded(rows);
    const cuda::DeviceMemory dlse = uploaded(c.dlse ? c.dlse->data : Bytes(16));
    cuda::Workspace work = saved.work;
    work.rows = reinterpret_cast<cuda::RowRecord*>(records.get());
    work.residual = c.q.dtype == DType::f32 ? nullptr : rest.get();
    cuda::PrepareArguments arguments{saved.sizes, saved.launches.schedule.offsets, work, tables.work, {}, o.get()};
    const TensorView view = test::view(c.dout);
    arguments.dout = {dout.get(), view.dtype, view.stride[0], view.stride[1], 1, vectors, recipe.dp.left.block.rows};
    if (c.dlse) arguments.dlse = reinterpret_cast<const float*>(dlse.get());
    arguments.dlse_token_stride = c.q.shape[1];
    arguments.dlse_head_stride = 1;
    arguments.scale = kScale;
    EXPECT_EQ(cuda::launch_prepare(arguments, nullptr), 0);
    EXPECT_EQ(cuda::launch_prescale({saved.sizes, arguments.offsets, saved.launches.schedule.band, work, tables.work,
                                     arguments.dlse, arguments.dlse_token_stride, arguments.dlse_head_stride, kScale},
                                    nullptr),
              0);
    tables.expect_intact("after prepare");  // Waits for it.
  }
};

/// Where a side's tokens lie along its columns.
struct Columns {
  std::vector<std::int64_t> token;  ///< -1: none.
  std::vector<bool> read;           ///< Some tile of `step` tokens reaches it.

  Columns(const std::vector<std::array<std::int64_t, 2>>& documents, std::int64_t count, std::int64_t step)
      : token(static_cast<std::size_t>(count), -1), read(static_cast<std::size_t>(count)) {
    std::int64_t index = 0;
    for (const auto& [begin, length] : documents) {
      const std::int64_t first = (begin / cuda::kColumnStep + index++) * cuda::kColumnStep;
      for (std::int64_t i = 0; i < length; ++i) token.at(static_cast<std::size_t>(first + i)) = begin + i;
      for (std::int64_t i = 0; i < (length + step - 1) / step * step; ++i)
        read.at(static_cast<std::size_t>(first + i)) = true;
    }
  }
};

Columns query_columns(const Case& c, std::int64_t count) {
  std::vector<std::array<std::int64_t, 2>> documents;
  for (const Document& d : c.problem.packing.documents()) documents.push_back({d.q_begin, d.q_length});
  return {documents, count, cuda::kQueryTile};
}
Columns key_columns(const Case& c, std::int64_t count) {
  std::vector<std::array<std::int64_t, 2>> documents;
  for (const Document& d : c.problem.packing.documents()) documents.push_back({d.k_begin, d.k_length});
  return {documents, count, cuda::kTileRows};
}

/// [heads, dims, columns]: codes where there is a token, zeros wherever else a tile reads.
void expect_transposed(const std::vector<std::uint8_t>& got, const Columns& columns, const Quantized& want,
                       const std::string& where) {
  const auto count = static_cast<std::int64_t>(columns.token.size());
  const std::int64_t dims = static_cast<std::int64_t>(got.size()) / count / want.shape[1];
  for (std::int64_t line = 0; line < want.shape[1] * dims; ++line) {
    for (std::int64_t column = 0; column < count; ++column) {
      if (!columns.read[static_cast<std::size_t>(column)]) continue;
      const std::int64_t token = columns.token[static_cast<std::size_t>(column)];
      const std::uint8_t code = token < 0 ? std::uint8_t{0} : code_of(want, token, line / dims, line % dims);
      ASSERT_EQ(got[static_cast<std::size_t>(line * count + column)], code)
          << where << " head " << line / dims << " dim " << line % dims << " column " << column << " token " << token;
    }
  }
}

/// [heads, rows, dims]
void expect_rows(const std::vector<std::uint8_t>& got, std::int64_t rows, const Quantized& want,
                 const std::string& where) {
  const std::int64_t dims = static_cast<std::int64_t>(got.size()) / (rows * want.shape[1] + 128);
  for (std::int64_t token = 0; token < want.shape[0]; ++token) {
    for (std::int64_t head = 0; head < want.shape[1]; ++head) {
      for (std::int64_t dim = 0; dim < dims; ++dim) {
        ASSERT_EQ(got[static_cast<std::size_t>((head * rows + token) * dims + dim)], code_of(want, token, head, dim))
            << where << " [" << token << ", " << head << ", " << dim << "]";
      }
    }
  }
}

/// Within so much of each other, or both NaN, or the same infinity.
bool near(double got, double want, double tolerance) {
  return std::isnan(want) ? std::isnan(got) : got == want || std::fabs(got - want) <= tolerance;
}

/// D - dLSE in double, and the 1e-5 |dO| |O| that it may be off by.
std::array<double, 2> delta_of(const Prepared& p, const Quantized& dout, std::int64_t row) {
  const std::int64_t dims = dout.shape[2];
  double sum = 0;
  double left = 0;
  double right = 0;
  for (std::int64_t d = row * dims; d < (row + 1) * dims; ++d) {
    const double g =
        std::ldexp(dout.values[static_cast<std::size_t>(d)], dout.exponents[static_cast<std::size_t>(row)]);
    const double o = static_cast<double>(p.rounded.o.at(d)) + static_cast<double>(p.rounded.rest.at(d));
    sum += g * o;
    left += g * g;
    right += o * o;
  }
  const auto dlse = p.c.dlse ? static_cast<double>(p.c.dlse->at(row)) : 0.0;
  // The last: of subnormal numbers.
  return {std::isfinite(dlse) ? sum - dlse : NAN,
          1e-5 * std::sqrt(left) * std::sqrt(right) + 1e-7 * std::fabs(dlse) + 0x1p-140};
}

/// What the kernel was given of queries, and left of them.
struct Queries {
  std::vector<cuda::QueryScale> scales;
  std::vector<cuda::RowRecord> rows;
  std::vector<cuda::DoutRecord> dout;
  std::vector<std::uint8_t> codes;
  std::int64_t dims = 0;  ///< Of a row of codes.

  explicit Queries(const Prepared& p)
      : scales(p.rows.size()),
        rows(p.rows),
        dout(p.tables.read(p.tables.work.dout_records)),
        codes(p.tables.read(p.tables.work.dout_codes)),
        dims(p.saved.sizes.dims) {
    const auto* from = reinterpret_cast<const std::byte*>(p.saved.work.query_scale);
    EXPECT_TRUE(cuda::download(std::as_writable_bytes(std::span(scales)), from, "a test").ok());
  }
  /// All codes are zero, of the least exponent.
  [[nodiscard]] bool zero(std::int64_t place) const {
    const auto begin = codes.begin() + place * dims;
    return dout[static_cast<std::size_t>(place)].factor == 0x1p-127F &&
           std::all_of(begin, begin + dims, [](std::uint8_t code) { return code % 128 == 0; });
  }
};

/// A tile's numbers of a query in double.
struct Numbers {
  double factor = 0;
  double base = 0;
  double slope = 0;
  double offset = 0;
  double scale = 0;
  bool leaves = false;  ///< The range in which they are sure to be in FP32.

  Numbers() = default;
  Numbers(const Queries& of, std::int64_t place) {
    const auto i = static_cast<std::size_t>(place);
    const cuda::RowRecord& row = of.rows[i];
    if (row.inverse == 0) return;
    const bool zero = of.zero(place);
    const bool lost = std::isnan(of.scales[i].factor);
    const bool dout_lost = std::isnan(of.dout[i].factor);
    const double power = zero || dout_lost ? 1.0 : static_cast<double>(of.dout[i].factor);
    const double share = std::ldexp(static_cast<double>(row.inverse), static_cast<int>(row.unit));
    factor = of.scales[i].factor;
    base = row.base;
    slope = dout_lost ? NAN : static_cast<double>(kScale) * share * power;
    offset = static_cast<double>(of.dout[i].delta) / power;
    scale = lost ? 0 : of.scales[i].factor;
    const auto far = [](double x) { return x != 0 && std::fabs(std::log2(std::fabs(x))) > 60; };
    leaves = !lost && !dout_lost &&
             (std::fabs(row.unit) > 60 || std::fabs(std::log2(power)) > 60 || std::fabs(base) > 2'048 || far(slope) ||
              far(offset));
  }
};

/// The tile of queries [first, end) of the tables, the first of which has that place in its document.
void expect_tile(const cuda::QueryTile& tile, const Queries& of, const std::array<std::int64_t, 3>& range,
                 const std::string& where) {
  float most = -INFINITY;
  float norm = 0;
  float scale_most[2] = {0, 0};
  bool irregular = false;
  for (std::int64_t q = 0; q < cuda::kQueryTile; ++q) {
    const auto i = static_cast<std::size_t>(q);
    const std::int64_t place = range[0] + q;
    const bool inside = place < range[1];
    const Numbers want = inside ? Numbers(of, place) : Numbers();
    const std::string at = fmt::format("{} query {}", where, q);
    ASSERT_TRUE(near(std::bit_cast<float>(tile.logit[i] & 0xFFFF0000U), want.factor, 0)) << at;
    ASSERT_EQ(decode_f16(static_cast<std::uint16_t>(tile.logit[i])), std::clamp(want.base, -2'048.0, 2'048.0)) << at;
    ASSERT_EQ(tile.scale[i], want.scale) << at;
    irregular |= want.leaves;
    if (!want.leaves) {
      ASSERT_TRUE(near(tile.slope[i], want.slope, 1e-6 * want.slope)) << at << ": " << tile.slope[i];
      ASSERT_TRUE(near(tile.offset[i], want.offset, 1e-6 * std::fabs(want.offset))) << at << ": " << tile.offset[i];
    }
    if (!inside || of.rows[static_cast<std::size_t>(place)].inverse == 0) continue;
    most = std::max(most, of.rows[static_cast<std::size_t>(place)].most);
    norm = std::max(norm, of.scales[static_cast<std::size_t>(place)].norm);
    scale_most[i / 32] = std::max(scale_most[i / 32], tile.scale[i]);
  }
  EXPECT_EQ(tile.most, most) << where;
  EXPECT_EQ(tile.norm, norm) << where;
  EXPECT_EQ(tile.scale_most[0], scale_most[0]) << where;
  EXPECT_EQ(tile.scale_most[1], scale_most[1]) << where;
  EXPECT_EQ(tile.irregular != 0, irregular) << where;
  EXPECT_EQ(tile.first, range[2]) << where;
}

/// Of a document's queries of one head; returns the largest exponent.
std::int32_t expect_dout_records(const Prepared& p, const Queries& of, const Quantized& dout,
                                 const std::array<std::int64_t, 3>& range) {
  const auto [first, end, head] = range;
  std::int32_t base = std::numeric_limits<std::int32_t>::min();
  for (std::int64_t token = first; token < end; ++token) {
    const std::string at = fmt::format("[{}, {}]", token, head);
    const std::int64_t row = token * p.saved.sizes.forward.heads + head;
    const auto i = static_cast<std::size_t>(head * p.saved.sizes.forward.rows_q() + token);
    const int exponent = dout.exponents[static_cast<std::size_t>(row)];
    const bool poisoned = dout.poisoned[static_cast<std::size_t>(row)] != 0;
    EXPECT_TRUE(near(of.dout[i].factor, poisoned ? NAN : std::ldexp(1.0, exponent), 0)) << at;
    if (!poisoned && !of.zero(static_cast<std::int64_t>(i))) base = std::max(base, exponent);
    const auto [delta, tolerance] = delta_of(p, dout, row);
    EXPECT_TRUE(near(of.dout[i].delta, delta, tolerance)) << at << ": " << of.dout[i].delta << " instead of " << delta;
  }
  return base;
}

void expect_records(const Prepared& p, const Quantized& dout, const std::string& where) {
  const cuda::Sizes& sizes = p.saved.sizes.forward;
  const Queries of(p);
  const std::vector<cuda::QueryTile> tiles = p.tables.read(p.tables.work.query_tiles);
  const std::vector<std::int32_t> bases = p.tables.read(p.tables.work.dout_base);
  std::int64_t index = 0;
  for (const Document& document : p.c.problem.packing.documents()) {
    for (std::int64_t head = 0; head < sizes.heads; ++head) {
      const std::string at = fmt::format("{} document {} head {}", where, index, head);
      const std::int64_t end = document.q_begin + document.q_length;
      EXPECT_EQ(bases[static_cast<std::size_t>(head * sizes.documents + index)],
                expect_dout_records(p, of, dout, {document.q_begin, end, head}))
          << at;
      std::int64_t slot = head * p.saved.sizes.query_slots() + document.q_begin / cuda::kQueryTile + index;
      for (std::int64_t token = document.q_begin; token < end; token += cuda::kQueryTile) {
        const std::int64_t place = head * sizes.rows_q();
        expect_tile(tiles[static_cast<std::size_t>(slot++)], of, {place + token, place + end, token - document.q_begin},
                    fmt::format("{} token {}", at, token));
        EXPECT_EQ(tiles[static_cast<std::size_t>(slot - 1)].head, head) << at;
      }
    }
    ++index;
  }
}

void expect_prepared(const Prepared& p, const Recipe& recipe, const std::string& where) {
  const Case& c = p.c;
  const cuda::BackwardSizes& sizes = p.saved.sizes;
  const cuda::BackwardWorkspace& work = p.tables.work;
  const bool rotated = rotates(recipe, sizes.forward.head_dim);
  const Quantized dout = reference(c.dout, c, {recipe.dp.left, Side::query, false, 0, 0});
  const Quantized q = reference(c.q, c, {recipe.s.left, Side::query, rotated, 0, 0});
  const Quantized k = reference(c.k, c, {recipe.s.right, Side::key, rotated, 0, 0});
  const Quantized v = reference(c.v, c, {recipe.o.tokens, Side::key, false, 0, 0});
  const Columns queries = query_columns(c, sizes.query_columns());
  const Columns keys = key_columns(c, sizes.forward.columns());
  expect_rows(p.tables.read(work.dout_codes), sizes.forward.rows_q(), dout, "dO " + where);
  expect_rows(p.tables.read(work.value_rows), sizes.forward.rows_k(), v, "v " + where);
  expect_transposed(p.tables.read(work.dout_columns), queries, dout, "transposed dO " + where);
  expect_transposed(p.tables.read(work.query_columns), queries, q, "transposed q " + where);
  expect_transposed(p.tables.read(work.key_columns), keys, k, "transposed k " + where);
  expect_records(p, dout, where);
}

/// Rows of dO that are NaN, Inf, zero, tiny, huge; dLSE and O that are no numbers; poisoned queries, keys and values.
void disturb(Case& c, Tensor& o) {
  std::int64_t token = 0;
  for (Tensor* tensor : {&c.dout, &c.q, &c.k, &c.v}) {
    const std::int64_t row = tensor->shape[1] * tensor->shape[2];
    for (const float value : {NAN, INFINITY, 0.0F, 1e-39F, 1e-25F, 1e30F, -448.0F}) {
      token = (token + 7) % tensor->shape[0];
      for (std::int64_t i = token * row; i < (token + 1) * row; i += std::isfinite(value) ? 1 : 5)
        tensor->set(i, value);
    }
  }
  c.dlse->set(11, NAN);
  c.dlse->set(500, INFINITY);
  c.dlse->set(501, 1e35F);
  test::set_row(o, 44, 1, NAN);
  test::set_row(o, 300, 0, 0);
}

TEST_F(CudaPrepare, CodesDAndRecordsAreTheReferences) {
  for (const char* name : {"mxfp8", "mxfp8-tokenblock"}) {
    const Recipe recipe = test::recipe_named(name);
    for (const auto& [dtype, dims, value_dims] : {std::tuple{DType::bf16, 128, 128},
                                                  {DType::f16, 64, 64},
                                                  {DType::f32, 128, 128},
                                                  {DType::bf16, 96, 40},
                                                  {DType::bf16, 40, 96},
                                                  {DType::f32, 16, 8},
                                                  {DType::f16, 192, 128},
                                                  {DType::bf16, 64, 256},
                                                  {DType::f32, 256, 256}}) {
      Case c = test::random_case(test::pack({{40, 40}, {0, 3}, {129, 200}, {1, 1}, {33, 31}, {300, 257}, {0, 0}}),
                                 {4, 2, dims, value_dims}, dtype, 3);
      const std::string where = fmt::format("{} {} dims {}/{}", name, name_of(dtype), dims, value_dims);
      Rounded rounded(c);
      expect_prepared(Prepared(c, rounded, recipe, true), recipe, where);
      c = test::with_dlse(std::move(c));
      disturb(c, rounded.o);
      expect_prepared(Prepared(c, rounded, recipe, false), recipe, where + ", disturbed");
    }
  }
}

/// dO of a real layer is far from one: 3e-7.
TEST_F(CudaPrepare, CodesOfRealLayersAreTheReferences) {
  for (const test::Capture& capture : test::captures()) {
    const Rounded rounded(capture.c);
    for (const char* name : {"mxfp8", "mxfp8-tokenblock"}) {
      const Recipe recipe = test::recipe_named(name);
      expect_prepared(Prepared(capture.c, rounded, recipe, true), recipe, fmt::format("{} of {}", name, capture.name));
    }
  }
}

// ---- The powers of two before FP16 sums ----

/// Largest norms of the keys of a document up to each, in double; poisoned ones take no part.
struct KeyNorms {
  std::vector<double> value{0};
  std::vector<double> key{0};

  KeyNorms(const Document& document, const Quantized& v, const Quantized& k, std::int64_t head) {
    for (std::int64_t token = document.k_begin; token < document.k_begin + document.k_length; ++token) {
      value.push_back(std::max(value.back(), norm_of(v, token * v.shape[1] + head)));
      const auto row = static_cast<std::size_t>(token * k.shape[1] + head);
      double most = 0;
      for (std::size_t d = 0; d < static_cast<std::size_t>(k.shape[2]) && k.poisoned[row] == 0; ++d) {
        const float number = k.values[row * static_cast<std::size_t>(k.shape[2]) + d];
        most = std::max(most, std::ldexp(std::fabs(static_cast<double>(number)), k.exponents[row]));
      }
      key.push_back(std::max(key.back(), most));
    }
  }

  static double norm_of(const Quantized& of, std::int64_t row) {
    const auto at = static_cast<std::size_t>(row);
    if (of.poisoned[at] != 0) return 0;
    double sum = 0;
    for (std::size_t d = 0; d < static_cast<std::size_t>(of.shape[2]); ++d) {
      const double number = of.values[at * static_cast<std::size_t>(of.shape[2]) + d];
      sum += number * number;
    }
    return std::ldexp(std::sqrt(sum), of.exponents[at]);
  }
};

/// p of a row whose bound is this; near a power of two either neighbour.
void expect_prescale(std::int32_t got, double bound, const std::string& where) {
  if (!(bound > 0) || std::isinf(bound)) {
    EXPECT_EQ(got, 0) << where;
    return;
  }
  const double octave = std::log2(bound);
  const auto held = [](double p) {
    constexpr double kMost = cuda::kMostPrescale;
    return static_cast<std::int32_t>(std::clamp(14 - p, -kMost, kMost));
  };
  const bool is_near = std::fabs(octave - std::round(octave)) < 1e-5;
  EXPECT_GE(got, held(std::ceil(octave + (is_near ? 1e-5 : 0)))) << where << ", bound " << bound;
  EXPECT_LE(got, held(std::ceil(octave - (is_near ? 1e-5 : 0)))) << where << ", bound " << bound;
}

void expect_prescales(const Prepared& p, const Recipe& recipe, const std::string& where) {
  const Case& c = p.c;
  const Quantized k = reference(c.k, c, {recipe.s.right, Side::key, rotates(recipe, c.q.shape[2])});
  const Quantized v = reference(c.v, c, {recipe.o.tokens, Side::key, false});
  const Quantized dout = reference(c.dout, c, {recipe.dp.left, Side::query, false});
  const std::vector<std::int32_t> got = p.tables.read(p.tables.work.prescale);
  const std::int64_t heads = c.q.shape[1];
  std::int64_t some = 0;
  for (const Document& document : c.problem.packing.documents()) {
    for (std::int64_t head = 0; head < heads; ++head) {
      const KeyNorms norms(document, v, k, head / (heads / c.k.shape[1]));
      for (std::int64_t query = 0; query < document.q_length; ++query) {
        const std::int64_t token = document.q_begin + query;
        const std::int64_t row = token * heads + head;
        const KeyRange range = visible_keys(document, c.problem.mask, query);
        const auto end = static_cast<std::size_t>(range.empty() ? 0 : range.end);
        const double dlse = c.dlse ? std::fabs(static_cast<double>(c.dlse->at(row))) : 0;
        const bool poisoned = dout.poisoned[static_cast<std::size_t>(row)] != 0;
        const double scale = std::fabs(static_cast<double>(kScale)) * norms.key[end];
        const double bound = poisoned ? NAN : scale * (2 * KeyNorms::norm_of(dout, row) * norms.value[end] + dlse);
        const std::int32_t own = got[static_cast<std::size_t>(head * p.saved.sizes.forward.rows_q() + token)];
        expect_prescale(own, bound, fmt::format("{} [{}, {}]", where, token, head));
        some += own != 0 ? 1 : 0;
      }
    }
  }
  EXPECT_GT(some, c.q.shape[0]) << where << ": hardly a row has a bound";
}

/// Of tokens up to 2^spread apart.
Case spread_case(std::int64_t dims, std::int64_t value_dims, int spread) {
  Case c =
      test::random_case(test::pack({{40, 40}, {0, 3}, {129, 200}, {1, 1}, {33, 31}, {300, 257}, {9, 0}, {150, 700}}),
                        {4, 2, dims, value_dims}, DType::f32, 3);
  for (Tensor* tensor : {&c.k, &c.v, &c.dout}) {
    const std::int64_t width = tensor->shape[1] * tensor->shape[2];
    for (std::int64_t i = 0; i < tensor->elements(); ++i) {
      const auto exponent = static_cast<int>(test::uniform(18, 0, i / width) * spread);
      tensor->set(i, std::ldexp(tensor->at(i), exponent));
    }
  }
  return c;
}

/// Each mask with each of the dims, and each of these with every spread at some mask.
TEST_F(CudaPrepare, PowersOfTwoBeforeHalfSums) {
  constexpr std::array<std::pair<int, int>, 6> kDims = {
      {{128, 128}, {64, 64}, {96, 40}, {16, 8}, {64, 256}, {256, 192}}};
  const std::array<Mask, 6> masks = {Mask::causal(), Mask::full(), Mask::window(40, 10),
                                     {200, -8},      {-5, 20},     {Mask::unbounded, 129}};
  constexpr std::array<int, 3> kSpreads = {0, 60, -60};
  for (std::size_t i = 0; i < kDims.size() * masks.size(); ++i) {
    const auto [dims, value_dims] = kDims[i % kDims.size()];
    const std::size_t mask = i / kDims.size();
    const int spread = kSpreads[(i + mask) % kSpreads.size()];
    Recipe recipe = test::recipe_named(i % 5 == 4 ? "mxfp8-tokenblock" : "mxfp8");
    recipe.dq_accumulation = DqAccumulation::f16_causal;
    Case c = spread_case(dims, value_dims, spread);
    c.problem.mask = masks[mask];
    Rounded rounded(c);
    const std::string where = fmt::format("{} dims {}/{}, window ({}, {}), spread {}", recipe.name, dims, value_dims,
                                          c.problem.mask.left, c.problem.mask.right, spread);
    expect_prescales(Prepared(c, rounded, recipe, true), recipe, where);
    if (i % 4 != 0) continue;
    Case other = test::with_dlse(c);
    disturb(other, rounded.o);
    expect_prescales(Prepared(other, rounded, recipe, false), recipe, where + ", disturbed");
  }
}

// ---- The way out ----

/// Of FP32 sums: a butterfly rounds seven or eight times at most, then the result once.
double rounding_of(DType dtype) { return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-24; }

/// Rows of dq_sums with their dims in order.
std::vector<float> in_order(const std::vector<float>& sums, std::int32_t dims) {
  std::vector<float> rows(sums.size());
  for (std::size_t first = 0; first < sums.size(); first += static_cast<std::size_t>(dims)) {
    const auto row = static_cast<std::int64_t>(first) / dims;
    for (std::int32_t d = 0; d < dims; ++d) {
      rows[first + static_cast<std::size_t>(d)] = sums[first + static_cast<std::size_t>(cuda::place_of(row, d))];
    }
  }
  return rows;
}

/// Those of a row without keys, which nobody has written.
void clear_rows_without_keys(const std::vector<cuda::RowRecord>& rows, std::int32_t dims, std::vector<float>& sums) {
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (rows[row].inverse == 0) std::fill_n(sums.begin() + static_cast<std::ptrdiff_t>(row) * dims, dims, 0.0F);
  }
}

void expect_gradient(const Tensor& got, const std::vector<float>& sums, std::int64_t rows, const Rotation& rotation,
                     const std::string& where) {
  const std::int64_t dims = got.shape[2];
  const std::int64_t pitch = static_cast<std::int64_t>(sums.size()) / (rows * got.shape[1]);
  for (std::int64_t token = 0; token < got.shape[0]; ++token) {
    for (std::int64_t head = 0; head < got.shape[1]; ++head) {
      const auto begin = sums.begin() + (head * rows + token) * pitch;
      const double size = std::accumulate(begin, begin + dims, 0.0, [](double a, float x) { return a + std::fabs(x); });
      for (std::int64_t d = 0; d < dims; ++d) {
        double want = begin[d];
        double slack = 0;
        if (rotation.on) {
          want = 0;
          for (std::int64_t i = 0; i < dims; ++i) {
            const bool minus = std::popcount(static_cast<std::uint64_t>(i & d)) % 2 != 0;
            want += std::ldexp(minus ? -begin[i] : begin[i], -rotation.shift);
          }
          slack = 0x1p-21 * std::ldexp(size, -rotation.shift);
        }
        ASSERT_TRUE(near(got.at((token * got.shape[1] + head) * dims + d), want,
                         slack + rounding_of(got.dtype) * std::fabs(want) + 0x1p-25))
            << where << " [" << token << ", " << head << ", " << d
            << "]: " << got.at((token * got.shape[1] + head) * dims + d) << " instead of " << want;
      }
    }
  }
}

std::vector<float> random_sums(std::int64_t count, std::uint64_t seed) {
  std::vector<float> sums;
  sums.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) sums.push_back(static_cast<float>(test::uniform(seed, 0, i)) - 0.5F);
  return sums;
}

Tensor tensor_of(const Guarded& memory, const Tensor& like) { return {like.dtype, like.shape, memory.read()}; }

/// FP16 sums of dQ, rows of them times powers of two, made of others: these become what the halves stand for.
struct HalfSums {
  std::vector<std::uint16_t> halves;
  std::vector<std::int32_t> prescale{0};

  void take(std::int32_t dims, std::vector<float>& sums) {
    prescale.clear();
    for (std::size_t i = 0; i < sums.size(); ++i) {
      if (i % static_cast<std::size_t>(dims) == 0) {
        prescale.push_back(static_cast<std::int32_t>(prescale.size() % 14) - 2);
      }
      halves.push_back(encode_f16(std::ldexp(sums[i], 10)));
      sums[i] = std::ldexp(decode_f16(halves.back()), -prescale.back());
    }
  }
};

TEST_F(CudaPrepare, SumsAreRotatedBackAndRounded) {
  Recipe always = test::recipe_named("mxfp8");
  always.hadamard = Hadamard::required;
  for (const auto& [dtype, dims, rotated] : {std::tuple{DType::bf16, 128, true},
                                             {DType::f16, 64, true},
                                             {DType::f32, 256, true},
                                             {DType::f32, 16, true},
                                             {DType::bf16, 40, false},
                                             {DType::f32, 128, false},
                                             {DType::f16, 192, false}}) {
    for (const DqAccumulation kind : {DqAccumulation::f32, DqAccumulation::f16_causal}) {
      Recipe recipe = test::recipe_named("mxfp8");
      recipe.dq_accumulation = kind;
      const Case c = test::random_case(test::pack({{40, 70}, {129, 3}, {1, 200}}), {4, 2, dims, 64}, dtype);
      const Saved saved(c, recipe);
      const Tables tables(saved.sizes);
      saved.schedule(tables);
      const cuda::Sizes& sizes = saved.sizes.forward;
      std::vector<float> dq_sums = random_sums(sizes.rows_q() * sizes.heads * saved.sizes.dims, 1);
      const std::vector<float> dk_sums = random_sums(sizes.rows_k() * sizes.kv_heads * saved.sizes.dims, 2);
      const bool half = saved.sizes.has_prescale();
      HalfSums sums;
      if (half) sums.take(saved.sizes.dims, dq_sums);
      const cuda::DeviceMemory on_device[] = {half ? uploaded(sums.halves) : uploaded(dq_sums), uploaded(dk_sums),
                                              uploaded(sums.prescale)};
      std::vector<cuda::RowRecord> rows;
      rows.reserve(static_cast<std::size_t>(sizes.rows_q() * sizes.heads));
      for (std::int64_t i = 0; i < sizes.rows_q() * sizes.heads; ++i) rows.push_back(row_record(i));
      const cuda::DeviceMemory records = uploaded(rows);
      cuda::Workspace saved_work = saved.work;
      saved_work.rows = reinterpret_cast<cuda::RowRecord*>(records.get());
      cuda::BackwardWorkspace work = tables.work;
      work.dq_sums = on_device[0].get();
      work.dk_sums = reinterpret_cast<float*>(on_device[1].get());
      work.prescale = reinterpret_cast<std::int32_t*>(on_device[2].get());
      const Guarded dq(c.q.data.size(), 0xFF);
      const Guarded dk(c.k.data.size(), 0xFF);
      const Guarded dv(c.v.data.size(), 0xFF);
      const Rotation rotation = rotated ? rotation_of(always, dims) : Rotation{};
      EXPECT_EQ(cuda::launch_finish({saved.sizes, saved_work, work, rotated ? rotation.shift : -1, dtype, dq.data(),
                                     dk.data(), dv.data()},
                                    nullptr),
                0);
      const std::string where =
          fmt::format("{} {} {}{}", name_of(dtype), dims, rotated ? "rotated" : "as it is", half ? ", of halves" : "");
      clear_rows_without_keys(rows, saved.sizes.dims, dq_sums);
      expect_gradient(tensor_of(dq, c.q), in_order(dq_sums, saved.sizes.dims), sizes.rows_q(), rotation, "dq " + where);
      if (saved.sizes.parts > 1) {
        expect_gradient(tensor_of(dk, c.k), dk_sums, sizes.rows_k(), rotation, "dk " + where);
      } else {
        EXPECT_TRUE(dk.untouched()) << where;
      }
      EXPECT_TRUE(dq.intact() && dk.intact()) << where;
      EXPECT_TRUE(dv.untouched()) << where;
    }
  }
}

TEST_F(CudaPrepare, MalformedOffsetsAreNotFollowed) {
  const Recipe recipe = test::recipe_named("mxfp8");
  const Case c = test::random_case(test::pack_self({100, 200, 50}), {4, 2, 64, 64}, DType::bf16);
  const test::Offsets offsets{{0, 100, 1'000'000'000, 350}, {0, -2'000'000'000, 300, 350}};
  const Saved saved(c, recipe, offsets);
  const Tables tables(saved.sizes);
  saved.schedule(tables);
  EXPECT_EQ(tables.read(tables.work.control)[0].status, std::uint32_t{cuda::kQOrder | cuda::kKOrder});
  EXPECT_TRUE(std::ranges::all_of(tables.read(tables.work.costs_out), [](std::uint64_t cost) { return cost == 0; }));
  EXPECT_TRUE(tables.untouched(tables.work.items));
  const cuda::DeviceMemory dout = uploaded(c.dout.data);
  const cuda::Source source{dout.get(), DType::bf16, 256, 64, 1, true, 1};
  EXPECT_EQ(cuda::launch_prepare({saved.sizes, saved.launches.schedule.offsets, saved.work, tables.work, source,
                                  dout.get(), nullptr, 0, 0, kScale},
                                 nullptr),
            0);
  for (const void* array :
       {static_cast<const void*>(tables.work.dout_codes), static_cast<const void*>(tables.work.query_columns),
        static_cast<const void*>(tables.work.value_rows), static_cast<const void*>(tables.work.query_tiles)}) {
    EXPECT_TRUE(tables.untouched(array));
  }
  const Guarded dq(c.q.data.size(), 0);
  const Guarded dk(c.k.data.size(), 0);
  const Guarded dv(c.v.data.size(), 0);
  EXPECT_EQ(cuda::launch_finish({saved.sizes, saved.work, tables.work, 3, DType::bf16, dq.data(), dk.data(), dv.data()},
                                nullptr),
            0);
  for (const auto& [memory, like] : {std::pair{&dq, &c.q}, {&dk, &c.k}, {&dv, &c.v}}) {
    const Tensor out = tensor_of(*memory, *like);
    for (std::int64_t i = 0; i < out.elements(); ++i) ASSERT_TRUE(std::isnan(out.at(i))) << i;
    EXPECT_TRUE(memory->intact());
  }
}

}  // namespace
}  // namespace mxflash
