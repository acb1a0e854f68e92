// Quantization of the weights P and dS, which are never seen outside an engine.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "mxflash/attention.hpp"
#include "mxflash/recipe.hpp"
#include "reference/strip.hpp"

namespace mxflash {

/// Counts by octave while many strips add to it; see Octaves.
class OctaveCounter {
 public:
  void count(float weight, bool flushed);
  void merge(const OctaveCounter& other);
  [[nodiscard]] Octaves octaves() const;
  /// Share of the counted weights that were rounded to zero.
  [[nodiscard]] double flushed_share() const;

 private:
  static constexpr int kLowest = -149;
  struct Bin {
    std::int64_t count = 0;
    std::int64_t flushed = 0;
  };
  std::array<Bin, 277> bins_{};
};

/// The place of the random bits of a stochastically rounded weight.
struct WeightRandom {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
  std::int64_t head = 0;
};

/// P of a strip. Weights are in units of 2^reference: exp(s) = 2^(t - fold) = weight 2^(reference - fold).
struct Probabilities {
  std::vector<double> weights;     ///< Quantized; what multiplies the values of v.
  std::vector<double> normalized;  ///< 2^-fold weight / sum: each row adds up to 1 (RowSum::quantized).
  std::vector<double> reference;   ///< By query: the integer row reference m.
  std::vector<double> sum;         ///< By query: the normalizer l in units of 2^m.
  std::vector<double> effective;   ///< By query: sum of 2^-fold weight / l.
};

/// `logits` are base 2 and without folds; v is the operand of whole tiles, v_cut of cut ones (the same where the recipe
/// makes no difference).
Probabilities quantize_probabilities(const Strip& strip, const Recipe& recipe, const std::vector<double>& logits,
                                     const Rows& v, const Rows& v_cut, OctaveCounter& counter);

/// How far below the largest exponent of V that the row sees a key's own lies before it counts as light.
inline constexpr int kLightFold = 3;

/// Whether dQ and dK take the same codes of dS.
bool shares_codes(const Recipe& recipe);

/// P / l for dV: dO's exponents folded in, relative to `base`; what comes out multiplies the values of dO.
std::vector<double> quantize_for_dv(const Strip& strip, const TokenProduct& product,
                                    const std::vector<double>& normalized, const Rows& dout, int base);

/// dS for both of its products; what comes out multiplies the values of k (k_cut on cut tiles) and of q.
struct ScoreGradients {
  std::vector<double> for_dq;
  std::vector<double> for_dk;
};
ScoreGradients quantize_score_gradients(const Strip& strip, const Recipe& recipe, const std::vector<double>& ds,
                                        const Rows& k, const Rows& k_cut, const Rows& q, const WeightRandom& random,
                                        OctaveCounter& counter);

}  // namespace mxflash
