// The CUDA engine's stages one by one: schedule, quantization, forward and, of a recipe that has one, the backward's,
// by events around the launches of src/cuda/kernels.hpp and backward.hpp. Checks an answer through the public calls
// first.
//   cuda_stages --workload 4x16384,8192+32x256,131072x1 --heads 16 --kv-heads 16 --repeats 20
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>

#include "arguments.hpp"
#include "cuda/backward_plan.hpp"
#include "cuda/memory.hpp"
#include "cuda/runtime.hpp"
#include "random_tensor.hpp"
#include "workloads.hpp"

namespace mxflash::tool {
namespace {

struct Settings {
  std::string workload = "16x1024,4x4096,2x16384,4x16384";
  std::string recipe = "mxfp8";
  std::int64_t heads = 16;
  std::int64_t kv_heads = 16;
  std::int64_t head_dim = 128;
  int repeats = 20;
};
constexpr int kWarmup = 3;

/// BF16, causal, queries and keys of the same tokens.
struct Data {
  std::vector<std::int32_t> offsets = {0};
  Tensor q, k, v, dout;
};

Data make_data(const Settings& settings, const std::vector<std::int64_t>& lengths) {
  Data data;
  for (const std::int64_t length : lengths)
    data.offsets.push_back(data.offsets.back() + static_cast<std::int32_t>(length));
  const std::int64_t tokens = data.offsets.back();
  data.q = normal_tensor(DType::bf16, {tokens, settings.heads, settings.head_dim}, {0, 0, {}});
  data.k = normal_tensor(DType::bf16, {tokens, settings.kv_heads, settings.head_dim}, {0, 1, {}});
  data.v = normal_tensor(DType::bf16, {tokens, settings.kv_heads, settings.head_dim}, {0, 2, {}});
  data.dout = normal_tensor(DType::bf16, {tokens, settings.heads, settings.head_dim}, {0, 3, {}});
  return data;
}

double relative_l2(const Tensor& got, const Tensor& want) {
  double error = 0;
  double size = 0;
  for (std::int64_t i = 0; i < want.elements(); ++i) {
    error += std::pow(got.at(i) - want.at(i), 2);
    size += std::pow(want.at(i), 2);
  }
  return std::sqrt(error / size);
}

Status check_close(std::string_view name, const Tensor& got, const Tensor& want, double allowed) {
  const double relative = relative_l2(got, want);
  if (!(relative <= allowed)) {
    return invalid(fmt::format("{} differs from the CPU engine's by {} (relative L2)", name, relative));
  }
  fmt::print("checked: {} within {:.1e} of the CPU engine's (relative L2)\n", name, relative);
  return {};
}

/// A small packing on the device and on the CPU: another order of the sums and no more (1e-2 in relative L2, of
/// gradients 3e-2, is what the tests of the engine allow).
Status check_answer(const Settings& settings, const Recipe& recipe) {
  const Data data = make_data(settings, {300, 1, 129, 70});
  const Result<Packing> packing = Packing::make(data.offsets, data.offsets, data.offsets.back(), data.offsets.back());
  if (!packing) return packing.error();
  const Problem problem{*packing, Mask::causal(), std::nullopt};
  const Inputs inputs{*data.q.view("q"), *data.k.view("k"), *data.v.view("v"), *data.dout.view("do")};
  const bool backward = cuda::supports_backward(recipe).ok();
  std::vector<Tensor> outputs;
  for (const char* engine : {"cuda", "cpu"}) {
    Options options;
    options.engine = engine;
    Result<ForwardResult> forward = attention_forward(problem, recipe, inputs, options);
    if (!forward) return forward.error();
    outputs.push_back(std::move(forward->o));
    if (!backward) continue;
    Result<BackwardResult> gradients = attention_backward(problem, recipe, inputs, options);
    if (!gradients) return gradients.error();
    for (Tensor* tensor : {&gradients->dq, &gradients->dk, &gradients->dv}) outputs.push_back(std::move(*tensor));
  }
  constexpr std::string_view kNames[] = {"o", "dq", "dk", "dv"};
  const std::size_t half = outputs.size() / 2;
  for (std::size_t i = 0; i < half; ++i) {
    const Status status = check_close(kNames[i], outputs[i], outputs[i + half], i == 0 ? 1e-2 : 3e-2);
    if (!status) return status;
  }
  return {};
}

/// Sorted milliseconds.
struct Samples {
  std::vector<double> ms;
  [[nodiscard]] double median() const { return ms[ms.size() / 2]; }
  [[nodiscard]] std::string text() const {
    return fmt::format("{:.4f} ({:.4f}..{:.4f})", median(), ms.front(), ms.back());
  }
};

using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>,
                              decltype([](cudaEvent_t event) { static_cast<void>(cudaEventDestroy(event)); })>;

/// Milliseconds of each step on the default stream; a step returns CUDA's code.
template <class... Steps>
Result<std::vector<Samples>> time_steps(const Settings& settings, const Steps&... steps) {
  std::vector<Event> events;
  for (std::size_t i = 0; i <= sizeof...(steps); ++i) {
    cudaEvent_t event = nullptr;
    if (Status status = cuda::status_of(cudaEventCreate(&event), "making an event"); !status) return status.error();
    events.emplace_back(event);
  }
  std::vector<Samples> samples(sizeof...(steps));
  for (int i = -kWarmup; i < settings.repeats; ++i) {
    std::size_t at = 0;
    int code = cudaEventRecord(events[at].get());
    ((code = code != 0 ? code : steps(), code = code != 0 ? code : cudaEventRecord(events[++at].get())), ...);
    if (code == 0) code = cudaDeviceSynchronize();
    if (Status status = cuda::status_of(static_cast<cudaError_t>(code), "a launch"); !status) return status.error();
    for (std::size_t step = 0; i >= 0 && step < samples.size(); ++step) {
      float ms = 0;
      static_cast<void>(cudaEventElapsedTime(&ms, events[step].get(), events[step + 1].get()));
      samples[step].ms.push_back(ms);
    }
  }
  for (Samples& sample : samples) std::ranges::sort(sample.ms);
  return samples;
}

/// Device memory that lives as long as this.
class Memory {
 public:
  Result<std::byte*> upload(std::span<const std::byte> bytes, std::string_view name) {
    return own(cuda::upload(bytes, name));
  }
  Result<std::byte*> allocate(std::size_t bytes, std::string_view name) { return own(cuda::allocate(bytes, name)); }
  /// A workspace, for which cudaMalloc's alignment is enough.
  Result<cuda::Execution> workspace(const Result<std::size_t>& bytes) {
    if (!bytes) return bytes.error();
    const Result<std::byte*> memory = allocate(*bytes, "a workspace");
    if (!memory) return memory.error();
    return cuda::Execution{*memory, *bytes, nullptr};
  }

 private:
  Result<std::byte*> own(Result<cuda::DeviceMemory> made) {
    if (!made) return made.error();
    memory_.push_back(*std::move(made));
    return memory_.back().get();
  }

  std::vector<cuda::DeviceMemory> memory_;
};

/// The forward's call with dout, of which a forward reads nothing.
Result<cuda::ForwardCall> upload_call(const Data& data, std::int64_t documents, Memory& memory) {
  TensorView views[] = {*data.q.view("q"), *data.k.view("k"), *data.v.view("v"), *data.dout.view("do")};
  for (TensorView& view : views) {
    const std::size_t bytes = static_cast<std::size_t>(view.tokens() * view.heads() * view.dims()) * 2;
    const Result<std::byte*> uploaded = memory.upload(std::span(view.data, bytes), "an input");
    if (!uploaded) return uploaded.error();
    view.data = *uploaded;
  }
  const Result<std::byte*> cu_seqlens = memory.upload(std::as_bytes(std::span(data.offsets)), "cu_seqlens");
  if (!cu_seqlens) return cu_seqlens.error();
  const Result<std::byte*> o = memory.allocate(data.q.data.size(), "o");
  if (!o) return o.error();
  const Result<std::byte*> lse =
      memory.allocate(static_cast<std::size_t>(views[0].tokens() * views[0].heads()) * sizeof(float), "lse");
  if (!lse) return lse.error();
  const auto* offsets = reinterpret_cast<const std::int32_t*>(*cu_seqlens);
  return cuda::ForwardCall{{offsets, offsets, documents, Mask::causal(), std::nullopt},
                           {views[0], views[1], views[2], views[3]},
                           {*o, reinterpret_cast<float*>(*lse)}};
}

/// Multiplications and additions of one product over all pairs.
double flops_of(const Settings& settings, const Workload& workload) {
  double pairs = 0;
  for (const std::int64_t length : workload.lengths)
    pairs += static_cast<double>(length) * static_cast<double>(length + 1) / 2;
  return 2 * static_cast<double>(settings.heads * settings.head_dim) * pairs;
}

Status measure_backward(const Settings& settings, const Recipe& recipe, const Workload& workload,
                        cuda::ForwardCall call, Memory& memory) {
  call.training = true;
  const Result<cuda::Execution> saved = memory.workspace(cuda::workspace_bytes(call, recipe));
  if (!saved) return saved.error();
  const Result<cuda::Launches> forward = cuda::prepare(call, recipe, *saved);
  if (!forward) return forward.error();
  cuda::BackwardCall back{call, saved->workspace, saved->workspace_bytes, {}};
  for (const auto& [gradient, of] : {std::pair{&back.gradients.dq, &call.inputs.q},
                                     {&back.gradients.dk, &call.inputs.k},
                                     {&back.gradients.dv, &call.inputs.v}}) {
    const Result<std::byte*> made =
        memory.allocate(static_cast<std::size_t>(of->tokens() * of->heads() * of->dims()) * 2, "a gradient");
    if (!made) return made.error();
    *gradient = *made;
  }
  const Result<cuda::Execution> execution = memory.workspace(cuda::backward_workspace_bytes(back, recipe));
  if (!execution) return execution.error();
  const Result<cuda::BackwardLaunches> launches = cuda::prepare_backward(back, recipe, *execution);
  if (!launches) return launches.error();
  if (Status status = cuda::forward(call, recipe, *saved); !status) return status;
  constexpr auto kSquare = cuda::ScoreScale::square;
  constexpr auto kQuery = cuda::ScoreScale::query;
  // Every backward uses up the work list and what `prepare` has found.
  const auto list = [&] { return cuda::launch_key_schedule(launches->schedule, nullptr); };
  const auto prepare = [&] { return cuda::launch_prepare(launches->prepare, nullptr); };
  const auto prescale = [&] { return cuda::launch_prescale(launches->prescale, nullptr); };
  const auto backward = [&](bool deterministic, cuda::ScoreScale ds_scale) {
    cuda::BackwardArguments arguments = launches->backward;
    arguments.deterministic = deterministic;
    arguments.ds_scale = ds_scale;
    return [arguments] { return cuda::launch_backward(arguments, nullptr); };
  };
  const Result<std::vector<Samples>> samples = time_steps(
      settings, [&] { return cuda::launch_schedule(forward->schedule, nullptr); },  // Its counters are used up.
      [&] { return cuda::launch_forward(forward->forward, nullptr); }, list, prepare, prescale,
      backward(false, kSquare), list, prepare, prescale, backward(true, kSquare), list, prepare, prescale,
      backward(false, kQuery), list, prepare, prescale, backward(true, kQuery),
      [&] { return cuda::launch_finish(launches->finish, nullptr); });
  if (!samples) return samples.error();
  if (Status status = cuda::check(*execution); !status) return status;
  const std::vector<Samples>& of = *samples;
  const auto print = [&](std::string_view name, const Samples& sample) {
    fmt::print("  {} {} ms, {:.0f} TFLOP/s\n", name, sample.text(),
               5 * flops_of(settings, workload) / sample.median() / 1e9);
  };
  fmt::print("  forward before a backward {} ms\n", of[1].text());
  fmt::print("  key schedule {} ms\n", of[2].text());
  fmt::print("  prepare  {} ms\n", of[3].text());
  if (launches->prescale.sizes.has_prescale()) fmt::print("  prescale {} ms\n", of[4].text());
  print("backward", of[5]);
  print("backward, dQ in order", of[9]);
  print("backward, dS scaled by query", of[13]);
  print("backward, dS scaled by query, dQ in order", of[17]);
  fmt::print("  finish   {} ms\n", of[18].text());
  return {};
}

Status measure(const Settings& settings, const Recipe& recipe, const Workload& workload) {
  const Data data = make_data(settings, workload.lengths);
  Memory memory;
  const Result<cuda::ForwardCall> call = upload_call(data, static_cast<std::int64_t>(workload.lengths.size()), memory);
  if (!call) return call.error();
  const Result<cuda::Execution> execution = memory.workspace(cuda::workspace_bytes(*call, recipe));
  if (!execution) return execution.error();
  const Result<cuda::Launches> launches = cuda::prepare(*call, recipe, *execution);
  if (!launches) return launches.error();
  if (launches->embedded) {
    return unsupported(
        fmt::format("recipe: {} given, one that FP8 products run allowed, whose stages these are", recipe.name));
  }
  const Result<std::vector<Samples>> samples = time_steps(
      settings, [&] { return cuda::launch_schedule(launches->schedule, nullptr); },
      [&] { return cuda::launch_quantize(launches->quantize, nullptr); },
      [&] { return cuda::launch_forward(launches->forward, nullptr); },
      [&] {
        return cudaMemcpyAsync(call->outputs.o, call->inputs.q.data, data.q.data.size(), cudaMemcpyDeviceToDevice);
      });
  if (!samples) return samples.error();
  if (Status status = cuda::check(*execution); !status) return status;

  const double moved = 1.5 * static_cast<double>(data.q.data.size() + data.k.data.size() + data.v.data.size());
  const double copied = 2 * static_cast<double>(data.q.data.size());
  const std::vector<Samples>& of = *samples;
  fmt::print("{} documents, {} tokens ({})\n", workload.lengths.size(), data.offsets.back(), workload.name);
  fmt::print("  schedule {} ms\n", of[0].text());
  fmt::print("  quantize {} ms, {:.0f} GB/s\n", of[1].text(), moved / of[1].median() / 1e6);
  fmt::print("  forward  {} ms, {:.0f} TFLOP/s\n", of[2].text(),
             2 * flops_of(settings, workload) / of[2].median() / 1e9);
  fmt::print("  copy of q to o {} ms, {:.0f} GB/s\n", of[3].text(), copied / of[3].median() / 1e6);
  if (!cuda::supports_backward(recipe)) return {};
  return measure_backward(settings, recipe, workload, *call, memory);
}

Status run(const Settings& settings) {
  const Result<Recipe> recipe = load_recipe(settings.recipe);
  if (!recipe) return recipe.error();
  const Result<std::vector<Workload>> chosen = find_workloads(settings.workload, 1024);
  if (!chosen) return chosen.error();
  if (Status status = cuda::available(); !status) return status;
  if (Status status = check_answer(settings, *recipe); !status) return status;
  fmt::print("recipe {}, BF16, causal, heads {}/{}, dims {}; ms: median (least..most) of {} after {}\n", recipe->name,
             settings.heads, settings.kv_heads, settings.head_dim, settings.repeats, kWarmup);
  for (const Workload& workload : *chosen) {
    if (Status status = measure(settings, *recipe, workload); !status) return status;
  }
  return {};
}

/// The exit code.
int parse_and_run(int argc, char** argv) {
  Settings settings;
  CLI::App app("Times the stages of the CUDA engine, after a check of its answer");
  app.add_option("--workload", settings.workload, "Lists of lengths separated by commas")->capture_default_str();
  app.add_option("--recipe", settings.recipe, "A name or a JSON file")->capture_default_str();
  app.add_option("--heads", settings.heads)->capture_default_str();
  app.add_option("--kv-heads", settings.kv_heads)->capture_default_str();
  app.add_option("--head-dim", settings.head_dim)->capture_default_str();
  app.add_option("--repeats", settings.repeats)->check(CLI::Range(1, 1000))->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const Status status = run(settings);
  if (!status) fmt::print(stderr, "cuda_stages: {}\n", status.error().message);
  return status ? 0 : 1;
}

}  // namespace
}  // namespace mxflash::tool

int main(int argc, char** argv) {
  try {
    return mxflash::tool::parse_and_run(argc, argv);
  } catch (const std::exception& error) {
    static_cast<void>(std::fputs(error.what(), stderr));
    return 1;
  }
}
