// `mxflash quantize`: one tensor of a file as codes, scales, and what they stand for.
#include "mxflash/quantize.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <memory>
#include <utility>

#include "arguments.hpp"
#include "capture.hpp"
#include "mxflash/safetensors.hpp"
#include "output.hpp"
#include "quantize/tensors.hpp"
#include "verbs.hpp"

namespace mxflash::tool {

namespace {

struct QuantizeArguments {
  std::string input;
  std::string tensor;
  std::string format;
  std::string block;
  std::string rule;
  std::string rounding = "nearest";
  std::string seed = "0";
  bool hadamard = false;
  std::string out;
};

Error named(std::string_view argument, const Error& error) {
  return {error.kind, fmt::format("{}: {}", argument, error.message)};
}

Result<ScaleRule> choose_rule(const QuantizeArguments& arguments, Encoding encoding) {
  if (arguments.rule.empty()) return ScaleRule::ceil;
  if (encoding == Encoding::nvfp4) {
    return invalid(fmt::format("--scale-rule: {} given with nvfp4, none allowed (its scale is E4M3 of maximum / 6)",
                               arguments.rule));
  }
  Result<ScaleRule> rule = parse_scale_rule(arguments.rule);
  if (!rule) return named("--scale-rule", rule.error());
  if (*rule == ScaleRule::uos && encoding != Encoding::e2m1) {
    return invalid(fmt::format("--scale-rule: uos given with {}, e2m1 alone allowed", arguments.format));
  }
  return rule;
}

Result<Operand> choose_operand(const QuantizeArguments& arguments) {
  const Result<Encoding> encoding = parse_encoding(arguments.format);
  if (!encoding || !element_format(*encoding)) {
    return invalid(
        fmt::format("--format: '{}' given, e4m3, e5m2, e2m3, e3m2, e2m1 or nvfp4 allowed", arguments.format));
  }
  const Result<Block> block = parse_block(arguments.block);
  if (!block) return named("--block", block.error());
  if (*encoding == Encoding::nvfp4 && *block != Block::dims16() && *block != Block::channel16()) {
    return invalid(fmt::format("--block: {} given with nvfp4, dims:16 or channel:16 allowed", arguments.block));
  }
  const Result<ScaleRule> rule = choose_rule(arguments, *encoding);
  if (!rule) return rule.error();
  const Result<Rounding> rounding = parse_rounding(arguments.rounding);
  if (!rounding) return named("--rounding", rounding.error());
  return Operand{*encoding, *block, *rule, *rounding, SecondLevel::fixed};
}

bool follows_keys(const std::string& name) { return name == "k" || name == "v" || name == "dk" || name == "dv"; }

/// The documents of the tensor's own side; the other side's rows do not matter here.
Result<Packing> packing_for(const TensorFile& file, const QuantizeArguments& arguments, std::int64_t tokens) {
  const char* side = follows_keys(arguments.tensor) ? "cu_seqlens_k" : "cu_seqlens_q";
  for (const char* name : {side, "cu_seqlens"}) {
    const auto found = file.tensors.find(name);
    if (found != file.tensors.end()) return Packing::from_tensors(found->second, found->second, tokens, tokens);
  }
  return Packing::single(tokens, tokens);
}

/// What the scales are and how their places follow from a (token, head, dim).
std::string scale_layout(const Operand& operand) {
  if (operand.block == Block::tensor()) return "[1] F32, one for the whole tensor";
  const std::string type = operand.encoding == Encoding::nvfp4 ? "UE4M3" : "E8M0";
  const std::string rows = operand.block.rows == 1
                               ? "token"
                               : fmt::format("blocks of {} tokens, counted anew in each document", operand.block.rows);
  const std::string columns = operand.block.columns == 0 ? "1" : fmt::format("dim / {}", operand.block.columns);
  return fmt::format("[{}, heads, {}] {} codes", rows, columns, type);
}

TensorFile make_file(const QuantizeArguments& arguments, const Operand& operand, const Quantized& quantized) {
  TensorFile file;
  QuantizedTensors tensors = tensors_of(quantized, operand);
  file.tensors["codes"] = std::move(tensors.codes);
  file.tensors["scales"] = std::move(tensors.scales);
  file.tensors["dequantized"] = std::move(tensors.dequantized);
  const bool has_rule = operand.encoding != Encoding::nvfp4 && operand.block != Block::tensor();
  file.metadata = {{"tensor", arguments.tensor},
                   {"format", to_string(operand.encoding)},
                   {"block", to_string(operand.block)},
                   {"scale_rule", has_rule ? to_string(operand.rule) : "maximum / format maximum"},
                   {"scale_layout", scale_layout(operand)},
                   {"rounding", to_string(operand.rounding)},
                   {"seed", arguments.seed},
                   {"hadamard", arguments.hadamard ? "true" : "false"},
                   {"mxflash", MXFLASH_VERSION}};
  return file;
}

Result<Quantized> quantize_tensor(const QuantizeArguments& arguments, const Operand& operand, std::uint64_t seed) {
  const Result<TensorFile> file = read_safetensors(arguments.input);
  if (!file) return file.error();
  const auto found = file->tensors.find(arguments.tensor);
  if (found == file->tensors.end()) {
    std::vector<std::string> names;
    for (const auto& entry : file->tensors) names.push_back(entry.first);
    return invalid(fmt::format("--tensor: '{}' given, one of {} allowed", arguments.tensor, fmt::join(names, ", ")));
  }
  const Result<TensorView> view = found->second.view(arguments.tensor);
  if (!view) return view.error();
  const Result<Packing> packing = packing_for(*file, arguments, view->tokens());
  if (!packing) return packing.error();
  QuantizeOptions options;
  options.operand = operand;
  options.side = follows_keys(arguments.tensor) ? Side::key : Side::query;
  options.hadamard = arguments.hadamard;
  options.seed = seed;
  return quantize(*view, *packing, options, 0);
}

Result<Outcome> quantize_verb(const QuantizeArguments& arguments) {
  const Result<std::uint64_t> seed = parse_seed(arguments.seed);
  if (!seed) return seed.error();
  const Result<Operand> operand = choose_operand(arguments);
  if (!operand) return operand.error();
  const std::array inputs = {arguments.input};
  if (const Status status = check_output("--out", arguments.out, inputs); !status) return status.error();
  const Result<Quantized> quantized = quantize_tensor(arguments, *operand, *seed);
  if (!quantized) return quantized.error();
  const Status status = write_safetensors(arguments.out, make_file(arguments, *operand, *quantized));
  if (!status) return status.error();
  print_line(fmt::format("{}: codes [{}], scales {}", arguments.out, fmt::join(quantized->shape, ", "),
                         scale_layout(*operand)));
  return Outcome::done;
}

}  // namespace

void add_quantize(CLI::App& app, Action& action) {
  const auto arguments = std::make_shared<QuantizeArguments>();
  CLI::App* verb = app.add_subcommand(
      "quantize",
      "Quantize one tensor: codes (U8, one an element), scales (U8: E8M0 or UE4M3 bytes), dequantized (F32)");
  verb->add_option("IN", arguments->input, "safetensors file")->required()->type_name("");
  verb->add_option("--tensor", arguments->tensor,
                   "Its name: q, k, v, do or any [tokens, heads, dims]; k and v follow the key side's documents")
      ->required()
      ->type_name("NAME");
  verb->add_option("--format", arguments->format, "e4m3, e5m2, e2m3, e3m2, e2m1, or nvfp4 (e2m1 with a UE4M3 scale)")
      ->required()
      ->type_name("FORMAT");
  verb->add_option(
          "--block", arguments->block,
          "What shares a scale: token, tokens:32, dims:16, dims:32, channel:16, channel:32 (tokens of one dim), "
          "square:32 or tensor; never across documents or heads")
      ->required()
      ->type_name("BLOCK");
  verb->add_option(
          "--scale-rule", arguments->rule,
          "Power-of-two scale of a block's maximum: floor (OCP), ceil (never saturates; the default), uos (least "
          "squared error, e2m1 only)")
      ->type_name("floor|ceil|uos");
  verb->add_flag("--hadamard", arguments->hadamard, "Rotate each row first (power-of-two dims)");
  verb->add_option("--rounding", arguments->rounding, "Nearest even, or stochastic with --seed")
      ->type_name("nearest|stochastic")
      ->capture_default_str();
  verb->add_option("--seed", arguments->seed, "Seed of stochastic rounding")->type_name("N")->capture_default_str();
  verb->add_option("--out", arguments->out, "safetensors file to write")->required()->type_name("OUT");
  verb->callback([arguments, &action] { action = [arguments] { return quantize_verb(*arguments); }; });
}

}  // namespace mxflash::tool
