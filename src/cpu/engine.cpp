#include "cpu/engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <list>
#include <utility>
#include <vector>

#include "mxflash/schedule.hpp"
#include "recipe/roles.hpp"
#include "threading/parallel.hpp"

namespace mxflash::cpu {
namespace {

/// Queries of a forward item: as many as leave some items for each thread, since an item quantizes its keys anew. The
/// results do not depend on it.
std::int64_t item_queries(const Packing& packing, std::int64_t kv_heads, int threads) {
  constexpr std::int64_t kLeast = 512;
  constexpr std::int64_t kMost = 1 << 20;
  constexpr std::int64_t kItemsPerThread = 8;
  const auto items = [&](std::int64_t queries) {
    std::int64_t count = 0;
    for (const Document& document : packing.documents()) count += (document.q_length + queries - 1) / queries;
    return count * kv_heads;
  };
  std::int64_t queries = kMost;
  while (queries > kLeast && items(queries) < kItemsPerThread * thread_count(threads)) queries /= 2;
  return queries;
}

class Clock {
 public:
  [[nodiscard]] double milliseconds() const {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// Runs `body(item, worker)` for every item, and sums up what the workers counted.
template <class Body>
Counts for_items(std::int64_t items, const Options& options, const Body& body) {
  struct Worker {
    Workspace workspace;
    Counts counts;
  };
  std::function<void(std::int64_t)> progress;
  if (options.progress) {
    progress = [&](std::int64_t done) { options.progress(static_cast<double>(done) / static_cast<double>(items)); };
  }
  std::vector<Worker> workers(static_cast<std::size_t>(worker_count(items, options.threads)));
  parallel_for_workers(
      items, options.threads,
      [&](std::int64_t item, int index) {
        Worker& worker = workers[static_cast<std::size_t>(index)];
        body(item, worker.workspace, worker.counts);
      },
      progress);
  Counts total;
  for (const Worker& worker : workers) {
    total.weights.merge(worker.counts.weights);
    total.row_sum += worker.counts.row_sum;
    total.least_row_sum = std::min(total.least_row_sum, worker.counts.least_row_sum);
  }
  return total;
}

/// Queries of a backward item. A longer document is several, which add up in order: fixed, because the order of the
/// sums must not follow the threads.
constexpr std::int64_t kBackwardQueries = 4096;

/// Items of the backward, the longest documents first, those of one document and head one after the other.
class BackwardItems {
 public:
  BackwardItems(const Problem& problem, std::int64_t kv_heads) {
    std::vector<std::pair<std::int64_t, const Document*>> by_pairs;
    for (const Document& document : problem.packing.documents()) {
      by_pairs.emplace_back(-visible_pairs(document, problem.mask), &document);
    }
    std::ranges::sort(by_pairs);
    for (const auto& [pairs, document] : by_pairs) {
      for (std::int64_t head = 0; head < kv_heads; ++head) add(*document, head);
    }
  }

  [[nodiscard]] std::int64_t count() const { return static_cast<std::int64_t>(items_.size()); }
  [[nodiscard]] const Item& at(std::int64_t index) const { return items_[static_cast<std::size_t>(index)]; }

 private:
  void add(const Document& document, std::int64_t head) {
    if (document.q_length <= kBackwardQueries) {
      items_.push_back({&document, head, 0, document.q_length, nullptr, 0});
      return;
    }
    const auto parts = static_cast<int>((document.q_length + kBackwardQueries - 1) / kBackwardQueries);
    sums_.emplace_back(parts);
    for (int part = 0; part < parts; ++part) {
      const std::int64_t begin = part * kBackwardQueries;
      items_.push_back(
          {&document, head, begin, std::min(begin + kBackwardQueries, document.q_length), &sums_.back(), part});
    }
  }

  std::vector<Item> items_;
  std::list<KeySums> sums_;
};

}  // namespace

Status supports(const InstructionSet& set, const Recipe& recipe) {
  if (Status status = validate(recipe); !status.ok()) return status;
  const bool tensor_o = recipe.o.cut && recipe.o.tokens.quantized() && recipe.o.tokens.block == Block::tensor();
  const bool tensor_dq = recipe.dq.cut && recipe.dq.tokens.quantized() && recipe.dq.tokens.block == Block::tensor();
  if (tensor_o || tensor_dq) {
    return unsupported(
        fmt::format("{}.tokens.block: tensor beside a cut given, a block scale allowed (the reference has it)",
                    tensor_o ? "o" : "dq"));
  }
  if (set.exact_f32) return {};
  const bool backward = has_backward(recipe);
  for (const Place& place : places_of(recipe)) {
    if (place.operand->encoding == Encoding::f32 && (backward || !place.backward)) {
      return unsupported(fmt::format("{}.encoding: f32 given, bf16 or a quantized encoding allowed", place.path));
    }
  }
  return {};
}

Result<ForwardResult> forward(const InstructionSet& set, const Problem& problem, const Recipe& recipe,
                              const Inputs& inputs, const Options& options) {
  const Clock clock;
  const Plan plan = make_plan(problem, recipe, inputs, options);
  const std::int64_t queries = item_queries(problem.packing, plan.kv_heads, options.threads);
  const Result<Schedule> schedule = make_schedule(problem.packing, problem.mask, {queries, queries});
  if (!schedule.ok()) return schedule.error();

  ForwardResult result;
  result.o = Tensor::uninitialized(inputs.q.dtype, {inputs.q.tokens(), plan.heads, plan.value_dim});
  result.lse = Tensor::uninitialized(DType::f32, {inputs.q.tokens(), plan.heads});
  const Forward out{{result.o.data.data(), result.o.dtype}, reinterpret_cast<float*>(result.lse.data.data())};
  result.timing.quantize_ms = clock.milliseconds();

  const std::vector<Document>& documents = problem.packing.documents();
  const auto items = static_cast<std::int64_t>(schedule->items.size()) * plan.kv_heads;
  const Counts counts = for_items(items, options, [&](std::int64_t index, Workspace& workspace, Counts& counter) {
    const WorkItem& work = schedule->items[static_cast<std::size_t>(index / plan.kv_heads)];
    const Item item{&documents[static_cast<std::size_t>(work.document)],
                    index % plan.kv_heads,
                    work.query_begin,
                    work.query_end,
                    nullptr,
                    0};
    set.kernels.forward(plan, item, out, workspace, counter);
  });
  if (options.statistics) {
    const std::int64_t rows = result.lse.elements();
    result.statistics.p = counts.weights.octaves();
    result.statistics.flushed_p = counts.weights.flushed_share();
    result.statistics.row_sum_mean = rows == 0 ? 1.0 : counts.row_sum / static_cast<double>(rows);
    result.statistics.row_sum_min = counts.least_row_sum;
  }
  result.timing.compute_ms = clock.milliseconds() - result.timing.quantize_ms;
  return result;
}

Result<BackwardResult> backward(const InstructionSet& set, const Problem& problem, const Recipe& recipe,
                                const Inputs& inputs, const Options& options) {
  const Clock clock;
  const Plan plan = make_plan(problem, recipe, inputs, options);
  BackwardResult result;
  result.dq = Tensor::uninitialized(inputs.q.dtype, {inputs.q.tokens(), plan.heads, plan.head_dim});
  result.dk = Tensor::uninitialized(inputs.k.dtype, {inputs.k.tokens(), plan.kv_heads, plan.head_dim});
  result.dv = Tensor::uninitialized(inputs.v.dtype, {inputs.v.tokens(), plan.kv_heads, plan.value_dim});
  const Backward out{{result.dq.data.data(), result.dq.dtype},
                     {result.dk.data.data(), result.dk.dtype},
                     {result.dv.data.data(), result.dv.dtype}};
  result.timing.quantize_ms = clock.milliseconds();

  const BackwardItems items(problem, plan.kv_heads);
  const Counts counts = for_items(items.count(), options, [&](std::int64_t index, Workspace& workspace, Counts& count) {
    set.kernels.backward(plan, items.at(index), out, workspace, count);
  });
  if (options.statistics) {
    result.statistics.ds = counts.weights.octaves();
    result.statistics.flushed_ds = counts.weights.flushed_share();
  }
  result.timing.compute_ms = clock.milliseconds() - result.timing.quantize_ms;
  return result;
}

}  // namespace mxflash::cpu
