// What the device hands from kernel to kernel, bit for bit: codes and scales are the reference quantizer's, the order
// of the work is the host schedule's.
#include <bit>
#include <cmath>

#include "cuda/embed_plan.hpp"
#include "cuda/plan.hpp"
#include "mxflash/quantize.hpp"
#include "mxflash/schedule.hpp"
#include "unit/capture_support.hpp"
#include "unit/cuda_support.hpp"

namespace mxflash {
namespace {

using test::Case;
using test::DeviceCase;

class CudaCodes : public test::OnDevice {};

/// The launches of a call that has run.
cuda::Launches run(DeviceCase& device, const Recipe& recipe) {
  device.reserve(recipe);
  EXPECT_TRUE(device.run(recipe).ok());
  EXPECT_TRUE(device.check().ok());
  const Result<cuda::Launches> launches = cuda::prepare(device.call, recipe, device.execution);
  EXPECT_TRUE(launches.ok());
  return *launches;
}

template <class T>
std::vector<T> downloaded(const T* device, std::int64_t count) {
  std::vector<T> out(static_cast<std::size_t>(count));
  const auto bytes = std::as_writable_bytes(std::span(out));
  EXPECT_TRUE(cuda::download(bytes, reinterpret_cast<const std::byte*>(device), "a test").ok());
  return out;
}

/// 2^exponent, or NaN of a poisoned row.
bool same_factor(float factor, const Quantized& want, std::size_t row) {
  return want.poisoned[row] != 0 ? std::isnan(factor) : factor == std::ldexp(1.0F, want.exponents[row]);
}

bool rotates(const Recipe& recipe, std::int64_t dims) {
  return recipe.hadamard == Hadamard::required || (recipe.hadamard == Hadamard::at_128 && dims == 128);
}

Quantized reference(const Tensor& tensor, const Case& c, const QuantizeOptions& options) {
  Result<Quantized> out = quantize(test::view(tensor), c.problem.packing, options, 0);
  EXPECT_TRUE(out.ok());
  return *std::move(out);
}

void expect_rows(const cuda::Launches& launches, const Case& c, const Recipe& recipe, const std::string& where) {
  const cuda::Sizes& sizes = launches.schedule.sizes;
  const cuda::Workspace& work = launches.schedule.workspace;
  const bool rotated = rotates(recipe, sizes.head_dim);
  const Quantized q = reference(c.q, c, {recipe.s.left, Side::query, rotated, 0, 0});
  const std::vector<std::uint8_t> codes = downloaded(work.query_codes, sizes.rows_q() * sizes.heads * sizes.key_dims);
  const std::vector<cuda::QueryScale> scales = downloaded(work.query_scale, sizes.rows_q() * sizes.heads);
  for (std::int64_t token = 0; token < sizes.tokens_q; ++token) {
    for (std::int64_t head = 0; head < sizes.heads; ++head) {
      const auto row = static_cast<std::size_t>(token * sizes.heads + head);
      const std::int64_t place = head * sizes.rows_q() + token;
      ASSERT_TRUE(same_factor(scales[static_cast<std::size_t>(place)].factor, q, row))
          << "q " << where << " [" << token << ", " << head << "]";
      for (std::int64_t dim = 0; dim < sizes.head_dim; ++dim) {
        ASSERT_EQ(codes[static_cast<std::size_t>(place * sizes.key_dims + dim)],
                  q.codes[row * static_cast<std::size_t>(sizes.head_dim) + static_cast<std::size_t>(dim)])
            << "q " << where << " [" << token << ", " << head << ", " << dim << "]";
      }
    }
  }
}

/// Of each token of k and v.
std::vector<std::int64_t> columns_of(const Packing& packing) {
  std::vector<std::int64_t> columns;
  std::int64_t index = 0;
  for (const Document& document : packing.documents()) {
    const std::int64_t first = (document.k_begin / cuda::kColumnStep + index++) * cuda::kColumnStep;
    for (std::int64_t key = 0; key < document.k_length; ++key) columns.push_back(first + key);
  }
  return columns;
}

void expect_columns(const cuda::Launches& launches, const Case& c, const Recipe& recipe, const std::string& where) {
  const cuda::Sizes& sizes = launches.schedule.sizes;
  const cuda::Workspace& work = launches.schedule.workspace;
  const Quantized k = reference(c.k, c, {recipe.s.right, Side::key, rotates(recipe, sizes.head_dim), 0, 0});
  const Quantized v = reference(c.v, c, {recipe.o.tokens, Side::key, false, 0, 0});
  const std::vector<std::uint8_t> key_codes =
      downloaded(work.key_codes, sizes.rows_k() * sizes.kv_heads * sizes.key_dims);
  const std::vector<std::uint8_t> value_codes =
      downloaded(work.value_codes, sizes.columns() * sizes.kv_heads * sizes.value_rows());
  const std::vector<cuda::KeyScale> scales = downloaded(work.key_scale, sizes.columns() * sizes.kv_heads);
  const std::vector<std::int64_t> columns = columns_of(c.problem.packing);
  for (std::int64_t token = 0; token < sizes.tokens_k; ++token) {
    for (std::int64_t head = 0; head < sizes.kv_heads; ++head) {
      const std::string at = fmt::format("{} [{}, {}]", where, token, head);
      const auto row = static_cast<std::size_t>(token * sizes.kv_heads + head);
      const std::int64_t column = columns[static_cast<std::size_t>(token)];
      const cuda::KeyScale& scale = scales[static_cast<std::size_t>(head * sizes.columns() + column)];
      ASSERT_TRUE(same_factor(scale.factor, k, row)) << "k " << at;
      ASSERT_EQ(scale.value_exponent,
                v.poisoned[row] != 0 ? cuda::kPoisonedValue : static_cast<float>(v.exponents[row]))
          << "v " << at;
      for (std::int64_t dim = 0; dim < sizes.head_dim; ++dim) {
        const std::int64_t place = (head * sizes.rows_k() + token) * sizes.key_dims + dim;
        ASSERT_EQ(key_codes[static_cast<std::size_t>(place)],
                  k.codes[row * static_cast<std::size_t>(sizes.head_dim) + static_cast<std::size_t>(dim)])
            << "k " << at << " dim " << dim;
      }
      for (std::int64_t dim = 0; dim < sizes.value_dim; ++dim) {
        const std::int64_t line = dim / sizes.value_dims * (sizes.value_dims + 1) + dim % sizes.value_dims;
        const std::int64_t place = (head * sizes.value_rows() + line) * sizes.columns() + column;
        ASSERT_EQ(value_codes[static_cast<std::size_t>(place)],
                  v.codes[row * static_cast<std::size_t>(sizes.value_dim) + static_cast<std::size_t>(dim)])
            << "v " << at << " dim " << dim;
      }
    }
  }
}

// ---- Recipes that are embedded in BF16 ----

/// A table of BF16 rows, and what the reference says they are.
struct Table {
  std::vector<std::uint16_t> numbers;
  std::int64_t tokens = 0;
  std::int64_t length = 0;  ///< Of a row.

  Table(const std::uint16_t* device, std::int64_t heads, std::int64_t rows, std::int64_t padded)
      : numbers(downloaded(device, heads * rows * padded)), tokens(rows), length(padded) {}
  [[nodiscard]] double at(std::int64_t token, std::int64_t head, std::int64_t dim) const {
    return decode_bf16(numbers[static_cast<std::size_t>((head * tokens + token) * length + dim)]);
  }
};

/// Bit for bit, but for what is beyond the largest BF16 number, which is held there.
bool same_value(double got, double want) {
  const double most = decode_bf16(0x7F7F);
  return got == std::clamp(want, -most, most);
}

/// Rows times their factor are the reference's codes times its scales.
void expect_factored(const Table& table, const std::vector<float>& factors, const Quantized& want,
                     const std::string& where) {
  for (std::int64_t token = 0; token < want.shape[0]; ++token) {
    for (std::int64_t head = 0; head < want.shape[1]; ++head) {
      const auto row = static_cast<std::size_t>(token * want.shape[1] + head);
      const double factor = factors[static_cast<std::size_t>(head * table.tokens + token)];
      ASSERT_EQ(std::isnan(factor), want.poisoned[row] != 0) << where << " [" << token << ", " << head << "]";
      for (std::int64_t dim = 0; dim < table.length; ++dim) {
        const double value = table.at(token, head, dim);
        const bool zero = dim >= want.shape[2] || want.poisoned[row] != 0;
        ASSERT_TRUE(zero ? value == 0 : same_value(value * factor, want.dequantized(token, head, dim)))
            << where << " [" << token << ", " << head << ", " << dim << "]: " << value << " times " << factor;
      }
    }
  }
}

/// Rows of V as they are multiplied, and their exponents.
void expect_values(const cuda::Launches& launches, int kind, const Quantized& want, bool folds,
                   const std::string& where) {
  const cuda::Sizes& sizes = launches.schedule.sizes;
  const cuda::TileKind& of = launches.embedded->forward.tables.kind[kind];
  const Table table(of.values, sizes.kv_heads, sizes.tokens_k, std::int64_t{sizes.value_parts} * sizes.value_dims);
  const std::vector<cuda::EmbeddedKey> keys = downloaded(of.keys, std::int64_t{sizes.kv_heads} * sizes.tokens_k);
  const std::vector<float> heights = downloaded(of.heights, std::int64_t{sizes.kv_heads} * sizes.tokens_k);
  for (std::int64_t token = 0; token < sizes.tokens_k; ++token) {
    for (std::int64_t head = 0; head < sizes.kv_heads; ++head) {
      const std::string at = fmt::format("{} [{}, {}]", where, token, head);
      const auto row = static_cast<std::size_t>(token * sizes.kv_heads + head);
      const cuda::EmbeddedKey& key = keys[static_cast<std::size_t>(head * sizes.tokens_k + token)];
      const auto high = static_cast<double>(heights[static_cast<std::size_t>(head * sizes.tokens_k + token)]);
      ASSERT_EQ(std::isinf(high), want.poisoned[row] != 0) << at;
      ASSERT_EQ(key.fold, folds ? static_cast<float>(want.exponents[row]) : 0.0F) << at;
      for (std::int64_t dim = 0; dim < table.length; ++dim) {
        const double value = table.at(token, head, dim);
        const bool there = dim < sizes.value_dim;
        const auto place = row * static_cast<std::size_t>(sizes.value_dim) + static_cast<std::size_t>(dim);
        ASSERT_TRUE(there ? same_value(value, want.values[place]) : value == 0)
            << at << " dim " << dim << ": " << value << " instead of " << (there ? want.values[place] : 0.0F);
        ASSERT_LE(std::fabs(value), std::exp2(std::min(high, 1e3))) << at;
      }
    }
  }
}

void expect_embedded(const cuda::Launches& launches, const Case& c, const Recipe& recipe, const std::string& where) {
  const cuda::Sizes& sizes = launches.schedule.sizes;
  const cuda::EmbeddedTables& tables = launches.embedded->forward.tables;
  const bool rotated = rotates(recipe, sizes.head_dim);
  const Table queries(tables.queries, sizes.heads, sizes.tokens_q, sizes.key_dims);
  expect_factored(queries, downloaded(tables.query_factor, std::int64_t{sizes.heads} * sizes.tokens_q),
                  reference(c.q, c, {recipe.s.left, Side::query, rotated, 0, 0}), "q " + where);
  const Table keys(tables.keys, sizes.kv_heads, sizes.tokens_k, sizes.key_dims);
  const Quantized k = reference(c.k, c, {recipe.s.right, Side::key, rotated, 0, 0});
  ASSERT_EQ(tables.kinds, recipe.o.cut ? 2 : 1);
  for (int kind = 0; kind < tables.kinds; ++kind) {
    std::vector<float> factors;
    for (const cuda::EmbeddedKey& key :
         downloaded(tables.kind[kind].keys, std::int64_t{sizes.kv_heads} * sizes.tokens_k)) {
      factors.push_back(key.factor);
    }
    expect_factored(keys, factors, k, "k " + where);
    const Operand& tokens = kind == cuda::kCutTiles ? recipe.o.cut->tokens : recipe.o.tokens;
    const Quantized v = reference(c.v, c, {tokens, Side::key, false, 0, 0});
    expect_values(launches, kind, v, tokens.folds(), fmt::format("v {} of {}, kind {}", where, recipe.name, kind));
  }
}

void expect_codes(const Case& c, const Recipe& recipe, const std::string& where) {
  DeviceCase device(c, test::offsets_of(c.problem.packing));
  const cuda::Launches launches = run(device, recipe);
  if (launches.embedded) {
    expect_embedded(launches, c, recipe, where);
    return;
  }
  expect_rows(launches, c, recipe, where);
  expect_columns(launches, c, recipe, where);
}

/// A row of q, k or v is set to NaN, Inf, zeros, the least or the largest numbers.
void disturb(Case& c) {
  std::int64_t token = 0;
  for (Tensor* tensor : {&c.q, &c.k, &c.v}) {
    const std::int64_t row = tensor->shape[1] * tensor->shape[2];
    for (const float value : {NAN, INFINITY, 0.0F, 1e-39F, 3e38F, -448.0F}) {
      token = (token + 7) % tensor->shape[0];
      for (std::int64_t i = token * row; i < (token + 1) * row; i += value == value && std::isfinite(value) ? 1 : 5) {
        tensor->set(i, value);
      }
    }
  }
}

TEST_F(CudaCodes, CodesAndScalesAreTheReferences) {
  for (const Recipe& recipe : test::device_recipes()) {
    for (const auto& [dtype, dims, value_dims] : {std::tuple{DType::bf16, 128, 128},
                                                  {DType::f16, 64, 64},
                                                  {DType::f32, 128, 128},
                                                  {DType::bf16, 96, 40},
                                                  {DType::f32, 16, 8},
                                                  {DType::bf16, 192, 128},
                                                  {DType::f16, 256, 256}}) {
      if (!test::runs_at(recipe, dims)) continue;
      Case c = test::random_case(test::pack({{40, 40}, {0, 3}, {129, 200}, {1, 1}, {33, 31}, {300, 257}, {0, 0}}),
                                 {4, 2, dims, value_dims}, dtype, 3);
      const std::string where = fmt::format("{} dims {}/{}", name_of(dtype), dims, value_dims);
      expect_codes(c, recipe, where);
      disturb(c);
      expect_codes(c, recipe, where + ", disturbed");
    }
  }
}

/// Blocks of 32 tokens count from a document's first, here at odd rows, with last ones that are partial; a poisoned
/// token has no part in its block's exponent, nor has a document of one token, or of NaN alone, in another's.
TEST_F(CudaCodes, ScalesOf32TokensStayInTheirBlock) {
  const Packing packing = test::pack({{1, 1}, {65, 33}, {31, 95}, {160, 161}, {3, 0}, {40, 40}});
  Recipe mixed = test::recipe_named("mxfp8-tokenblock");
  mixed.name = "mixed";
  mixed.hadamard = Hadamard::at_128;
  mixed.s.left.block = Block::token();
  Recipe other = test::recipe_named("mxfp8");
  other.name = "other";
  other.claims.forward = other.claims.backward = Causality::block;
  other.s.left.block = Block::tokens32();
  other.o.tokens.block = Block::tokens32();
  for (const Recipe& recipe : {test::recipe_named("mxfp8-tokenblock"), mixed, other}) {
    ASSERT_TRUE(cuda::supports(recipe).ok());
    for (const DType dtype : {DType::bf16, DType::f32}) {
      for (const std::int64_t dims : {64, 128, 192, 256}) {
        Case c = test::random_case(packing, {2, 1, dims, dims}, dtype, 11);
        // Every token has a size of its own, so that every block's exponent is one token's.
        for (Tensor* tensor : {&c.q, &c.k, &c.v}) {
          const std::int64_t row = tensor->shape[1] * tensor->shape[2];
          for (std::int64_t i = 0; i < tensor->elements(); ++i) {
            tensor->set(i, std::ldexp(tensor->at(i), static_cast<int>(i / row * 7 % 19) - 9));
          }
        }
        const std::string where = fmt::format("{} {} dims {}", recipe.name, name_of(dtype), dims);
        expect_codes(c, recipe, where);
        for (Tensor* tensor : {&c.q, &c.k, &c.v}) {
          for (const std::int64_t token : {0, 1, 40, 66, 97}) tensor->set(token * tensor->shape[1] * dims + 5, NAN);
          for (std::int64_t token = 129; token < 161; ++token) test::set_row(*tensor, token, 0, INFINITY);
        }
        expect_codes(c, recipe, where + ", poisoned");
      }
    }
  }
}

TEST_F(CudaCodes, OfRealLayers) {
  for (const test::Capture& capture : test::captures()) {
    for (const Recipe& recipe : test::device_recipes()) expect_codes(capture.c, recipe, "of " + capture.name);
  }
}

// ---- What the host makes of a recipe; these run without a device ----

/// Every format, the codes' ties and the numbers beside them, and far beyond either end.
TEST(CudaEmbedded, WeightsRoundAsTheCodecsDo) {
  for (const Encoding encoding : {Encoding::e4m3, Encoding::e5m2, Encoding::e2m3, Encoding::e3m2, Encoding::e2m1}) {
    const Format format = *element_format(encoding);
    const cuda::WeightRule rule = cuda::weight_rule({.encoding = encoding, .block = Block::dims32()}, 1);
    const auto check = [&](float x) {
      ASSERT_EQ(cuda::rounded_to(rule.to, x), decode(format, encode(format, x))) << to_string(encoding) << " " << x;
    };
    for (int code = 0; code + 1 < code_count(format) / 2; ++code) {
      const float low = decode(format, static_cast<std::uint8_t>(code));
      const float high = decode(format, static_cast<std::uint8_t>(code + 1));
      if (!std::isfinite(high)) break;
      const float tie = (low + high) / 2;
      for (const float x : {low, tie, std::nextafter(tie, 0.0F), std::nextafter(tie, INFINITY)}) check(x);
    }
    for (const float x : {spec_of(format).max, 1.1F * spec_of(format).max, 1e30F, 1e-30F, 1e-45F, 0.0F}) check(x);
    EXPECT_TRUE(std::isnan(cuda::rounded_to(rule.to, NAN)));
  }
  const cuda::WeightRule bf16 = cuda::weight_rule({.encoding = Encoding::bf16}, 1);
  // From the least normal number to 1.
  for (std::uint32_t bits = 0x00800000U; bits <= 0x3F800000U; bits += 997) {
    const auto x = std::bit_cast<float>(bits);
    ASSERT_EQ(cuda::rounded_to(bf16.to, x), decode_bf16(encode_bf16(x))) << x;
  }
  EXPECT_EQ(cuda::rounded_to(bf16.to, 1 + 0x1p-8F), 1.0F);
  EXPECT_EQ(cuda::rounded_to(bf16.to, 1 + 0x1p-8F + 0x1p-22F), 1 + 0x1p-7F);
}

/// The exponent of a group whose largest weight is x, from the limit and the offset.
TEST(CudaEmbedded, GroupsScaleByTheRecipesRule) {
  for (const Encoding encoding : {Encoding::e4m3, Encoding::e5m2, Encoding::e2m3, Encoding::e3m2, Encoding::e2m1}) {
    for (const ScaleRule rule : {ScaleRule::floor, ScaleRule::ceil, ScaleRule::uos}) {
      const cuda::WeightRule of = cuda::weight_rule({.encoding = encoding, .block = Block::dims32(), .rule = rule}, 1);
      for (std::uint32_t bits = 0x3F800000U; bits <= 0x40000000U; ++bits) {
        const auto x = std::bit_cast<float>(bits);
        ASSERT_EQ(of.group_offset + (x > of.group_limit ? 1.0F : 0.0F),
                  static_cast<float>(scale_exponent(*element_format(encoding), rule, x)))
            << to_string(encoding) << " " << to_string(rule) << " " << x;
      }
    }
  }
}

TEST(CudaEmbedded, NamesTheOperandThatBf16DoesNotHold) {
  const Recipe base = test::recipe_named("mxattention");
  ASSERT_TRUE(cuda::supports(base).ok());
  const auto refused = [&](const auto& change, const std::vector<std::string>& words) {
    Recipe recipe = base;
    change(recipe);
    EXPECT_TRUE(test::refused_with(cuda::supports(recipe), words));
  };
  const Operand f32;
  refused([&](Recipe& recipe) { recipe.s.left = f32; }, {"mxattention", "s.left is f32", "bf16"});
  refused([&](Recipe& recipe) { recipe.s.right.block = Block::tensor(); }, {"s.right is e2m1 tensor"});
  refused([&](Recipe& recipe) { recipe.o.tokens = f32; }, {"o.tokens is f32"});
  refused([&](Recipe& recipe) { recipe.o.weights = f32; }, {"o.weights is f32"});
  refused([&](Recipe& recipe) { recipe.o.cut->tokens = f32; }, {"o.cut.tokens is f32"});
  refused([&](Recipe& recipe) { recipe.o.cut->weights = f32; }, {"o.cut.weights is f32"});
  EXPECT_TRUE(test::refused_with(cuda::supports(test::recipe_named("fp8-tensor")), {"s.left is e4m3 tensor"}));
}

TEST_F(CudaCodes, TheOrderOfTheWorkIsTheHosts) {
  std::vector<std::int32_t> many(500, 1);
  many[17] = 300;
  many[18] = 0;
  many[400] = 129;
  for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(40, 7), Mask::window(100, -20)}) {
    for (const Packing& packing : {test::pack_self({1000, 37, 0, 1, 300, 256, 128, 129, 127}), test::pack_self(many),
                                   test::pack({{100, 500}, {0, 3}, {5, 0}, {300, 20}})}) {
      Case c = test::random_case(packing, {2, 1, 64, 64}, DType::bf16, 3);
      c.problem.mask = mask;
      DeviceCase device(c, test::offsets_of(packing));
      const cuda::Launches launches = run(device, test::device_recipes().front());
      const cuda::Sizes& sizes = launches.schedule.sizes;
      const cuda::Workspace& work = launches.schedule.workspace;
      const std::vector<cuda::Item> items = downloaded(work.items, sizes.item_slots());
      const std::vector<std::int32_t> order = downloaded(work.order, sizes.item_slots());
      const std::vector<std::uint64_t> costs = downloaded(work.costs_out, sizes.item_slots());
      const Result<Schedule> want = make_schedule(packing, mask, {cuda::kTileRows, cuda::kTileRows});
      ASSERT_TRUE(want.ok());
      for (std::size_t i = 0; i < want->items.size(); ++i) {
        const WorkItem& host = want->items[i];
        const cuda::Item& item = items[static_cast<std::size_t>(order[i])];
        ASSERT_EQ(costs[i], static_cast<std::uint64_t>(host.cost) + 1) << i;
        ASSERT_EQ(item.document, host.document) << i;
        ASSERT_EQ(item.query_row - packing.documents()[static_cast<std::size_t>(host.document)].q_begin,
                  host.query_begin)
            << i;
        ASSERT_EQ(item.queries, host.query_end - host.query_begin) << i;
      }
      for (std::size_t i = want->items.size(); i < costs.size(); ++i) ASSERT_EQ(costs[i], 0U) << i;
    }
  }
}

/// The same numbers in FP32.
Tensor widened(const Tensor& tensor) {
  Tensor out = Tensor::zeros(DType::f32, tensor.shape);
  for (std::int64_t i = 0; i < tensor.elements(); ++i) out.set(i, tensor.at(i));
  return out;
}

/// O in FP32 is what a narrower O is rounded from: the codes are the same.
void expect_residual(const cuda::Launches& launches, const ForwardResult& got, const ForwardResult& whole,
                     const std::string& where) {
  const cuda::Workspace& work = launches.schedule.workspace;
  Tensor rest = Tensor::zeros(got.o.dtype, got.o.shape);
  const auto* place = static_cast<const std::byte*>(work.residual);
  const std::vector<std::byte> bytes = downloaded(place, static_cast<std::int64_t>(rest.data.size()));
  rest.data.assign(bytes.begin(), bytes.end());
  Tensor want = rest;
  for (std::int64_t i = 0; i < want.elements(); ++i) want.set(i, whole.o.at(i) - got.o.at(i));
  EXPECT_TRUE(test::same_bits(rest, want)) << "residual " << where;
}

/// LSE is the records' base and sum; the largest exponent of V is there wherever it is asked for.
void expect_records(const cuda::Launches& launches, const Case& c, const ForwardResult& got, const Recipe& recipe) {
  const cuda::Sizes& sizes = launches.schedule.sizes;
  const std::vector<cuda::RowRecord> records =
      downloaded(launches.schedule.workspace.rows, sizes.rows_q() * sizes.heads);
  const Quantized v = reference(c.v, c, {recipe.o.tokens, Side::key, false, 0, 0});
  std::int64_t filled = 0;
  for (const Document& document : c.problem.packing.documents()) {
    for (std::int64_t query = 0; query < document.q_length; ++query) {
      const KeyRange range = visible_keys(document, c.problem.mask, query);
      for (std::int64_t head = 0; head < sizes.heads; ++head) {
        const std::int64_t token = document.q_begin + query;
        const cuda::RowRecord& record = records[static_cast<std::size_t>(head * sizes.rows_q() + token)];
        const std::string at = fmt::format("of {} [{}, {}]", recipe.name, token, head);
        if (range.empty()) {
          ASSERT_TRUE(record.base == 0 && record.inverse == 0 && record.unit == 0 && record.most == 0) << at;
          continue;
        }
        ASSERT_EQ(record.base, std::floor(record.base)) << at;
        ASSERT_EQ(record.unit, std::floor(record.unit)) << at;
        const double log2 = static_cast<double>(record.base) - static_cast<double>(record.unit) -
                            std::log2(static_cast<double>(record.inverse));
        const double lse = got.lse.at(token * sizes.heads + head);
        ASSERT_NEAR(log2 * std::log(2.0), lse, 1e-5 + 1e-6 * std::fabs(lse)) << at;
        if (record.most == -INFINITY) continue;
        ++filled;
        float most = -INFINITY;
        for (std::int64_t key = document.k_begin + range.begin; key < document.k_begin + range.end; ++key) {
          const std::int64_t row = key * sizes.kv_heads + head / (sizes.heads / sizes.kv_heads);
          most = std::max(most, static_cast<float>(v.exponents[static_cast<std::size_t>(row)]));
        }
        ASSERT_EQ(record.most, most) << at;
      }
    }
  }
  EXPECT_GT(filled, 0) << "no item had light keys: this tests nothing";
}

TEST_F(CudaCodes, WhatTheForwardSavesForTheBackward) {
  for (const Recipe& recipe : test::device_recipes()) {
    if (!cuda::supports_backward(recipe).ok()) continue;
    for (const auto& [dims, value_dims] : {std::pair{64, 64}, {128, 128}, {256, 256}, {64, 136}, {40, 72}}) {
      for (const DType dtype : {DType::bf16, DType::f16}) {
        Case c = test::random_case(test::pack({{300, 300}, {33, 20}, {4, 0}, {1, 1}, {129, 1100}}),
                                   {2, 1, dims, value_dims}, dtype, 7);
        for (std::int64_t token = 0; token < c.v.shape[0]; ++token) {
          if (token < 64 || token % 50 == 0) test::set_row(c.v, token, 0, 0x1p-9F);  // Whole blocks of 32 too.
        }
        DeviceCase device(c, test::offsets_of(c.problem.packing));
        device.call.training = true;
        const cuda::Launches launches = run(device, recipe);
        const std::string where = fmt::format("of {} dims {}/{} {}", recipe.name, dims, value_dims, name_of(dtype));
        device.expect_intact(where);
        const ForwardResult got = device.read();
        test::expect_same_outputs(got, test::device_forward(c, recipe), where);
        expect_records(launches, c, got, recipe);
        Case wide = c;
        for (Tensor* tensor : {&wide.q, &wide.k, &wide.v, &wide.dout}) *tensor = widened(*tensor);
        expect_residual(launches, got, test::device_forward(wide, recipe), where);
      }
    }
  }
}

}  // namespace
}  // namespace mxflash
