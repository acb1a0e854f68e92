// Puts an attention to the proof: does anything before a changed token move, in its document or in another?
//
// A probe changes token t of one document (q, k, v and dO, or one of them) and everything later in it, at a fixed
// shape; results at earlier positions are compared bit for bit. What moved, by how much and how far back is the leak.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "mxflash/attention.hpp"

namespace mxflash {

/// Any attention: o, lse and, where inputs.dout is set and it can, dq, dk, dv.
struct AttentionOutputs {
  Tensor o;
  Tensor lse;
  std::optional<BackwardResult> gradients;
};
using AttentionFunction = std::function<Result<AttentionOutputs>(const Problem&, const Inputs&)>;

struct AuditOptions {
  /// Perturbed positions in all, rounded up to whole rounds: a round is one run of the attention with one position in
  /// every document and key/value head. Kinds and t modulo 256 change from round to round.
  int probes = 64;
  std::uint64_t seed = 0;  ///< Of positions and values.
  Progress progress;
};

/// How a probe changes the later tokens.
enum class Perturbation : std::uint8_t {
  resample,  ///< Other values of the same size.
  raise,     ///< 64 times larger, token t alone: raises block maxima by a few octaves.
  lower,     ///< Zero: lowers block maxima.
  denormal,  ///< The type's smallest normal number.
  outlier,   ///< 2^20 times the largest value, or the type's largest, token t alone.
};
std::string to_string(Perturbation perturbation);

struct Leak {
  std::int64_t document = 0;
  std::int64_t head = 0;
  std::int64_t position = 0;   ///< Document-relative query that moved.
  std::int64_t perturbed = 0;  ///< Document-relative first query whose later keys changed.
  std::string tensor;          ///< Input that was changed: "q", "k", "v", "do" or "all".
  std::string output;          ///< "o", "lse" or "dq".
  Perturbation perturbation = Perturbation::resample;
  double change = 0;  ///< |after - before| / largest |before| of the row.
};

struct LeakSummary {
  std::int64_t probes = 0;  ///< Those that had a result to compare: a document of one token has none earlier.
  std::int64_t leaks = 0;   ///< Probes in which an earlier result moved.
  double max_relative_change = 0;
  std::int64_t reach_tokens = 0;  ///< Largest perturbed - position.
  Leak worst;
  std::vector<Leak> examples;  ///< One a leaking probe and position bucket, for the heat map.
};

struct AuditReport {
  std::string name;
  Claims claims;
  bool has_backward = false;
  LeakSummary forward;
  LeakSummary backward;
  LeakSummary documents;      ///< Changes that crossed into another document, or came from a place in the pack.
  bool deterministic = true;  ///< The same input gave the same bits twice.
  double row_sum_error = 0;   ///< Largest |O / V - 1| for a constant V (1.5: exact in every format).
  bool holds = false;         ///< Claims kept; a negative holds when it was caught.
  std::string verdict;        ///< One sentence.
};

/// Audits any attention against the claims.
Result<AuditReport> audit(const AttentionFunction& function, const Claims& claims, const Problem& problem,
                          const Inputs& inputs, const AuditOptions& options);
/// Audits a recipe on an engine, backward included where the recipe has one and inputs.dout is set.
Result<AuditReport> audit_recipe(const Recipe& recipe, const Problem& problem, const Inputs& inputs,
                                 const AuditOptions& audit_options, const Options& options);

}  // namespace mxflash
