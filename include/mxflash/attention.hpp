// Attention, forward and backward, on packed documents. Data flows one way:
// pack -> quantize -> schedule -> forward -> backward.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "mxflash/packing.hpp"
#include "mxflash/recipe.hpp"
#include "mxflash/tensor.hpp"

namespace mxflash {

/// What is computed. Query head h reads key/value head h / (heads / kv_heads).
struct Problem {
  Packing packing;
  Mask mask = Mask::causal();
  /// Multiplies Q K^T; absent: 1 / sqrt(head_dim).
  std::optional<float> scale;
};

/// q [tokens_q, heads, head_dim], k [tokens_k, kv_heads, head_dim], v [tokens_k, kv_heads, value_dim],
/// dout [tokens_q, heads, value_dim] (backward only). BF16, FP16 or FP32, all of one type; any strides.
/// dlse [tokens_q, heads, 1], FP32, any strides (backward only): the gradient of the loss with respect to lse, the
/// natural log, beside dout, which is that with respect to o; absent: zero.
struct Inputs {
  TensorView q;
  TensorView k;
  TensorView v;
  std::optional<TensorView> dout;
  std::optional<TensorView> dlse = std::nullopt;
};

/// Called from one thread at a time with the share that is done.
using Progress = std::function<void(double)>;

struct Options {
  std::string engine = "auto";  ///< A name of engines(), or "auto": the first that supports the problem.
  int threads = 0;              ///< 0: one a core.
  std::uint64_t seed = 0;       ///< Of stochastic rounding.
  bool deterministic = true;    ///< Bit-identical gradients for the same input; the forward always is.
  bool statistics = false;      ///< Fill WeightStatistics, which takes time; else they are empty.
  Progress progress;
};

/// Weights counted by floor(log2 |weight|), before quantization, non-zero in FP32 only.
struct Octaves {
  struct Bin {
    std::int64_t count = 0;
    std::int64_t flushed = 0;  ///< Of those, rounded to zero.
  };
  std::map<int, Bin> bins;
};

/// What quantization did to the weights.
struct WeightStatistics {
  double row_sum_mean = 1;  ///< Mean over rows of (sum of the weights that multiply V) / normalizer.
  double row_sum_min = 1;
  double flushed_p = 0;   ///< Share of non-zero P (in FP32) that was rounded to zero.
  double flushed_ds = 0;  ///< The same of dS, over both of its products.
  Octaves p;              ///< Normalized weights of visible pairs (forward).
  Octaves ds;             ///< dS of visible pairs (backward), over both of its products.
};

struct Timing {
  double quantize_ms = 0;
  double compute_ms = 0;
  /// Of an engine on a device: both by its own clock, without the copies from and to host memory.
  std::optional<double> device_ms = std::nullopt;
};

struct ForwardResult {
  Tensor o;    ///< [tokens_q, heads, value_dim], the inputs' type; 0 for a row that sees no key.
  Tensor lse;  ///< [tokens_q, heads] FP32, natural log; -inf for a row that sees no key.
  WeightStatistics statistics;
  Timing timing;
};

struct BackwardResult {
  Tensor dq;  ///< As q.
  Tensor dk;  ///< As k: summed over the query heads of the group; 0 for a key that no query sees.
  Tensor dv;  ///< As v.
  WeightStatistics statistics;
  Timing timing;
};

/// Refuses, by the argument's name: shapes and types that do not match, head counts that do not divide, head_dim and
/// value_dim other than multiples of 8 from 8 to 256, a packing that does not cover the rows, an invalid recipe.
Result<ForwardResult> attention_forward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                        const Options& options);
/// The forward's weights are rebuilt from the same codes.
Result<BackwardResult> attention_backward(const Problem& problem, const Recipe& recipe, const Inputs& inputs,
                                          const Options& options);

/// Float64 attention on the inputs as they are: the truth that accuracy is measured against. Outputs are FP32.
Result<ForwardResult> exact_forward(const Problem& problem, const Inputs& inputs, const Options& options);
Result<BackwardResult> exact_backward(const Problem& problem, const Inputs& inputs, const Options& options);

}  // namespace mxflash
