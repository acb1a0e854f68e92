// Changed copies of attention inputs: what a probe feeds in.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "mxflash/audit.hpp"

namespace mxflash {

/// Owning copies of q, k, v and, if given, dO and dLSE. Precondition of inputs(): none of the tensors is resized after.
struct InputTensors {
  Tensor q;
  Tensor k;
  Tensor v;
  std::optional<Tensor> dout;
  std::optional<Tensor> dlse = std::nullopt;

  static InputTensors copy(const Inputs& inputs);
  [[nodiscard]] Inputs inputs() const;
};

/// Which tensors a probe changes; dLSE with dO.
enum class Target : std::uint8_t { all, q, k, v, dout };
std::string_view to_string(Target target);

/// Token t of one document for one key/value head, and the query heads that read it.
struct Cell {
  std::int64_t document = 0;
  std::int64_t kv_head = 0;
  std::int64_t query = 0;  ///< First changed query, document-relative; keys change from query + k_length - q_length on.
};

/// Random numbers of one audit: uniform in [0, 1) and normal, by (seed, counter).
class ProbeRandom {
 public:
  explicit ProbeRandom(std::uint64_t seed) : seed_(seed) {}
  double uniform();
  double normal();

 private:
  std::uint64_t seed_;
  std::uint64_t counter_ = 0;
};

/// Changes the cell's tokens in place.
void perturb(InputTensors& tensors, const Problem& problem, const Cell& cell, Target target, Perturbation kind,
             ProbeRandom& random);
/// Changes every token of a document, all heads.
void perturb_document(InputTensors& tensors, const Problem& problem, std::int64_t document, Perturbation kind,
                      ProbeRandom& random);

}  // namespace mxflash
