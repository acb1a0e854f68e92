#include "mxflash/audit.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <ranges>

#include "audit/perturb.hpp"
#include "mxflash/engine.hpp"

namespace mxflash {
namespace {

/// A normalizer that is off by more than this is a defect, not rounding: O in BF16 is good to 2^-8.
constexpr double kRowSumTolerance = 0x1p-7;
/// Residues of the perturbed position that a run of probes walks through.
constexpr std::int64_t kResidues = 256;

/// One output tensor before and after, [rows, heads, width] or [rows, heads].
struct Pair {
  const Tensor& before;
  const Tensor& after;
  std::string_view name;
};

/// Largest |after - before| over a row's largest |before|; 0 for the same bits.
double row_change(const Pair& pair, std::int64_t row) {
  const std::int64_t width = pair.before.shape.size() == 3 ? pair.before.shape[2] : 1;
  const std::size_t bytes = static_cast<std::size_t>(width) * size_of(pair.before.dtype);
  const auto offset = static_cast<std::size_t>(row) * bytes;
  if (std::memcmp(pair.before.data.data() + offset, pair.after.data.data() + offset, bytes) == 0) return 0;
  double largest = 0;
  double change = 0;
  for (std::int64_t d = 0; d < width; ++d) {
    const double before = pair.before.at(row * width + d);
    const double after = pair.after.at(row * width + d);
    largest = std::fmax(largest, std::fabs(before));
    change = std::fmax(change, std::isfinite(after) ? std::fabs(after - before) : HUGE_VAL);
  }
  if (largest > 0) change /= largest;
  return std::max(change, 0x1p-149);  // bits differ, if only in a zero's sign or a NaN's payload
}

void record(LeakSummary& summary, const Leak& leak) {
  if (leak.change > summary.max_relative_change) {
    summary.max_relative_change = leak.change;
    summary.worst = leak;
  }
  summary.reach_tokens = std::max(summary.reach_tokens, leak.perturbed - leak.position);
}

class Auditor {
 public:
  Auditor(const AttentionFunction& function, const Problem& problem, const Inputs& inputs, const AuditOptions& options)
      : function_(function),
        problem_(problem),
        options_(options),
        original_(InputTensors::copy(inputs)),
        random_(options.seed),
        heads_(inputs.q.heads()),
        kv_heads_(inputs.k.heads()) {}

  Status run(AuditReport& report) {
    const auto documents = static_cast<std::int64_t>(problem_.packing.documents().size());
    const std::int64_t cells = std::max<std::int64_t>(documents * kv_heads_, 1);
    const std::int64_t rounds = (options_.probes + cells - 1) / cells;
    const auto halves =
        static_cast<std::int64_t>(std::bit_width(static_cast<std::uint64_t>(std::max<std::int64_t>(documents, 1) - 1)));
    const std::int64_t steps = rounds + 4 + 4 * halves;
    std::int64_t step = 0;
    const auto advance = [&] {
      if (options_.progress) options_.progress(static_cast<double>(++step) / static_cast<double>(steps));
    };
    Result<AttentionOutputs> first = function_(problem_, original_.inputs());
    if (!first.ok()) return first.error();
    before_ = std::move(first).value();
    report.has_backward = before_.gradients.has_value();
    advance();
    if (Status status = check_determinism(report); !status.ok()) return status;
    advance();
    if (Status status = check_row_sum(report); !status.ok()) return status;
    advance();
    for (std::int64_t round = 0; round < rounds; ++round) {
      if (Status status = leak_round(round, report); !status.ok()) return status;
      advance();
    }
    for (const Perturbation kind : {Perturbation::resample, Perturbation::outlier}) {
      for (std::int64_t bit = 1; bit < documents; bit *= 2) {
        for (const std::int64_t changed : {std::int64_t{0}, bit}) {
          if (Status status = document_round({bit, changed}, kind, report); !status.ok()) return status;
          advance();
        }
      }
    }
    if (documents > 1) return place_round(report);
    return {};
  }

 private:
  Status check_determinism(AuditReport& report) {
    const Result<AttentionOutputs> again = function_(problem_, original_.inputs());
    if (!again.ok()) return again.error();
    report.deterministic = again->o.data == before_.o.data && again->lse.data == before_.lse.data;
    if (before_.gradients && again->gradients) {
      report.deterministic = report.deterministic && again->gradients->dq.data == before_.gradients->dq.data &&
                             again->gradients->dk.data == before_.gradients->dk.data &&
                             again->gradients->dv.data == before_.gradients->dv.data;
    }
    return {};
  }

  /// With a constant V every row of O is that constant, whatever the weights, if they add up to the normalizer.
  Status check_row_sum(AuditReport& report) {
    constexpr float constant = 1.5F;
    InputTensors tensors = original_;
    for (std::int64_t i = 0; i < tensors.v.elements(); ++i) tensors.v.set(i, constant);
    tensors.dout.reset();
    const Result<AttentionOutputs> out = function_(problem_, tensors.inputs());
    if (!out.ok()) return out.error();
    for (std::int64_t i = 0; i < out->o.elements(); ++i) {
      const double o = out->o.at(i);
      const bool no_keys = o == 0.0 && std::isinf(out->lse.at(i / out->o.shape[2]));
      if (!no_keys && std::isfinite(o))
        report.row_sum_error = std::max(report.row_sum_error, std::fabs(o / constant - 1));
    }
    return {};
  }

  /// Every document and key/value head has its own position in one run: they cannot meet (document_round proves it).
  Status leak_round(std::int64_t round, AuditReport& report) {
    constexpr std::array kinds{Perturbation::outlier, Perturbation::resample, Perturbation::raise, Perturbation::lower,
                               Perturbation::denormal};
    constexpr std::array targets{Target::all, Target::v, Target::k, Target::q, Target::dout};
    const Perturbation kind = kinds[static_cast<std::size_t>(round) % kinds.size()];
    // Shifts by one each time through the kinds, so that every pair comes up.
    Target target = targets[static_cast<std::size_t>(round + round / 5) % targets.size()];
    if (target == Target::dout && !before_.gradients) target = Target::all;
    InputTensors tensors = original_;
    std::vector<Cell> cells;
    const auto documents = static_cast<std::int64_t>(problem_.packing.documents().size());
    for (std::int64_t document = 0; document < documents; ++document) {
      const std::int64_t length = problem_.packing.documents()[static_cast<std::size_t>(document)].q_length;
      if (length < 2) continue;
      for (std::int64_t kv_head = 0; kv_head < kv_heads_; ++kv_head) {
        cells.push_back({document, kv_head, next_position(length)});
        perturb(tensors, problem_, cells.back(), target, kind, random_);
      }
    }
    const Result<AttentionOutputs> after = function_(problem_, tensors.inputs());
    if (!after.ok()) return after.error();
    for (const Cell& cell : cells) compare_cell(cell, target, kind, *after, report);
    return {};
  }

  /// Walks all residues modulo 256 (97 is odd), at a random multiple.
  std::int64_t next_position(std::int64_t length) {
    const std::int64_t residue = (97 * ++position_) % kResidues;
    const std::int64_t periods = std::max<std::int64_t>((length - 1 - residue) / kResidues + 1, 1);
    const auto period = static_cast<std::int64_t>(random_.uniform() * static_cast<double>(periods));
    std::int64_t position = residue + kResidues * period;
    if (position == 0) position = kResidues;  // nothing comes before position 0
    return position < length ? position : 1 + position % (length - 1);
  }

  void compare_cell(const Cell& cell, Target target, Perturbation kind, const AttentionOutputs& after,
                    AuditReport& report) {
    if (target != Target::dout) {
      compare_outputs(cell, target, kind, {{before_.o, after.o, "o"}, {before_.lse, after.lse, "lse"}}, report.forward);
    }
    if (before_.gradients && after.gradients) {
      compare_outputs(cell, target, kind, {{before_.gradients->dq, after.gradients->dq, "dq"}}, report.backward);
    }
  }

  void compare_outputs(const Cell& cell, Target target, Perturbation kind, const std::vector<Pair>& pairs,
                       LeakSummary& summary) {
    const Document& document = problem_.packing.documents()[static_cast<std::size_t>(cell.document)];
    const std::int64_t first_key = cell.query + document.k_length - document.q_length;
    const std::int64_t group = heads_ / kv_heads_;
    bool compared = false;
    bool leaked = false;
    for (std::int64_t query = cell.query - 1; query >= 0; --query) {
      if (visible_keys(document, problem_.mask, query).end > std::max<std::int64_t>(first_key, 0)) continue;
      compared = true;
      for (std::int64_t head = cell.kv_head * group; head < (cell.kv_head + 1) * group; ++head) {
        for (const Pair& pair : pairs) {
          const double change = row_change(pair, (document.q_begin + query) * heads_ + head);
          if (change == 0) continue;
          leaked = true;
          const Leak leak{cell.document,          head, query, cell.query, std::string(to_string(target)),
                          std::string(pair.name), kind, change};
          record(summary, leak);
          keep_example(summary, leak);
        }
      }
    }
    summary.probes += compared ? 1 : 0;
    summary.leaks += leaked ? 1 : 0;
  }

  /// One a probe and block of positions: the largest.
  static void keep_example(LeakSummary& summary, const Leak& leak) {
    constexpr std::size_t limit = 4096;
    for (Leak& kept : std::ranges::reverse_view(summary.examples)) {
      if (kept.document != leak.document || kept.perturbed != leak.perturbed) break;
      if (kept.position / kBlock != leak.position / kBlock) continue;
      if (leak.change > kept.change) kept = leak;
      return;
    }
    if (summary.examples.size() < limit) summary.examples.push_back(leak);
  }

  /// Documents whose index has (index & bit) == value. Each two documents differ in a bit: one is changed and the other
  /// compared in some round.
  struct Half {
    std::int64_t bit = 1;
    std::int64_t value = 0;
    [[nodiscard]] bool has(std::int64_t document) const { return (document & bit) == value; }
  };

  /// Changes half of the documents; nothing may move in the rest, gradients of k and v included.
  Status document_round(const Half& half, Perturbation kind, AuditReport& report) {
    InputTensors tensors = original_;
    const auto documents = static_cast<std::int64_t>(problem_.packing.documents().size());
    for (std::int64_t document = 0; document < documents; ++document) {
      if (half.has(document)) perturb_document(tensors, problem_, document, kind, random_);
    }
    const Result<AttentionOutputs> after = function_(problem_, tensors.inputs());
    if (!after.ok()) return after.error();
    for (std::int64_t document = 0; document < documents; ++document) {
      if (!half.has(document)) compare_document(document, document, problem_, kind, *after, report.documents);
    }
    return {};
  }

  /// The same documents in another order: a result may not depend on a document's place in the pack.
  Status place_round(AuditReport& report) {
    const std::vector<Document>& documents = problem_.packing.documents();
    std::vector<std::int64_t> order(documents.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::rotate(order, order.begin() + 1);
    std::vector<std::int32_t> cu_q{0};
    std::vector<std::int32_t> cu_k{0};
    InputTensors tensors = original_;
    for (const std::int64_t index : order) {
      const Document& document = documents[static_cast<std::size_t>(index)];
      copy_rows(original_.q, document.q_begin, document.q_length, cu_q.back(), tensors.q);
      copy_rows(original_.k, document.k_begin, document.k_length, cu_k.back(), tensors.k);
      copy_rows(original_.v, document.k_begin, document.k_length, cu_k.back(), tensors.v);
      if (tensors.dout) copy_rows(*original_.dout, document.q_begin, document.q_length, cu_q.back(), *tensors.dout);
      if (tensors.dlse) copy_rows(*original_.dlse, document.q_begin, document.q_length, cu_q.back(), *tensors.dlse);
      cu_q.push_back(cu_q.back() + static_cast<std::int32_t>(document.q_length));
      cu_k.push_back(cu_k.back() + static_cast<std::int32_t>(document.k_length));
    }
    Result<Packing> packing = Packing::make(cu_q, cu_k, problem_.packing.tokens_q(), problem_.packing.tokens_k());
    if (!packing.ok()) return packing.error();
    const Problem moved{std::move(packing).value(), problem_.mask, problem_.scale};
    const Result<AttentionOutputs> after = function_(moved, tensors.inputs());
    if (!after.ok()) return after.error();
    for (std::size_t place = 0; place < order.size(); ++place) {
      compare_document(order[place], static_cast<std::int64_t>(place), moved, Perturbation::resample, *after,
                       report.documents);
    }
    return {};
  }

  static void copy_rows(const Tensor& from, std::int64_t begin, std::int64_t count, std::int64_t to, Tensor& out) {
    const std::size_t row = static_cast<std::size_t>(from.shape[1] * from.shape[2]) * size_of(from.dtype);
    std::copy_n(from.data.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(begin) * row),
                static_cast<std::size_t>(count) * row,
                out.data.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(to) * row));
  }

  /// A document's outputs before, and after at the place `moved_document` of another packing of the same documents.
  void compare_document(std::int64_t document, std::int64_t moved_document, const Problem& moved, Perturbation kind,
                        const AttentionOutputs& after, LeakSummary& summary) {
    const Document& from = problem_.packing.documents()[static_cast<std::size_t>(document)];
    const Document& to = moved.packing.documents()[static_cast<std::size_t>(moved_document)];
    bool leaked = false;
    const auto compare = [&](const Tensor& before, const Tensor& now, bool query_side, std::string_view name) {
      const std::int64_t length = query_side ? from.q_length : from.k_length;
      const std::int64_t begin = query_side ? from.q_begin : from.k_begin;
      const std::int64_t moved_begin = query_side ? to.q_begin : to.k_begin;
      Tensor placed = before;
      const std::size_t row = before.data.size() / static_cast<std::size_t>(std::max<std::int64_t>(before.shape[0], 1));
      std::copy_n(now.data.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(moved_begin) * row),
                  static_cast<std::size_t>(length) * row,
                  placed.data.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(begin) * row));
      const Pair pair{before, placed, name};
      for (std::int64_t token = 0; token < length; ++token) {
        for (std::int64_t head = 0; head < before.shape[1]; ++head) {
          const double change = row_change(pair, (begin + token) * before.shape[1] + head);
          if (change == 0) continue;
          leaked = true;
          record(summary, {document, head, token, token, "all", std::string(name), kind, change});
        }
      }
    };
    compare(before_.o, after.o, true, "o");
    compare(before_.lse, after.lse, true, "lse");
    if (before_.gradients && after.gradients) {
      compare(before_.gradients->dq, after.gradients->dq, true, "dq");
      compare(before_.gradients->dk, after.gradients->dk, false, "dk");
      compare(before_.gradients->dv, after.gradients->dv, false, "dv");
    }
    summary.probes += 1;
    summary.leaks += leaked ? 1 : 0;
  }

  const AttentionFunction& function_;
  const Problem& problem_;
  const AuditOptions& options_;
  InputTensors original_;
  ProbeRandom random_;
  std::int64_t heads_;
  std::int64_t kv_heads_;
  std::int64_t position_ = 0;
  AttentionOutputs before_;
};

/// How far a leak inside one block can reach: queries and keys share the block where their offset is whole blocks.
std::int64_t block_reach(const Problem& problem) {
  const auto& documents = problem.packing.documents();
  const bool aligned = std::ranges::all_of(
      documents, [](const Document& document) { return (document.k_length - document.q_length) % kBlock == 0; });
  return aligned ? kBlock - 1 : 2 * kBlock - 1;
}

/// The claim that the summary breaks, or nothing.
std::string broken(const LeakSummary& summary, Causality claim, const Problem& problem, std::string_view direction) {
  if (summary.leaks == 0 || claim == Causality::leaks) return "";
  if (claim == Causality::block && summary.reach_tokens <= block_reach(problem)) return "";
  return fmt::format("{} claims {}, but {} of {} probes moved earlier results by up to {:.2g}, {} tokens back",
                     direction, to_string(claim), summary.leaks, summary.probes, summary.max_relative_change,
                     summary.reach_tokens);
}

/// What was seen of a recipe that holds.
std::string kept(const AuditReport& report) {
  const auto words = [](const LeakSummary& summary) {
    if (summary.leaks == 0) return std::string("nothing moved");
    return fmt::format("up to {} tokens back, inside a block", summary.reach_tokens);
  };
  std::string text = "forward: " + words(report.forward);
  if (report.has_backward) text += "; backward: " + words(report.backward);
  return text;
}

void judge(AuditReport& report, const Problem& problem) {
  const bool sums = report.row_sum_error <= kRowSumTolerance;
  if (report.claims.forward == Causality::leaks) {
    const std::int64_t leaks = report.forward.leaks + report.backward.leaks + report.documents.leaks;
    report.holds = leaks > 0 || !sums;
    report.verdict = !report.holds ? "said to leak, but nothing was found: more probes are needed"
                     : sums        ? "caught leaking, as it must"
                                   : "caught: rows do not add up to their normalizer";
    return;
  }
  std::string failures = broken(report.forward, report.claims.forward, problem, "forward");
  const auto add = [&failures](const std::string& failure) {
    if (!failure.empty()) failures += (failures.empty() ? "" : "; ") + failure;
  };
  if (report.has_backward) add(broken(report.backward, report.claims.backward, problem, "backward"));
  if (report.documents.leaks > 0)
    add(fmt::format("{} documents moved with others or with their place", report.documents.leaks));
  if (!report.deterministic) add("the same input gave other bits");
  if (!sums) add(fmt::format("rows are off their normalizer by up to {:.2g}", report.row_sum_error));
  report.holds = failures.empty();
  report.verdict = report.holds ? kept(report) : failures;
}

}  // namespace

Result<AuditReport> audit(const AttentionFunction& function, const Claims& claims, const Problem& problem,
                          const Inputs& inputs, const AuditOptions& options) {
  if (options.probes < 1) return invalid(fmt::format("probes: {} given, 1 or more allowed", options.probes));
  AuditReport report;
  report.claims = claims;
  if (Status status = Auditor(function, problem, inputs, options).run(report); !status.ok()) return status.error();
  judge(report, problem);
  return report;
}

Result<AuditReport> audit_recipe(const Recipe& recipe, const Problem& problem, const Inputs& inputs,
                                 const AuditOptions& audit_options, const Options& options) {
  const bool differentiable = validate_backward(recipe).ok();
  const AttentionFunction function = [&](const Problem& of, const Inputs& with) -> Result<AttentionOutputs> {
    Result<ForwardResult> forward = attention_forward(of, recipe, with, options);
    if (!forward.ok()) return forward.error();
    AttentionOutputs outputs{std::move(forward->o), std::move(forward->lse), std::nullopt};
    if (differentiable && with.dout) {
      Result<BackwardResult> backward = attention_backward(of, recipe, with, options);
      if (!backward.ok()) return backward.error();
      outputs.gradients = std::move(backward).value();
    }
    return outputs;
  };
  Result<AuditReport> report = audit(function, recipe.claims, problem, inputs, audit_options);
  if (report.ok()) report->name = recipe.name;
  return report;
}

}  // namespace mxflash
