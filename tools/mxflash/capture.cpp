#include "capture.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <cmath>
#include <vector>

#include "arguments.hpp"
#include "arguments/arguments.hpp"

namespace mxflash::tool {

namespace {

const Tensor* find(const TensorFile& file, const std::string& name) {
  const auto found = file.tensors.find(name);
  return found == file.tensors.end() ? nullptr : &found->second;
}

Result<TensorView> required_view(const TensorFile& file, const std::string& path, const std::string& name) {
  const Tensor* tensor = find(file, name);
  if (tensor != nullptr) return tensor->view(name);
  std::vector<std::string> names;
  names.reserve(file.tensors.size());
  for (const auto& entry : file.tensors) names.push_back(entry.first);
  return invalid(fmt::format("{}: no such tensor in {} ({} given), q, k and v are required", name, path,
                             names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "))));
}

/// `dlse` [tokens, heads], where the file has it.
Result<std::optional<TensorView>> lse_gradient(const TensorFile& file) {
  const Tensor* tensor = find(file, "dlse");
  if (tensor == nullptr) return std::optional<TensorView>();
  if (find(file, "do") == nullptr) return invalid("dlse: given without do, both allowed or do alone");
  if (tensor->shape.size() != 2) {
    return invalid(
        fmt::format("dlse: shape [{}] given, two dimensions [tokens, heads] allowed", fmt::join(tensor->shape, ", ")));
  }
  return std::optional(TensorView{
      tensor->data.data(), tensor->dtype, {tensor->shape[0], tensor->shape[1], 1}, {tensor->shape[1], 1, 1}});
}

/// The metadata's scale; absent: the library's default.
Result<std::optional<float>> scale_of(const TensorFile& file) {
  const auto found = file.metadata.find("softmax_scale");
  if (found == file.metadata.end()) return std::optional<float>();
  const std::string& text = found->second;
  float value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
    return invalid(fmt::format("softmax_scale: metadata '{}' given, a finite FP32 number allowed", text));
  }
  return std::optional<float>(value);
}

/// The metadata's mask; absent: causal.
Result<bool> causal_of(const TensorFile& file) {
  const auto found = file.metadata.find("causal");
  if (found == file.metadata.end() || found->second == "true") return true;
  if (found->second == "false") return false;
  return invalid(fmt::format("causal: metadata '{}' given, true or false allowed", found->second));
}

nlohmann::ordered_json bound_json(std::int64_t bound) {
  return bound >= Mask::unbounded ? nlohmann::ordered_json() : nlohmann::ordered_json(bound);
}

std::string bound_text(std::int64_t bound) { return bound >= Mask::unbounded ? "inf" : fmt::format("{}", bound); }

}  // namespace

Result<Packing> packing_of(const TensorFile& file, std::int64_t tokens_q, std::int64_t tokens_k) {
  const Tensor* both = find(file, "cu_seqlens");
  const Tensor* query = find(file, "cu_seqlens_q");
  const Tensor* key = find(file, "cu_seqlens_k");
  if (both != nullptr && (query != nullptr || key != nullptr)) {
    return invalid(
        "cu_seqlens: given beside cu_seqlens_q or cu_seqlens_k, either one for both or one for each allowed");
  }
  if ((query == nullptr) != (key == nullptr)) {
    return invalid(fmt::format("{0}: given without {1}, both allowed or neither",
                               query != nullptr ? "cu_seqlens_q" : "cu_seqlens_k",
                               query != nullptr ? "cu_seqlens_k" : "cu_seqlens_q"));
  }
  if (both != nullptr) return Packing::from_tensors(*both, *both, tokens_q, tokens_k);
  if (query != nullptr) return Packing::from_tensors(*query, *key, tokens_q, tokens_k);
  return Packing::single(tokens_q, tokens_k);
}

Result<Capture> load_capture(const std::string& path, const MaskArguments& mask) {
  Result<TensorFile> file = read_safetensors(path);
  if (!file) return file.error();
  const Result<TensorView> q = required_view(*file, path, "q");
  if (!q) return q.error();
  const Result<TensorView> k = required_view(*file, path, "k");
  if (!k) return k.error();
  const Result<TensorView> v = required_view(*file, path, "v");
  if (!v) return v.error();
  std::optional<TensorView> dout;
  if (const Tensor* tensor = find(*file, "do"); tensor != nullptr) {
    const Result<TensorView> view = tensor->view("do");
    if (!view) return view.error();
    dout = *view;
  }
  const Result<std::optional<TensorView>> dlse = lse_gradient(*file);
  if (!dlse) return dlse.error();
  const Result<Packing> packing = packing_of(*file, q->tokens(), k->tokens());
  if (!packing) return packing.error();
  const Result<bool> causal = causal_of(*file);
  if (!causal) return causal.error();
  const Result<std::optional<float>> scale = scale_of(*file);
  if (!scale) return scale.error();
  const bool keep_causal = *causal && !mask.full;
  const Result<Mask> band = make_mask(keep_causal, mask.window);
  if (!band) return band.error();
  const Problem problem{*packing, *band, *scale};
  const Inputs inputs{*q, *k, *v, dout, *dlse};
  // Also where a recipe without a backward would never look at do.
  const Status status =
      dout ? check_backward_arguments(problem, inputs, Options{}) : check_arguments(problem, inputs, Options{});
  if (!status) return status.error();
  return Capture{*std::move(file), problem, inputs, keep_causal};
}

nlohmann::ordered_json problem_json(const Capture& capture) {
  const Inputs& inputs = capture.inputs;
  const Mask& mask = capture.problem.mask;
  const Mask plain = capture.causal ? Mask::causal() : Mask::full();
  const double scale =
      capture.problem.scale ? *capture.problem.scale : 1 / std::sqrt(static_cast<double>(inputs.q.dims()));
  return {{"tokens", inputs.q.tokens()},
          {"tokens_k", inputs.k.tokens()},
          {"documents", capture.problem.packing.documents().size()},
          {"heads", inputs.q.heads()},
          {"kv_heads", inputs.k.heads()},
          {"head_dim", inputs.q.dims()},
          {"value_dim", inputs.v.dims()},
          {"dtype", name_of(inputs.q.dtype)},
          {"scale", scale},
          {"causal", capture.causal},
          {"window", mask == plain ? nlohmann::ordered_json()
                                   : nlohmann::ordered_json::array({bound_json(mask.left), bound_json(mask.right)})}};
}

std::string describe(const Capture& capture) {
  const Inputs& inputs = capture.inputs;
  const Mask& mask = capture.problem.mask;
  const Mask plain = capture.causal ? Mask::causal() : Mask::full();
  std::string text = fmt::format("{} tokens in {} documents, {} heads on {}, head_dim {}, {}, {}", inputs.q.tokens(),
                                 capture.problem.packing.documents().size(), inputs.q.heads(), inputs.k.heads(),
                                 inputs.q.dims(), name_of(inputs.q.dtype), capture.causal ? "causal" : "full");
  if (inputs.v.dims() != inputs.q.dims()) text += fmt::format(", value_dim {}", inputs.v.dims());
  if (mask != plain) text += fmt::format(", window {},{}", bound_text(mask.left), bound_text(mask.right));
  return text;
}

}  // namespace mxflash::tool
