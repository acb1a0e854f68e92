// What must not move a bit of the CUDA engine's gradients: another run, other documents in the pack, for dQ later
// tokens whatever they hold.
#include <limits>

#include "unit/cuda_backward_support.hpp"

namespace mxflash {
namespace {

using test::Case;
using test::rows_of;

class CudaBackwardBits : public test::BackwardOnDevice {};

/// One document's rows as a problem of its own.
Case document_of(const Case& c, const Document& document) {
  Case part = c;
  const std::int64_t q_end = document.q_begin + document.q_length;
  const std::int64_t k_end = document.k_begin + document.k_length;
  part.problem.packing = Packing::single(document.q_length, document.k_length);
  part.q = rows_of(c.q, document.q_begin, q_end);
  part.dout = rows_of(c.dout, document.q_begin, q_end);
  part.dlse = rows_of(*c.dlse, document.q_begin, q_end);
  part.k = rows_of(c.k, document.k_begin, k_end);
  part.v = rows_of(c.v, document.k_begin, k_end);
  return part;
}

/// Its gradients, of those of the whole pack.
BackwardResult part_of(const BackwardResult& whole, const Document& document) {
  const std::int64_t q_end = document.q_begin + document.q_length;
  const std::int64_t k_end = document.k_begin + document.k_length;
  return {rows_of(whole.dq, document.q_begin, q_end),
          rows_of(whole.dk, document.k_begin, k_end),
          rows_of(whole.dv, document.k_begin, k_end),
          {},
          {}};
}

TEST_F(CudaBackwardBits, C23_EveryRunIsTheSame) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const std::int64_t dims : {64, 128, 256}) {
      const Case c =
          test::with_dlse(test::random_case(test::pack({{900, 900}, {700, 900}, {1, 1}, {33, 97}, {0, 4}, {512, 512}}),
                                            {4, 2, dims, dims}, DType::bf16, 3));
      const BackwardResult first = test::device_backward(c, recipe);
      for (int run = 0; run < 5; ++run) {
        test::expect_same_gradients(test::device_backward(c, recipe), first,
                                    fmt::format("of {} dims {} run {}", recipe.name, dims, run));
      }
    }
  }
}

/// Runs in two workspaces by turns.
void expect_two_hundred_runs_the_same(const Case& c, const Recipe& recipe, const std::string& where) {
  constexpr int kRuns = 200;
  const test::Offsets offsets = test::offsets_of(c.problem.packing);
  test::BackwardDeviceCase even(c, offsets);
  test::BackwardDeviceCase odd(c, offsets, 0);
  even.reserve(recipe);
  odd.reserve(recipe);
  const BackwardResult first = test::device_backward(c, recipe);
  for (int run = 0; run < kRuns && !testing::Test::HasFailure(); ++run) {
    const test::BackwardDeviceCase& device = run % 2 == 0 ? even : odd;
    ASSERT_TRUE(device.run(recipe).ok());
    ASSERT_TRUE(device.check().ok());
    test::expect_same_gradients(device.read(), first, fmt::format("{}, run {}", where, run));
  }
}

/// Several key tiles a document, and with eight key/value heads more of them than an H200 has multiprocessors, so that
/// blocks take work in an order of their own. With groups of heads dK and dV add up over two of them too. More dims
/// have fewer tokens in about as many tiles: most of the time is the comparison.
TEST_F(CudaBackwardBits, C23_TwoHundredRunsAreTheSame) {
  const Packing long_ones = test::pack({{900, 900}, {700, 900}, {33, 97}, {512, 512}});
  const Packing short_ones =
      test::pack({{300, 900}, {129, 129}, {129, 129}, {129, 129}, {129, 129}, {129, 129}, {33, 97}});
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const std::int64_t dims : {64, 128, 256}) {
      for (const std::int64_t heads : {8, 16}) {
        const Packing& packing = dims == 64 ? long_ones : short_ones;
        const Case c = test::with_dlse(test::random_case(packing, {heads, 8, dims, dims}, DType::bf16, 3));
        expect_two_hundred_runs_the_same(c, recipe,
                                         fmt::format("of {} with {} heads, dims {}", recipe.name, heads, dims));
      }
    }
  }
}

/// Then dQ's sums may come in any order, and nothing else.
TEST_F(CudaBackwardBits, NotDeterministicMovesDqByItsRounding) {
  for (const Recipe& recipe : test::backward_recipes()) {
    const Case c = test::random_case(test::pack_self({900, 300}), {4, 2, 64, 64}, DType::f32, 3);
    const BackwardResult want = test::device_backward(c, recipe);
    Options options = test::on_engine("cuda");
    options.deterministic = false;
    const BackwardResult got = test::backward(c, recipe, options);
    EXPECT_LE(test::relative_l2(got.dq, want.dq), test::order_noise(recipe)) << recipe.name;
    EXPECT_TRUE(test::same_bits(got.dk, want.dk)) << recipe.name;
    EXPECT_TRUE(test::same_bits(got.dv, want.dv)) << recipe.name;
  }
}

/// A document alone, between others, behind many others.
TEST_F(CudaBackwardBits, C3_ADocumentDoesNotKnowItsPlaceInThePack) {
  const Packing packing =
      test::pack({{1, 1}, {70, 70}, {0, 3}, {131, 140}, {256, 256}, {33, 20}, {5, 0}, {300, 300}, {2, 2}, {129, 129}});
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const Mask& mask : {Mask::causal(), Mask::full(), Mask::window(50, 7)}) {
      for (const std::int64_t dims : {64, 128}) {
        Case c = test::with_dlse(test::random_case(packing, {2, 1, dims, dims}, DType::bf16, 5));
        c.problem.mask = mask;
        const BackwardResult whole = test::device_backward(c, recipe);
        for (const Document& document : packing.documents()) {
          test::expect_same_gradients(test::device_backward(document_of(c, document), recipe), part_of(whole, document),
                                      fmt::format("of {} dims {} queries from {} on, window ({}, {})", recipe.name,
                                                  dims, document.q_begin, mask.left, mask.right));
        }
      }
    }
  }
}

/// Another run, a document alone, any order.
TEST_F(CudaBackwardBits, C3_C23_SixteenHeadsOfAGroup) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const Mask& mask : {Mask::causal(), Mask::window(400, 9)}) {
      for (const std::int64_t dims : {64, 128, 256}) {
        const Case c = test::large_group(mask, dims, DType::f32);
        const std::string where =
            fmt::format("of {} dims {} window ({}, {})", recipe.name, dims, mask.left, mask.right);
        const BackwardResult whole = test::device_backward(c, recipe);
        for (int run = 0; run < 10; ++run) {
          test::expect_same_gradients(test::device_backward(c, recipe), whole, fmt::format("{} run {}", where, run));
        }
        for (const Document& document : c.problem.packing.documents()) {
          test::expect_same_gradients(test::device_backward(document_of(c, document), recipe), part_of(whole, document),
                                      fmt::format("{} queries from {} on", where, document.q_begin));
        }
        Options options = test::on_engine("cuda");
        options.deterministic = false;
        const BackwardResult any = test::backward(c, recipe, options);
        EXPECT_LE(test::relative_l2(any.dq, whole.dq), test::order_noise(recipe)) << where;
        EXPECT_TRUE(test::same_bits(any.dk, whole.dk)) << where;
        EXPECT_TRUE(test::same_bits(any.dv, whole.dv)) << where;
      }
    }
  }
}

TEST_F(CudaBackwardBits, C1_LaterTokensDoNotReachEarlierDqOfALargeGroup) {
  constexpr std::int64_t kFrom = 128;
  for (const Recipe& recipe : test::backward_recipes()) {
    const Case before = test::with_dlse(test::random_case(test::pack_self({450}), {16, 1, 64, 64}, DType::bf16, 13));
    const Tensor was = test::device_backward(before, recipe).dq;
    for (const float value : {3e38F, 1e-30F, 0.0F, std::nanf("")}) {
      Case after = before;
      for (Tensor* tensor : {&after.q, &after.k, &after.v, &after.dout, &*after.dlse}) {
        for (std::int64_t token = kFrom; token < tensor->shape[0]; ++token) {
          for (std::int64_t head = 0; head < tensor->shape[1]; ++head) test::set_row(*tensor, token, head, value);
        }
      }
      EXPECT_TRUE(test::same_bits(rows_of(test::device_backward(after, recipe).dq, 0, kFrom), rows_of(was, 0, kFrom)))
          << "of " << recipe.name << " before " << value;
    }
  }
}

/// How many rows of dQ before `token` no later token may move.
std::int64_t rows_kept_of_dq(const Recipe& recipe, std::int64_t token) {
  switch (std::max(recipe.claims.forward, recipe.claims.backward)) {
    case Causality::exact: return token;
    case Causality::block: return token / kBlock * kBlock;
    case Causality::leaks: return 0;
  }
  return 0;
}

/// Later tokens of the same document, in all inputs or in one: other ones, huge ones, NaN, Inf, zeros.
TEST_F(CudaBackwardBits, C1_LaterTokensDoNotReachEarlierDq) {
  constexpr std::int64_t kTokens = 300;
  for (const Recipe& recipe : test::backward_recipes()) {
    const Case before = test::with_dlse(test::random_case(test::pack_self({300, 77}), {2, 1, 64, 64}, DType::bf16, 13));
    const BackwardResult was = test::device_backward(before, recipe);
    const auto expect_kept = [&](const Case& after, std::int64_t from, const std::string& what) {
      const std::int64_t kept = rows_kept_of_dq(recipe, from);
      EXPECT_TRUE(test::same_bits(rows_of(test::device_backward(after, recipe).dq, 0, kept), rows_of(was.dq, 0, kept)))
          << "dq of " << recipe.name << " before " << what << " from " << from << " on";
    };
    const auto overwrite = [&](Tensor& tensor, std::int64_t from, std::int64_t end, float value) {
      for (std::int64_t token = from; token < end; ++token) {
        for (std::int64_t head = 0; head < tensor.shape[1]; ++head) test::set_row(tensor, token, head, value);
      }
    };
    for (const std::int64_t from : {1, 16, 31, 32, 33, 64, 100, 127, 128, 129, 160, 255, 256, 257, 299}) {
      for (const float value : {3e38F, -1e30F, 1e-30F, 7.0F, 0.0F, std::nanf("")}) {
        Case after = before;
        for (Tensor* tensor : {&after.q, &after.k, &after.v, &after.dout, &*after.dlse}) {
          overwrite(*tensor, from, kTokens, value);
        }
        expect_kept(after, from, fmt::format("{}", value));
      }
      // One token of one tensor, which a shared scale would spread.
      for (const float value : {1e30F, 30.0F, 1e-20F, std::numeric_limits<float>::infinity()}) {
        for (int which = 0; which < 5; ++which) {
          Case after = before;
          Tensor* tensors[] = {&after.q, &after.k, &after.v, &after.dout, &*after.dlse};
          overwrite(*tensors[which], from, from + 1, value);
          expect_kept(after, from, fmt::format("{} in input {}", value, which));
        }
      }
    }
  }
}

/// A causal document that goes on keeps the bits of its first rows of dQ.
TEST_F(CudaBackwardBits, ADocumentThatGoesOnKeepsItsFirstDq) {
  for (const Recipe& recipe : test::backward_recipes()) {
    for (const Mask& mask : {Mask::causal(), Mask::window(60, 0), Mask::window(90, -3)}) {
      Case c = test::with_dlse(test::random_case(Packing::single(700, 700), {2, 1, 128, 128}, DType::bf16, 11));
      c.problem.mask = mask;
      const BackwardResult whole = test::device_backward(c, recipe);
      for (const std::int64_t length : {1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 511, 699}) {
        const Case part = document_of(c, Document{.q_begin = 0, .q_length = length, .k_begin = 0, .k_length = length});
        // A later query of a block may be the first to cut a tile of old keys (numerics.md, section 3): where cut tiles
        // have other operands, of O or of dQ, the last block's rows then have other codes.
        const bool by_block = (recipe.o.cut || recipe.dq.cut) && mask.left < Mask::unbounded;
        const std::int64_t kept = rows_kept_of_dq(recipe, by_block ? length / kBlock * kBlock : length);
        EXPECT_TRUE(
            test::same_bits(rows_of(test::device_backward(part, recipe).dq, 0, kept), rows_of(whole.dq, 0, kept)))
            << "dq of " << recipe.name << " of " << length << " rows, window (" << mask.left << ", " << mask.right
            << ")";
      }
    }
  }
}

}  // namespace
}  // namespace mxflash
