// `mxflash generate`: random packed documents, the same bytes for the same seed.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "arguments.hpp"
#include "mxflash/safetensors.hpp"
#include "output.hpp"
#include "random_tensor.hpp"
#include "verbs.hpp"

namespace mxflash::tool {

namespace {

constexpr std::int64_t kMostTokens = INT32_MAX;  // offsets are int32
constexpr std::int64_t kMostHeads = 4096;

struct GenerateArguments {
  std::string lengths;
  std::string key_lengths;
  std::string heads = "16";
  std::string kv_heads;
  std::string head_dim = "128";
  std::string value_dim;
  std::string distribution = "normal";
  std::string dtype = "bf16";
  std::string seed = "0";
  std::string out;
};

struct Lengths {
  std::int64_t length = 0;
  std::int64_t count = 1;
};

/// Lengths of the documents of one side, in runs.
struct Side {
  std::vector<Lengths> runs;
  std::int64_t tokens = 0;
  std::int64_t documents = 0;
};

struct Shape {
  Side query;
  Side key;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;
  DType dtype = DType::bf16;
};

Result<Lengths> parse_run(std::string_view argument, const std::string& text) {
  const std::size_t cross = text.find('x');
  const Result<std::int64_t> length = parse_integer(argument, text.substr(0, cross), {0, kMostTokens});
  const Result<std::int64_t> count = cross == std::string::npos
                                         ? Result<std::int64_t>(std::int64_t{1})
                                         : parse_integer(argument, text.substr(cross + 1), {0, kMostTokens});
  if (length && count) return Lengths{*length, *count};
  return invalid(fmt::format("{}: '{}' given, LENGTH or LENGTHxCOUNT of integers from 0 to {} allowed", argument, text,
                             kMostTokens));
}

Result<Side> parse_lengths(std::string_view argument, const std::string& text) {
  Side side;
  for (const std::string& part : split(text, ',')) {
    const Result<Lengths> run = parse_run(argument, part);
    if (!run) return run.error();
    side.runs.push_back(*run);
    side.tokens += run->length * run->count;  // each step is below 2^62, and the sum is checked after it
    side.documents += run->count;
    if (side.tokens > kMostTokens || side.documents >= kMostTokens) {
      return invalid(fmt::format("{}: {} tokens in {} documents given, at most {} of each allowed", argument,
                                 side.tokens, side.documents, kMostTokens));
    }
  }
  return side;
}

Result<DType> parse_dtype(const std::string& text) {
  if (text == "bf16") return DType::bf16;
  if (text == "f16") return DType::f16;
  if (text == "f32") return DType::f32;
  return invalid(fmt::format("--dtype: '{}' given, bf16, f16 or f32 allowed", text));
}

Result<std::int64_t> parse_dim(std::string_view argument, const std::string& text) {
  Result<std::int64_t> dim = parse_integer(argument, text, {8, 256});
  if (!dim || *dim % 8 != 0)
    return invalid(fmt::format("{}: '{}' given, a multiple of 8 from 8 to 256 allowed", argument, text));
  return dim;
}

Status check_memory(const Shape& shape) {
  const auto width = static_cast<double>(shape.head_dim + shape.value_dim);
  const double elements = width * (static_cast<double>(shape.query.tokens * shape.heads) +
                                   static_cast<double>(shape.key.tokens * shape.kv_heads));
  const double offsets = 4.0 * static_cast<double>(shape.query.documents + shape.key.documents);
  // The tensors and the bytes of the file stand side by side.
  const double needed = 2 * (elements * static_cast<double>(size_of(shape.dtype)) + offsets);
  const double memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  if (needed <= memory) return {};
  constexpr double kGib = 1 << 30;
  return invalid(
      fmt::format("--lengths: {} tokens in {} documents given, which need about {:.1f} GiB, at most this "
                  "machine's {:.1f} GiB allowed",
                  shape.query.tokens, shape.query.documents, needed / kGib, memory / kGib));
}

Status parse_heads(const GenerateArguments& arguments, Shape& shape) {
  const Result<std::int64_t> heads = parse_integer("--heads", arguments.heads, {1, kMostHeads});
  if (!heads) return heads.error();
  const std::string& text = arguments.kv_heads.empty() ? arguments.heads : arguments.kv_heads;
  const Result<std::int64_t> kv_heads = parse_integer("--kv-heads", text, {1, kMostHeads});
  if (!kv_heads) return kv_heads.error();
  if (*heads % *kv_heads != 0) {
    return invalid(fmt::format("--kv-heads: {} given, a divisor of --heads {} allowed", *kv_heads, *heads));
  }
  shape.heads = *heads;
  shape.kv_heads = *kv_heads;
  return {};
}

Result<Shape> parse_shape(const GenerateArguments& arguments) {
  Shape shape;
  const Result<Side> query = parse_lengths("--lengths", arguments.lengths);
  if (!query) return query.error();
  const Result<Side> key =
      arguments.key_lengths.empty() ? query : parse_lengths("--key-lengths", arguments.key_lengths);
  if (!key) return key.error();
  if (key->documents != query->documents) {
    return invalid(fmt::format("--key-lengths: {} documents given, the {} of --lengths allowed", key->documents,
                               query->documents));
  }
  shape.query = *query;
  shape.key = *key;
  if (const Status status = parse_heads(arguments, shape); !status) return status.error();
  const Result<std::int64_t> head_dim = parse_dim("--head-dim", arguments.head_dim);
  if (!head_dim) return head_dim.error();
  const Result<std::int64_t> value_dim =
      arguments.value_dim.empty() ? head_dim : parse_dim("--value-dim", arguments.value_dim);
  if (!value_dim) return value_dim.error();
  const Result<DType> dtype = parse_dtype(arguments.dtype);
  if (!dtype) return dtype.error();
  shape.head_dim = *head_dim;
  shape.value_dim = *value_dim;
  shape.dtype = *dtype;
  if (const Status status = check_memory(shape); !status) return status.error();
  return shape;
}

/// Channels of q and k with large values, as in trained models: one in 32 of each head, 30 to 100 times the others.
/// Those of q are not those of k, so that the logits stay in a real model's range.
std::vector<double> channel_factors(std::uint64_t seed, std::uint64_t stream, std::int64_t heads, std::int64_t dims) {
  std::vector<double> factors(static_cast<std::size_t>(heads * dims), 1.0);
  const std::int64_t groups = std::max<std::int64_t>(1, dims / 32);
  const std::int64_t group = dims / groups;
  for (std::int64_t i = 0; i < heads * groups; ++i) {
    const auto index = static_cast<std::uint64_t>(2 * i);
    const std::int64_t half = group / 2;
    const auto place = static_cast<std::int64_t>(uniform(seed, stream, index) * static_cast<double>(half));
    // q takes from the lower half of a group, k from the upper.
    const std::int64_t dim = (i % groups) * group + place + (stream % 2 == 0 ? 0 : half);
    factors[static_cast<std::size_t>(i / groups * dims + dim)] = 30 + 70 * uniform(seed, stream, index + 1);
  }
  return factors;
}

Tensor offsets_tensor(const Side& side) {
  Tensor tensor = Tensor::zeros(DType::i32, {side.documents + 1});
  std::int32_t offset = 0;
  std::byte* place = tensor.data.data();
  for (const Lengths& run : side.runs) {
    for (std::int64_t i = 0; i < run.count; ++i) {
      offset += static_cast<std::int32_t>(run.length);
      place += sizeof offset;
      std::memcpy(place, &offset, sizeof offset);
    }
  }
  return tensor;
}

TensorFile make_file(const GenerateArguments& arguments, const Shape& shape, std::uint64_t seed) {
  // Streams of the values are 0..3, those of the channels 4 (q) and 5 (k).
  const bool outliers = arguments.distribution == "outliers";
  const auto factors = [&](std::uint64_t stream, std::int64_t heads) {
    return outliers ? channel_factors(seed, stream, heads, shape.head_dim) : std::vector<double>();
  };
  const std::int64_t queries = shape.query.tokens;
  const std::int64_t keys = shape.key.tokens;
  TensorFile file;
  file.tensors["q"] =
      normal_tensor(shape.dtype, {queries, shape.heads, shape.head_dim}, {seed, 0, factors(4, shape.heads)});
  file.tensors["k"] =
      normal_tensor(shape.dtype, {keys, shape.kv_heads, shape.head_dim}, {seed, 1, factors(5, shape.kv_heads)});
  file.tensors["v"] = normal_tensor(shape.dtype, {keys, shape.kv_heads, shape.value_dim}, {seed, 2, {}});
  file.tensors["do"] = normal_tensor(shape.dtype, {queries, shape.heads, shape.value_dim}, {seed, 3, {}});
  if (arguments.key_lengths.empty()) {
    file.tensors["cu_seqlens"] = offsets_tensor(shape.query);
  } else {
    file.tensors["cu_seqlens_q"] = offsets_tensor(shape.query);
    file.tensors["cu_seqlens_k"] = offsets_tensor(shape.key);
  }
  const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(shape.head_dim)));
  file.metadata = {{"causal", "true"},
                   {"softmax_scale", fmt::format("{}", scale)},
                   {"source", fmt::format("mxflash generate, {}, seed {}", arguments.distribution, seed)}};
  return file;
}

Result<Outcome> generate_verb(const GenerateArguments& arguments) {
  const Result<std::uint64_t> seed = parse_seed(arguments.seed);
  if (!seed) return seed.error();
  if (arguments.distribution != "normal" && arguments.distribution != "outliers") {
    return invalid(fmt::format("--distribution: '{}' given, normal or outliers allowed", arguments.distribution));
  }
  const Result<Shape> shape = parse_shape(arguments);
  if (!shape) return shape.error();
  if (const Status status = check_output("--out", arguments.out, {}); !status) return status.error();
  const Status status = write_safetensors(arguments.out, make_file(arguments, *shape, *seed));
  if (!status) return status.error();
  print_line(fmt::format("{}: {} tokens in {} documents, {} heads on {}, head_dim {}", arguments.out,
                         shape->query.tokens, shape->query.documents, shape->heads, shape->kv_heads, shape->head_dim));
  return Outcome::done;
}

void add_shape_options(CLI::App& verb, GenerateArguments& arguments) {
  verb.add_option("--heads", arguments.heads, "Query heads")->type_name("N")->capture_default_str();
  verb.add_option("--kv-heads", arguments.kv_heads, "Key/value heads, a divisor of --heads (default: as many)")
      ->type_name("N");
  verb.add_option("--head-dim", arguments.head_dim, "Dims of q and k, a multiple of 8 up to 256")
      ->type_name("N")
      ->capture_default_str();
  verb.add_option("--value-dim", arguments.value_dim, "Dims of v and do (default: --head-dim)")->type_name("N");
  verb.add_option("--dtype", arguments.dtype, "Type of q, k, v, do")->type_name("bf16|f16|f32")->capture_default_str();
}

}  // namespace

void add_generate(CLI::App& app, Action& action) {
  const auto arguments = std::make_shared<GenerateArguments>();
  CLI::App* verb = app.add_subcommand("generate", "Random q, k, v, do and cu_seqlens; same arguments, same bytes");
  verb->add_option("--lengths", arguments->lengths,
                   "Documents in order: 8192,256x32 is one of 8192 tokens, then 32 of 256 (length x count)")
      ->required()
      ->type_name("L[xCOUNT],...");
  verb->add_option("--key-lengths", arguments->key_lengths,
                   "Key side's lengths where they differ: writes cu_seqlens_q and cu_seqlens_k")
      ->type_name("L[xCOUNT],...");
  add_shape_options(*verb, *arguments);
  verb->add_option("--distribution", arguments->distribution,
                   "Standard normal, or with one in 32 channels of q and of k 30 to 100 times larger")
      ->type_name("normal|outliers")
      ->capture_default_str();
  verb->add_option("--seed", arguments->seed, "Seed of the numbers")->type_name("N")->capture_default_str();
  verb->add_option("--out", arguments->out, "safetensors file to write")->required()->type_name("OUT");
  verb->callback([arguments, &action] { action = [arguments] { return generate_verb(*arguments); }; });
}

}  // namespace mxflash::tool
