#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <type_traits>

#include "mxflash/recipe.hpp"
#include "recipe/names.hpp"

namespace mxflash {
namespace {

using Json = nlohmann::ordered_json;

/// P's "tensor" block is no scale at all, which is why it has a word of its own; a token operand has no "static".
constexpr auto kTokenBlocks = [] {
  std::array<names::Word<Block>, names::kBlocks.size() - 1> table{};
  std::copy_n(names::kBlocks.begin(), table.size(), table.begin());
  return table;
}();
constexpr auto kPBlocks = [] {
  auto table = names::kBlocks;
  std::ranges::reverse(table);
  return table;
}();

// ---- The fields, once for both directions: an Archive reads or writes ----

template <class Archive, class Field, class Blocks>
void describe_operand(Archive& archive, Field& operand, const Blocks& blocks) {
  archive.word("encoding", names::kEncodings, operand.encoding);
  archive.word("block", blocks, operand.block);
  archive.word("rule", names::kScaleRules, operand.rule);
  archive.word("rounding", names::kRoundings, operand.rounding);
  archive.word("second_level", names::kSecondLevels, operand.second_level);
}

template <class Archive, class Pair, class Blocks>
void describe_pair(Archive& archive, Pair& pair, const Blocks& weight_blocks) {
  archive.object("weights", pair.weights, [&](auto& a, auto& o) { describe_operand(a, o, weight_blocks); });
  archive.object("tokens", pair.tokens, [](auto& a, auto& o) { describe_operand(a, o, kTokenBlocks); });
}

template <class Archive, class Product>
void describe_over_dims(Archive& archive, Product& product) {
  archive.object("left", product.left, [](auto& a, auto& o) { describe_operand(a, o, kTokenBlocks); });
  archive.object("right", product.right, [](auto& a, auto& o) { describe_operand(a, o, kTokenBlocks); });
}

template <class Archive, class Product, class Blocks>
void describe_over_tokens(Archive& archive, Product& product, const Blocks& weight_blocks) {
  describe_pair(archive, product, weight_blocks);
  archive.optional("cut", product.cut, [&](auto& a, auto& pair) { describe_pair(a, pair, weight_blocks); });
}

template <class Archive, class Field>
void describe_claims(Archive& archive, Field& claims) {
  archive.word("forward", names::kCausalities, claims.forward);
  archive.word("backward", names::kCausalities, claims.backward);
}

template <class Archive, class Field>
void describe_recipe(Archive& archive, Field& recipe) {
  archive.text("name", recipe.name);
  archive.text("summary", recipe.summary);
  archive.word("purpose", names::kPurposes, recipe.purpose);
  archive.word("hadamard", names::kHadamards, recipe.hadamard);
  archive.word("exponential", names::kExponentials, recipe.exponential);
  archive.word("row_sum", names::kRowSums, recipe.row_sum);
  archive.integer("beta", recipe.beta);
  archive.integer("tau", recipe.tau);
  archive.word("dq_accumulation", names::kDqAccumulations, recipe.dq_accumulation);
  const auto over_dims = [](auto& a, auto& product) { describe_over_dims(a, product); };
  const auto with_p = [](auto& a, auto& product) { describe_over_tokens(a, product, kPBlocks); };
  const auto with_ds = [](auto& a, auto& product) { describe_over_tokens(a, product, kTokenBlocks); };
  archive.object("s", recipe.s, over_dims);
  archive.object("o", recipe.o, with_p);
  archive.object("dp", recipe.dp, over_dims);
  archive.object("dv", recipe.dv, with_p);
  archive.object("dq", recipe.dq, with_ds);
  archive.object("dk", recipe.dk, with_ds);
}

class Writer {
 public:
  void text(const char* key, const std::string& value) { json_[key] = value; }
  void integer(const char* key, int value) { json_[key] = value; }

  template <class Table, class Value>
  void word(const char* key, const Table& table, const Value& value) {
    json_[key] = std::string(names::word_of(table, value));
  }
  template <class Value, class Describe>
  void object(const char* key, const Value& value, const Describe& describe) {
    Writer inner;
    describe(inner, value);
    json_[key] = std::move(inner.json_);
  }
  template <class Value, class Describe>
  void optional(const char* key, const std::optional<Value>& value, const Describe& describe) {
    if (value) {
      object(key, *value, describe);
    } else {
      json_[key] = nullptr;
    }
  }
  /// Bytes that are not UTF-8 are replaced: the strict handler would throw.
  [[nodiscard]] std::string dump() const { return json_.dump(2, ' ', false, Json::error_handler_t::replace); }

 private:
  Json json_ = Json::object();
};

/// Scalars as they were given, containers by their kind: a message is one short line.
std::string given(const Json& json) {
  if (json.is_object()) return "an object";
  if (json.is_array()) return "an array";
  if (json.is_string()) return names::quoted(json.get_ref<const std::string&>());
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

/// Reads one object; the first error of the whole document is kept and later calls change nothing.
class Reader {
 public:
  Reader(const Json& json, std::string path, Status& status) : json_(json), path_(std::move(path)), status_(status) {
    if (!json_.is_object()) refuse(path_.empty() ? "recipe" : path_, given(json_), "an object");
  }

  void text(const char* key, std::string& value) {
    const Json* json = take(key);
    if (json == nullptr) return;
    if (!json->is_string()) return refuse(path_of(key), given(*json), "a string");
    value = json->get_ref<const std::string&>();
  }

  void integer(const char* key, int& value) {
    const Json* json = take(key);
    if (json == nullptr) return;
    constexpr auto kMax = std::numeric_limits<int>::max();
    // A value above the signed range is stored unsigned; read as signed it would wrap.
    const bool fits = json->is_number_unsigned()  ? json->get<std::uint64_t>() <= static_cast<std::uint64_t>(kMax)
                      : json->is_number_integer() ? json->get<std::int64_t>() >= std::numeric_limits<int>::min()
                                                  : false;
    if (!fits) return refuse(path_of(key), given(*json), fmt::format("an integer up to {}", kMax));
    value = json->get<int>();
  }

  template <class Table, class Value>
  void word(const char* key, const Table& table, Value& value) {
    const Json* json = take(key);
    if (json == nullptr) return;
    if (!json->is_string()) return refuse(path_of(key), given(*json), names::all_words(table));
    const Result<Value> parsed = names::parse(table, path_of(key), json->get_ref<const std::string&>());
    if (!parsed) return fail(parsed.error());
    value = *parsed;
  }

  template <class Value, class Describe>
  void object(const char* key, Value& value, const Describe& describe) {
    const Json* json = take(key);
    if (json == nullptr) return;
    Reader inner(*json, path_of(key), status_);
    describe(inner, value);
    inner.refuse_unknown();
  }

  template <class Value, class Describe>
  void optional(const char* key, std::optional<Value>& value, const Describe& describe) {
    const Json* json = take(key);
    if (json == nullptr) return;
    if (json->is_null()) return value.reset();
    if (!json->is_object()) return refuse(path_of(key), given(*json), "an object or null");
    object(key, value.emplace(), describe);
  }

  [[nodiscard]] bool has(const char* key) const { return json_.is_object() && json_.contains(key); }

  void refuse_unknown() {
    if (!status_) return;
    for (const auto& item : json_.items()) {
      if (known_.contains(item.key())) continue;
      std::string allowed;
      for (const auto& field : known_) allowed.append(allowed.empty() ? "" : ", ").append(field);
      const std::string inside = path_.empty() ? "the recipe" : path_;
      return refuse("field", fmt::format("{} in {}, which is unknown", names::quoted(item.key()), inside), allowed);
    }
  }

 private:
  const Json* take(const char* key) {
    known_.insert(key);
    if (!status_) return nullptr;
    const auto found = json_.find(key);
    if (found != json_.end()) return &*found;
    refuse(path_of(key), "missing", "every field given, claims excepted");
    return nullptr;
  }
  [[nodiscard]] std::string path_of(const char* key) const {
    return path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
  }
  void refuse(std::string_view field, std::string_view what, std::string_view allowed) {
    fail(invalid(fmt::format("{} is {}; allowed: {}", field, what, allowed)));
  }
  void fail(Error error) {
    if (status_) status_ = std::move(error);
  }

  const Json& json_;
  std::string path_;
  Status& status_;
  std::set<std::string> known_;
};

/// Finds what the document parser does not tell: where the text stops being JSON, keys given twice (of which it would
/// take the last in silence), and nesting that would exhaust the stack when the document is destroyed.
class Checker : public nlohmann::json_sax<Json> {
 public:
  explicit Checker(std::string_view text) : text_(text) {}
  [[nodiscard]] const Status& status() const { return status_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_array(std::size_t) override { return open(); }
  bool end_array() override { return close(); }
  bool start_object(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool key(string_t& key) override {
    if (keys_.back().insert(key).second) return true;
    status_ = invalid(fmt::format("field is {}, given twice; allowed: once", names::quoted(key)));
    return false;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    const std::string_view before = text_.substr(0, position > 0 ? position - 1 : 0);
    const auto line = std::ranges::count(before, '\n') + 1;
    const std::size_t column = before.size() - (before.find_last_of('\n') + 1) + 1;
    status_ = invalid(fmt::format("recipe is not JSON at line {}, column {}; allowed: one JSON object", line, column));
    return false;
  }

 private:
  bool open() {
    keys_.emplace_back();
    if (keys_.size() <= kDeepest) return true;
    status_ = invalid(fmt::format("recipe is nested deeper than {} levels; allowed: operands in products", kDeepest));
    return false;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  static constexpr std::size_t kDeepest = 16;
  std::string_view text_;
  std::vector<std::set<std::string>> keys_;  ///< Of each open container.
  Status status_;
};

}  // namespace

std::string to_json(const Recipe& recipe) {
  Writer writer;
  describe_recipe(writer, recipe);
  writer.object("claims", recipe.claims, [](auto& a, const Claims& claims) { describe_claims(a, claims); });
  return writer.dump() + "\n";
}

Result<Recipe> recipe_from_json(std::string_view text) {
  Checker checker(text);
  Json::sax_parse(text, &checker);
  if (!checker.status()) return checker.status().error();
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) return invalid("recipe is not JSON; allowed: one JSON object");

  Status status;
  Reader reader(json, "", status);
  Recipe recipe;
  describe_recipe(reader, recipe);
  const bool claimed = reader.has("claims");
  if (claimed) {
    reader.object("claims", recipe.claims, [](auto& a, Claims& claims) { describe_claims(a, claims); });
  }
  reader.refuse_unknown();
  if (!status) return status.error();
  if (!claimed) recipe.claims = derive_claims(recipe);
  if (Status valid = validate(recipe); !valid) return valid.error();
  return recipe;
}

}  // namespace mxflash
