#include "mxflash/quantize.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "unit/support.hpp"

namespace mxflash {
namespace {

using test::Distribution;

// ---- What the room should do, in double and by search ----

/// The nearest finite code by value, ties to the even code.
std::uint8_t nearest_code(Format format, float value) {
  const int half = code_count(format) / 2;
  const double magnitude = std::fabs(static_cast<double>(value));
  int best = 0;
  double best_distance = magnitude;
  for (int code = 1; code < half; ++code) {
    const auto candidate = static_cast<double>(decode(format, static_cast<std::uint8_t>(code)));
    if (!std::isfinite(candidate)) continue;
    const double distance = std::fabs(candidate - magnitude);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) {
      best = code;
      best_distance = distance;
    }
  }
  return static_cast<std::uint8_t>(best + (std::signbit(value) ? half : 0));
}

double max_of(Format format) { return static_cast<double>(spec_of(format).max); }

/// The smallest exponent e with maximum <= limit 2^e.
int smallest_exponent(double maximum, double limit) {
  int exponent = -200;
  while (maximum > std::ldexp(limit, exponent)) ++exponent;
  return exponent;
}

int expected_exponent(Format format, ScaleRule rule, double maximum) {
  if (maximum == 0) return -127;
  int exponent = 0;
  switch (rule) {
    case ScaleRule::floor: exponent = std::ilogb(maximum) - std::ilogb(max_of(format)); break;
    case ScaleRule::ceil: exponent = smallest_exponent(maximum, max_of(format)); break;
    case ScaleRule::uos: exponent = smallest_exponent(maximum, 7.25); break;
  }
  return std::clamp(exponent, -127, 127);
}

std::uint8_t expected_nvfp4_scale(double maximum) {
  if (maximum == 0) return 0;
  const double sixth = maximum / 6;
  int best = 1;
  for (int code = 2; code < 0x7F; ++code) {
    const auto value = [](int c) { return static_cast<double>(decode(Format::e4m3, static_cast<std::uint8_t>(c))); };
    const double gain = std::fabs(value(best) - sixth) - std::fabs(value(code) - sixth);
    if (gain > 0 || (gain == 0 && code % 2 == 0)) best = code;
  }
  return static_cast<std::uint8_t>(best);
}

/// One block, its place and its tokens.
struct BlockPlace {
  std::int64_t token = 0;  ///< First, in the pack.
  std::int64_t rows = 0;
  std::int64_t head = 0;
  std::int64_t dim = 0;
  std::int64_t dims = 0;
  std::int64_t scale = 0;  ///< Flat index of its scale.
};

std::vector<BlockPlace> blocks_of(const Tensor& tensor, const Packing& packing, Side side, const Block& block) {
  std::vector<BlockPlace> places;
  const std::int64_t dims = tensor.shape[2];
  const std::int64_t width = block.columns == 0 ? dims : block.columns;
  const std::int64_t columns = (dims + width - 1) / width;
  std::int64_t scale_row = 0;
  for (const Document& document : packing.documents()) {
    const std::int64_t begin = side == Side::query ? document.q_begin : document.k_begin;
    const std::int64_t length = side == Side::query ? document.q_length : document.k_length;
    for (std::int64_t row = 0; row < length; row += block.rows, ++scale_row) {
      for (std::int64_t head = 0; head < tensor.shape[1]; ++head) {
        for (std::int64_t c = 0; c < columns; ++c) {
          places.push_back({begin + row, std::min<std::int64_t>(block.rows, length - row), head, c * width,
                            std::min(width, dims - c * width), (scale_row * tensor.shape[1] + head) * columns + c});
        }
      }
    }
  }
  return places;
}

void for_each_element(const Tensor& tensor, const BlockPlace& place, const std::function<void(std::int64_t)>& body) {
  for (std::int64_t t = place.token; t < place.token + place.rows; ++t) {
    for (std::int64_t d = place.dim; d < place.dim + place.dims; ++d) {
      body((t * tensor.shape[1] + place.head) * tensor.shape[2] + d);
    }
  }
}

double maximum_of(const Tensor& tensor, const BlockPlace& place) {
  double maximum = 0;
  for_each_element(tensor, place,
                   [&](std::int64_t i) { maximum = std::max(maximum, std::fabs(static_cast<double>(tensor.at(i)))); });
  return maximum;
}

// ---- Helpers ----

Quantized quantized(const Tensor& tensor, const Packing& packing, const QuantizeOptions& options, int threads = 1) {
  Result<Quantized> result = quantize(test::view(tensor), packing, options, threads);
  EXPECT_TRUE(result.ok()) << (result.ok() ? "" : result.error().message);
  return result.ok() ? *std::move(result) : Quantized{};
}

Quantized quantized(const Tensor& tensor, const Packing& packing, const Operand& operand) {
  return quantized(tensor, packing, {.operand = operand});
}

float dequantized(const Quantized& q, std::int64_t index) {
  const std::int64_t row = index / q.shape[2];
  return q.dequantized(row / q.shape[1], row % q.shape[1], index % q.shape[2]);
}

Tensor row_tensor(const std::vector<float>& values) {
  return Tensor::from_floats(DType::f32, {1, 1, static_cast<std::int64_t>(values.size())}, values);
}

/// The first element, which is the block's maximum, after a trip through a block.
float first_of_block(float maximum, Encoding encoding, ScaleRule rule) {
  std::vector<float> values(32, 0.25F);
  values[0] = maximum;
  const Operand operand{.encoding = encoding, .block = Block::dims32(), .rule = rule};
  return quantized(row_tensor(values), Packing::single(1, 1), operand).dequantized(0, 0, 0);
}

std::vector<Operand> block_operands() {
  std::vector<Operand> operands;
  for (const Encoding encoding : {Encoding::e4m3, Encoding::e5m2, Encoding::e2m3, Encoding::e3m2, Encoding::e2m1}) {
    for (const Block block :
         {Block::token(), Block::tokens32(), Block::dims32(), Block::channel32(), Block::square32()}) {
      for (const ScaleRule rule : {ScaleRule::floor, ScaleRule::ceil, ScaleRule::uos}) {
        if (rule == ScaleRule::uos && encoding != Encoding::e2m1) continue;
        operands.push_back({.encoding = encoding, .block = block, .rule = rule});
      }
    }
  }
  return operands;
}

std::vector<Operand> nvfp4_operands() {
  std::vector<Operand> operands;
  for (const Block block : {Block::dims16(), Block::channel16()}) {
    for (const SecondLevel level : {SecondLevel::fixed, SecondLevel::adaptive}) {
      operands.push_back({.encoding = Encoding::nvfp4, .block = block, .second_level = level});
    }
  }
  return operands;
}

std::vector<Operand> all_operands() {
  std::vector<Operand> operands = block_operands();
  for (const Operand& operand : nvfp4_operands()) operands.push_back(operand);
  return operands;
}

std::string name_of_operand(const testing::TestParamInfo<Operand>& info) {
  std::string name = to_string(info.param.encoding) + "_" + to_string(info.param.block) + "_" +
                     to_string(info.param.rule) + (info.param.second_level == SecondLevel::adaptive ? "_adaptive" : "");
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

/// Lengths that leave partial blocks of 16, 32 and 128, an empty document among them.
const std::vector<test::Lengths> kLengths = {{1, 33}, {31, 1}, {33, 0}, {0, 31}, {130, 40}};

// ---- Codes and scales, every combination ----

class PowerOfTwoBlocks : public testing::TestWithParam<Operand> {};
class Nvfp4Blocks : public testing::TestWithParam<Operand> {};
class AnyBlocks : public testing::TestWithParam<Operand> {};

INSTANTIATE_TEST_SUITE_P(Quantize, PowerOfTwoBlocks, testing::ValuesIn(block_operands()), name_of_operand);
INSTANTIATE_TEST_SUITE_P(Quantize, Nvfp4Blocks, testing::ValuesIn(nvfp4_operands()), name_of_operand);
INSTANTIATE_TEST_SUITE_P(Quantize, AnyBlocks, testing::ValuesIn(all_operands()), name_of_operand);

TEST_P(PowerOfTwoBlocks, CodesAndScalesAreTheDocumentedOnes) {
  const Operand& operand = GetParam();
  const Format format = *element_format(operand.encoding);
  const Packing packing = test::pack(kLengths);
  for (const Side side : {Side::query, Side::key}) {
    const std::int64_t tokens = side == Side::query ? packing.tokens_q() : packing.tokens_k();
    const Tensor x = test::random_tensor(DType::f32, {tokens, 2, 40}, Distribution::wide, 7);
    const Quantized q = quantized(x, packing, {.operand = operand, .side = side});
    const std::vector<BlockPlace> places = blocks_of(x, packing, side, operand.block);
    ASSERT_EQ(q.scales.size(), places.size());
    for (const BlockPlace& place : places) {
      const int exponent = expected_exponent(format, operand.rule, maximum_of(x, place));
      ASSERT_EQ(q.scales[static_cast<std::size_t>(place.scale)], exponent + 127) << "token " << place.token;
      for_each_element(x, place, [&](std::int64_t i) {
        const auto code = nearest_code(format, static_cast<float>(std::ldexp(static_cast<double>(x.at(i)), -exponent)));
        ASSERT_EQ(q.codes[static_cast<std::size_t>(i)], code) << test::place_of(x, i) << " of " << x.at(i);
        ASSERT_EQ(dequantized(q, i), std::ldexp(decode(format, code), exponent)) << test::place_of(x, i);
      });
    }
  }
}

TEST_P(Nvfp4Blocks, CodesAndScalesAreTheDocumentedOnes) {
  const Operand& operand = GetParam();
  const Packing packing = test::pack(kLengths);
  const Tensor x = test::random_tensor(DType::f32, {packing.tokens_q(), 2, 40}, Distribution::wide, 8);
  const Quantized q = quantized(x, packing, operand);

  // The second level: a power of two that brings a row (or 128 rows of one head) to at most 448 x 6.
  std::vector<int> levels(static_cast<std::size_t>(x.elements()));
  if (operand.second_level == SecondLevel::adaptive) {
    const Block shared{operand.block.rows == 1 ? 1 : 128, 0};
    for (const BlockPlace& place : blocks_of(x, packing, Side::query, shared)) {
      const int level = smallest_exponent(maximum_of(x, place), 448.0 * 6);
      for_each_element(x, place, [&](std::int64_t i) { levels[static_cast<std::size_t>(i)] = level; });
    }
  }
  for (const BlockPlace& place : blocks_of(x, packing, Side::query, operand.block)) {
    const int level = levels[static_cast<std::size_t>((place.token * 2 + place.head) * 40)];
    const std::uint8_t scale = expected_nvfp4_scale(std::ldexp(maximum_of(x, place), -level));
    ASSERT_EQ(q.scales[static_cast<std::size_t>(place.scale)], scale) << "token " << place.token;
    const float divisor = decode_ue4m3(scale);
    for_each_element(x, place, [&](std::int64_t i) {
      const float quotient = divisor == 0 ? 0.0F : std::ldexp(x.at(i), -level) / divisor;
      const std::uint8_t code = nearest_code(Format::e2m1, quotient);
      ASSERT_EQ(q.codes[static_cast<std::size_t>(i)], code) << test::place_of(x, i) << " of " << x.at(i);
      ASSERT_EQ(dequantized(q, i), std::ldexp(decode(Format::e2m1, code) * divisor, level)) << test::place_of(x, i);
    });
  }
}

TEST(Quantize, TensorWideScaleIsTheMaximumOverTheFormats) {
  const Packing packing = test::pack_self({31, 2});
  Tensor x = test::random_tensor(DType::f32, {33, 2, 8}, Distribution::normal, 9);
  x.set(100, -1234.0F);
  test::set_row(x, 32, 1, std::numeric_limits<float>::infinity());
  const Quantized q = quantized(x, packing, {.encoding = Encoding::e4m3, .block = Block::tensor()});
  EXPECT_EQ(q.tensor_scale, 1234.0F / 448.0F);
  EXPECT_TRUE(q.scales.empty());
  for (std::int64_t i = 0; i + 8 < x.elements(); ++i) {
    const std::uint8_t code = nearest_code(Format::e4m3, x.at(i) / q.tensor_scale);
    ASSERT_EQ(q.codes[static_cast<std::size_t>(i)], code) << test::place_of(x, i);
    ASSERT_EQ(dequantized(q, i), decode(Format::e4m3, code) * q.tensor_scale);
  }
  EXPECT_TRUE(std::isnan(q.dequantized(32, 1, 0)));
}

TEST(Quantize, UnquantizedEncodingsKeepTheValues) {
  const Tensor x = test::random_tensor(DType::f32, {5, 2, 8}, Distribution::wide, 10);
  const Quantized f32 = quantized(x, Packing::single(5, 5), Operand{.encoding = Encoding::f32});
  const Quantized bf16 = quantized(x, Packing::single(5, 5), Operand{.encoding = Encoding::bf16});
  EXPECT_TRUE(f32.codes.empty());
  EXPECT_TRUE(bf16.scales.empty());
  for (std::int64_t i = 0; i < x.elements(); ++i) {
    ASSERT_EQ(dequantized(f32, i), x.at(i));
    ASSERT_EQ(dequantized(bf16, i), decode_bf16(encode_bf16(x.at(i))));
  }
}

// ---- Blocks stay within a document and a head ----

TEST_P(AnyBlocks, C3_NeighboursAndThePlaceInThePackChangeNothing) {
  for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic}) {
    Operand operand = GetParam();
    operand.rounding = rounding;
    const QuantizeOptions options{.operand = operand, .seed = 3, .stream = 2};
    const Tensor x = test::random_tensor(DType::f32, {33, 2, 40}, Distribution::wide, 11);
    const Quantized alone = quantized(x, test::pack_self({33}), options);
    Tensor packed = test::random_tensor(DType::f32, {31 + 33 + 1, 2, 40}, Distribution::wide, 12);
    packed = test::scaled(packed, 1024);
    std::ranges::copy(x.data, packed.data.begin() + 31L * 2 * 40 * 4);
    const Quantized inside = quantized(packed, test::pack_self({31, 33, 1}), options);
    const auto first = static_cast<std::ptrdiff_t>(31 * 2 * 40);
    EXPECT_TRUE(std::equal(alone.codes.begin(), alone.codes.end(), inside.codes.begin() + first));
    EXPECT_TRUE(std::equal(alone.values.begin(), alone.values.end(), inside.values.begin() + first));
  }
}

TEST_P(AnyBlocks, AnotherHeadChangesNothing) {
  Tensor x = test::random_tensor(DType::f32, {40, 2, 40}, Distribution::wide, 13);
  const Quantized before = quantized(x, test::pack_self({40}), GetParam());
  for (std::int64_t t = 0; t < 40; ++t) test::set_row(x, t, 1, 1e6F);
  const Quantized after = quantized(x, test::pack_self({40}), GetParam());
  for (std::int64_t t = 0; t < 40; ++t) {
    for (std::int64_t d = 0; d < 40; ++d) ASSERT_EQ(before.dequantized(t, 0, d), after.dequantized(t, 0, d)) << t;
  }
}

TEST_P(AnyBlocks, C21_TheCodesOfARowDoNotDependOnTheRowCount) {
  const Operand& operand = GetParam();
  const Tensor x = test::random_tensor(DType::f32, {1024, 1, 16}, Distribution::normal, 14);
  const Quantized whole = quantized(x, Packing::single(1024, 1024), operand);
  const int shared =
      operand.second_level == SecondLevel::adaptive && operand.block.rows != 1 ? 128 : operand.block.rows;
  for (const std::int64_t rows : {1, 7, 127, 128, 129, 384, 512, 1024}) {
    const Quantized part = quantized(test::rows_of(x, 0, rows), Packing::single(rows, rows), operand);
    const std::int64_t whole_blocks = rows / shared * shared;
    for (std::int64_t i = 0; i < whole_blocks * 16; ++i) ASSERT_EQ(dequantized(part, i), dequantized(whole, i)) << rows;
  }
}

TEST_P(AnyBlocks, ThreadsChangeNothing) {
  const Tensor x = test::random_tensor(DType::bf16, {65, 3, 40}, Distribution::wide, 15);
  const Packing packing = test::pack_self({1, 31, 33});
  const Quantized one = quantized(x, packing, {.operand = GetParam()}, 1);
  for (const int threads : {2, 5}) {
    const Quantized many = quantized(x, packing, {.operand = GetParam()}, threads);
    EXPECT_EQ(one.codes, many.codes);
    EXPECT_EQ(one.scales, many.scales);
    EXPECT_EQ(one.exponents, many.exponents);
  }
}

// ---- Stochastic rounding ----

class StochasticBlocks : public testing::TestWithParam<Operand> {};
INSTANTIATE_TEST_SUITE_P(Quantize, StochasticBlocks,
                         testing::Values(Operand{.encoding = Encoding::e2m1, .block = Block::dims32()},
                                         Operand{.encoding = Encoding::e4m3, .block = Block::token()},
                                         Operand{.encoding = Encoding::nvfp4, .block = Block::dims16()},
                                         Operand{.encoding = Encoding::nvfp4,
                                                 .block = Block::channel16(),
                                                 .second_level = SecondLevel::adaptive}),
                         name_of_operand);

TEST_P(StochasticBlocks, SameSeedSameCodesOtherSeedOrStreamOthers) {
  Operand operand = GetParam();
  operand.rounding = Rounding::stochastic;
  const Tensor x = test::random_tensor(DType::f32, {64, 2, 32}, Distribution::normal, 16);
  const auto codes = [&](std::uint64_t seed, std::uint64_t stream) {
    return quantized(x, test::pack_self({64}), {.operand = operand, .seed = seed, .stream = stream}).codes;
  };
  EXPECT_EQ(codes(1, 0), codes(1, 0));
  EXPECT_NE(codes(1, 0), codes(2, 0));
  EXPECT_NE(codes(1, 0), codes(1, 1));
}

/// The mean over n seeds of a number that lands on either side of a gap has a deviation of at most gap / (2 sqrt(n)).
TEST_P(StochasticBlocks, TheMeanOverSeedsIsTheValue) {
  Operand nearest = GetParam();
  Operand operand = nearest;
  operand.rounding = Rounding::stochastic;
  const Tensor x = test::random_tensor(DType::f32, {16, 1, 32}, Distribution::normal, 17);
  constexpr int kSeeds = 400;
  std::vector<double> sum(static_cast<std::size_t>(x.elements()));
  std::vector<double> low(sum.size(), HUGE_VAL);
  std::vector<double> high(sum.size(), -HUGE_VAL);
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Quantized q = quantized(x, test::pack_self({16}), {.operand = operand, .seed = seed});
    for (std::size_t i = 0; i < sum.size(); ++i) {
      const auto value = static_cast<double>(dequantized(q, static_cast<std::int64_t>(i)));
      sum[i] += value;
      low[i] = std::min(low[i], value);
      high[i] = std::max(high[i], value);
    }
  }
  const Quantized rounded = quantized(x, test::pack_self({16}), nearest);
  double largest_gap = 0;
  for (std::size_t i = 0; i < sum.size(); ++i) largest_gap = std::max(largest_gap, high[i] - low[i]);
  const double largest_element = std::fabs(max_of(*element_format(operand.encoding)));
  for (std::size_t i = 0; i < sum.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    const auto value = static_cast<double>(x.at(index));
    const auto code = rounded.codes[i];
    // NVFP4's scale rounds down at times; what saturates is not unbiased.
    if (std::fabs(static_cast<double>(decode(*element_format(operand.encoding), code))) == largest_element) continue;
    const double gap = high[i] - low[i];
    // Never rounded the other way: so close to a code that 400 draws may well miss it.
    const double bound = gap > 0 ? 5 * gap / (2 * std::sqrt(kSeeds)) : 0.02 * largest_gap;
    EXPECT_NEAR(sum[i] / kSeeds, value, bound) << test::place_of(x, index);
    EXPECT_LE(low[i], static_cast<double>(dequantized(rounded, index)));
    EXPECT_GE(high[i], static_cast<double>(dequantized(rounded, index)));
  }
}

// ---- Zeros, small numbers, powers of two ----

TEST_P(AnyBlocks, C15_ZerosDequantizeToZero) {
  Tensor x = Tensor::zeros(DType::f32, {33, 1, 40});
  const Quantized zeros = quantized(x, test::pack_self({33}), GetParam());
  for (std::int64_t i = 0; i < x.elements(); ++i) {
    ASSERT_EQ(zeros.codes[static_cast<std::size_t>(i)], 0);
    ASSERT_EQ(dequantized(zeros, i), 0.0F);
  }
  for (std::int64_t i = 0; i < x.elements(); ++i) x.set(i, i / 40 >= 16 && i / 40 < 32 && i % 40 < 32 ? 0.0F : 1.5F);
  const Quantized mixed = quantized(x, test::pack_self({33}), GetParam());
  for (std::int64_t i = 0; i < x.elements(); ++i) ASSERT_EQ(dequantized(mixed, i), x.at(i)) << test::place_of(x, i);
}

TEST(Quantize, C15_AnNvfp4BlockBelowItsScalesIsZero) {
  const Operand fixed{.encoding = Encoding::nvfp4, .block = Block::dims16()};
  std::vector<float> values(16, 1e-9F);
  const Quantized tiny = quantized(row_tensor(values), Packing::single(1, 1), fixed);
  EXPECT_EQ(tiny.scales[0], 1);
  EXPECT_EQ(tiny.dequantized(0, 0, 0), 0.0F);
  // 0.5 x 2^-9 is the smallest non-zero number.
  values.assign(16, std::ldexp(1.0F, -10));
  EXPECT_EQ(quantized(row_tensor(values), Packing::single(1, 1), fixed).dequantized(0, 0, 3), std::ldexp(1.0F, -10));
  Operand adaptive = fixed;
  adaptive.second_level = SecondLevel::adaptive;
  values.assign(16, 1e-9F);
  EXPECT_NEAR(quantized(row_tensor(values), Packing::single(1, 1), adaptive).dequantized(0, 0, 3), 1e-9F, 1e-10F);
}

TEST(Quantize, C16_Nvfp4ScalesAtTheTopOfTheirRange) {
  const Operand fixed{.encoding = Encoding::nvfp4, .block = Block::dims16()};
  for (const float maximum : {2688.0F, 2689.0F, 1e30F}) {
    const Quantized q = quantized(row_tensor(std::vector<float>(16, maximum)), Packing::single(1, 1), fixed);
    EXPECT_EQ(q.scales[0], 0x7E) << maximum;
    EXPECT_EQ(q.dequantized(0, 0, 0), 2688.0F) << maximum;
  }
}

TEST_P(AnyBlocks, C17_APowerOfTwoMovesTheScalesAlone) {
  const Operand& operand = GetParam();
  if (operand.encoding == Encoding::nvfp4 && operand.second_level == SecondLevel::fixed) {
    GTEST_SKIP() << "a fixed second level has no scale to move";
  }
  const Tensor x = test::random_tensor(DType::f32, {33, 2, 40}, Distribution::normal, 18);
  const Quantized base = quantized(x, test::pack_self({33}), operand);
  for (const int shift : {-60, -7, 1, 40}) {
    const Quantized moved = quantized(test::scaled(x, std::ldexp(1.0F, shift)), test::pack_self({33}), operand);
    ASSERT_EQ(moved.codes, base.codes) << shift;
    for (std::int64_t i = 0; i < x.elements(); ++i) {
      ASSERT_EQ(dequantized(moved, i), std::ldexp(dequantized(base, i), shift)) << shift << test::place_of(x, i);
    }
  }
}

TEST(Quantize, C18_BlockMaximaByRule) {
  EXPECT_EQ(first_of_block(957, Encoding::e4m3, ScaleRule::floor), 896);
  EXPECT_EQ(first_of_block(957, Encoding::e4m3, ScaleRule::ceil), 960);
  EXPECT_EQ(first_of_block(449, Encoding::e4m3, ScaleRule::floor), 448);
  EXPECT_EQ(first_of_block(449, Encoding::e4m3, ScaleRule::ceil), 448);
  EXPECT_EQ(first_of_block(511, Encoding::e4m3, ScaleRule::floor), 448);
  EXPECT_EQ(first_of_block(511, Encoding::e4m3, ScaleRule::ceil), 512);
  for (const ScaleRule rule : {ScaleRule::floor, ScaleRule::ceil, ScaleRule::uos}) {
    EXPECT_EQ(first_of_block(2.7F, Encoding::e2m1, rule), 3);
    EXPECT_EQ(first_of_block(5.5F, Encoding::e2m1, rule), 6);
    EXPECT_EQ(first_of_block(1.2F, Encoding::e2m1, rule), 1);
  }
  for (const float maximum : {7.0F, 7.99F}) {
    EXPECT_EQ(first_of_block(maximum, Encoding::e2m1, ScaleRule::floor), 6);
    EXPECT_EQ(first_of_block(maximum, Encoding::e2m1, ScaleRule::ceil), 8);
  }
  EXPECT_EQ(first_of_block(7.25F, Encoding::e2m1, ScaleRule::uos), 6);
  EXPECT_EQ(first_of_block(7.26F, Encoding::e2m1, ScaleRule::uos), 8);
}

// ---- NaN and Inf ----

TEST_P(AnyBlocks, C20_APoisonedTokenIsAsIfZeroToTheOthers) {
  const Operand& operand = GetParam();
  const std::int64_t poisoned = 37;
  Tensor x = test::random_tensor(DType::f32, {65, 2, 40}, Distribution::wide, 19);
  Tensor zeroed = x;
  test::set_row(zeroed, poisoned, 1, 0);
  const Quantized clean = quantized(zeroed, test::pack_self({32, 33}), operand);
  for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
    x.set((poisoned * 2 + 1) * 40 + 11, bad);
    const Quantized q = quantized(x, test::pack_self({32, 33}), operand);
    ASSERT_EQ(q.codes, clean.codes);
    for (std::int64_t t = 0; t < 65; ++t) {
      for (std::int64_t h = 0; h < 2; ++h) {
        const bool here = t == poisoned && h == 1;
        ASSERT_EQ(q.poisoned[static_cast<std::size_t>(t * 2 + h)], here ? 1 : 0);
        for (std::int64_t d = 0; d < 40; ++d) {
          if (here) {
            ASSERT_TRUE(std::isnan(q.dequantized(t, h, d)));
          } else {
            ASSERT_EQ(q.dequantized(t, h, d), clean.dequantized(t, h, d));
          }
        }
      }
    }
  }
}

TEST_P(AnyBlocks, C20_ABlockOfPoisonedTokensAloneHasTheNanScale) {
  const Operand& operand = GetParam();
  Tensor x = test::random_tensor(DType::f32, {33, 1, 40}, Distribution::wide, 20);
  x.set(32 * 40 + 1, std::nanf(""));  // the last token, alone in its block of tokens
  const Quantized q = quantized(x, test::pack_self({33}), operand);
  const std::uint8_t nan = operand.encoding == Encoding::nvfp4 ? std::uint8_t{0x7F} : kE8m0Nan;
  for (const BlockPlace& place : blocks_of(x, test::pack_self({33}), Side::query, operand.block)) {
    EXPECT_EQ(q.scales[static_cast<std::size_t>(place.scale)] == nan, place.token == 32) << place.token;
  }
}

// ---- Hadamard ----

double sylvester(std::int64_t row, std::int64_t column) {
  return std::popcount(static_cast<std::uint64_t>(row & column)) % 2 == 0 ? 1 : -1;
}

TEST(Quantize, HadamardOfUnitRowsIsTheMatrix) {
  for (const std::int64_t dims : {8, 16, 32, 64, 128, 256}) {
    Tensor x = Tensor::zeros(DType::f32, {dims, 1, dims});
    for (std::int64_t i = 0; i < dims; ++i) x.set(i * dims + i, 1);
    const Quantized q = quantized(x, Packing::single(dims, dims), {.operand = {}, .hadamard = true});
    const double factor = std::exp2(-std::ceil(std::log2(static_cast<double>(dims)) / 2));
    for (std::int64_t i = 0; i < dims; ++i) {
      for (std::int64_t d = 0; d < dims; ++d) {
        ASSERT_EQ(static_cast<double>(q.dequantized(i, 0, d)), factor * sylvester(i, d)) << dims;
      }
    }
  }
}

TEST(Quantize, HadamardKeepsDotProductsOfIntegers) {
  for (const std::int64_t dims : {8, 16, 128}) {
    const Tensor x = test::random_tensor(DType::f32, {9, 1, dims}, Distribution::integers, 21);
    const Quantized q = quantized(x, Packing::single(9, 9), {.operand = {}, .hadamard = true});
    const int log2_dims = std::countr_zero(static_cast<std::uint64_t>(dims));
    const double left = std::exp2(2 * ((log2_dims + 1) / 2) - log2_dims);  // 1, or 2 where log2(dims) is odd
    for (std::int64_t a = 0; a < 9; ++a) {
      for (std::int64_t b = 0; b < 9; ++b) {
        double before = 0;
        double after = 0;
        for (std::int64_t d = 0; d < dims; ++d) {
          before += static_cast<double>(x.at(a * dims + d)) * static_cast<double>(x.at(b * dims + d));
          after += static_cast<double>(q.dequantized(a, 0, d)) * static_cast<double>(q.dequantized(b, 0, d));
        }
        ASSERT_EQ(after * left, before) << dims;
      }
    }
  }
}

// ---- Refusals, and nothing at all ----

TEST(Quantize, RefusesWhatDoesNotFit) {
  const Tensor x = Tensor::zeros(DType::f32, {4, 1, 40});
  const auto refused = [&](const Operand& operand, bool hadamard, std::int64_t tokens,
                           const std::vector<std::string>& words) {
    const QuantizeOptions options{.operand = operand, .hadamard = hadamard};
    EXPECT_TRUE(test::refused_with(quantize(test::view(x), Packing::single(tokens, tokens), options, 1), words));
  };
  refused({.encoding = Encoding::e4m3, .rule = ScaleRule::uos}, false, 4, {"uos", "e4m3", "e2m1"});
  refused({.encoding = Encoding::nvfp4, .block = Block::token()}, false, 4, {"block", "token", "nvfp4", "dims:16"});
  refused({.encoding = Encoding::e2m1, .block = Block::dims16()}, false, 4, {"block", "dims:16", "e2m1"});
  refused({.encoding = Encoding::e2m1, .second_level = SecondLevel::adaptive}, false, 4, {"second_level", "e2m1"});
  refused({.encoding = Encoding::e4m3, .block = Block::tensor(), .rounding = Rounding::stochastic}, false, 4,
          {"rounding", "stochastic", "tensor"});
  refused({.encoding = Encoding::e4m3}, true, 4, {"hadamard", "40", "power of two"});
  refused({.encoding = Encoding::e4m3}, false, 5, {"tokens", "4", "5"});
}

TEST(Quantize, RefusesBlocksThatNoFormatHas) {
  const Tensor x = Tensor::zeros(DType::f32, {4, 1, 40});
  for (const Block block : {Block{0, 5}, Block{-1, 0}, Block{1, -8}, Block{3, 7}, Block{64, 64}}) {
    const QuantizeOptions options{.operand = {.encoding = Encoding::e4m3, .block = block}};
    EXPECT_TRUE(test::refused_with(quantize(test::view(x), Packing::single(4, 4), options, 1), {"block"}))
        << block.rows << " x " << block.columns;
  }
}

TEST(Quantize, NoTokens) {
  for (const Operand& operand : all_operands()) {
    const Quantized q = quantized(Tensor::zeros(DType::f32, {0, 2, 16}), Packing::single(0, 0), operand);
    EXPECT_TRUE(q.codes.empty());
    EXPECT_TRUE(q.scales.empty());
  }
}

}  // namespace
}  // namespace mxflash
