#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <initializer_list>

#include "mxflash/recipe.hpp"
#include "recipe/names.hpp"
#include "recipe/roles.hpp"

namespace mxflash {

std::vector<Place> places_of(const Recipe& r) {
  std::vector<Place> places{{"s.left", &r.s.left, Role::dims},
                            {"s.right", &r.s.right, Role::dims},
                            {"o.weights", &r.o.weights, Role::p_over_keys},
                            {"o.tokens", &r.o.tokens, Role::tokens}};
  if (r.o.cut) {
    places.push_back({"o.cut.weights", &r.o.cut->weights, Role::p_over_keys, false, true});
    places.push_back({"o.cut.tokens", &r.o.cut->tokens, Role::tokens, false, true});
  }
  places.push_back({"dp.left", &r.dp.left, Role::dims, true});
  places.push_back({"dp.right", &r.dp.right, Role::dims, true});
  places.push_back({"dv.weights", &r.dv.weights, Role::p_over_queries, true});
  places.push_back({"dv.tokens", &r.dv.tokens, Role::tokens, true});
  places.push_back({"dq.weights", &r.dq.weights, Role::ds_over_keys, true});
  places.push_back({"dq.tokens", &r.dq.tokens, Role::tokens, true});
  if (r.dq.cut) {
    places.push_back({"dq.cut.weights", &r.dq.cut->weights, Role::ds_over_keys, true, true});
    places.push_back({"dq.cut.tokens", &r.dq.cut->tokens, Role::tokens, true, true});
  }
  places.push_back({"dk.weights", &r.dk.weights, Role::ds_over_queries, true});
  places.push_back({"dk.tokens", &r.dk.tokens, Role::tokens, true});
  return places;
}

bool has_backward(const Recipe& recipe) {
  return std::ranges::any_of(places_of(recipe), [](const Place& place) {
    return place.backward && (place.cut || place.operand->encoding != Encoding::f32);
  });
}

namespace {

// ---- Causality ----

/// What one part of a recipe lets through, and the words for it.
struct Reach {
  Causality level = Causality::exact;
  std::string because;
};

struct Reaches {
  Reach forward;
  Reach backward;
};

std::string described(const Operand& operand) {
  return fmt::format("{} in {}", to_string(operand.encoding), to_string(operand.block));
}

/// How far the tokens lie apart that share a scale of this operand.
Causality reach_of(const Operand& operand) {
  if (!operand.quantized() || operand.block.rows == 1) return Causality::exact;
  // Along a column the second level spans 128 rows, beyond the tile that a cut replaces.
  const bool wide = operand.block.rows == 0 || operand.second_level == SecondLevel::adaptive;
  return wide ? Causality::leaks : Causality::block;
}

Reach of(std::string_view path, const Operand& operand, Causality level) {
  if (level == Causality::exact) return {};
  const std::string_view span = operand.block.rows == 0 ? "all tokens"
                                : operand.second_level == SecondLevel::adaptive
                                    ? "128 tokens (its adaptive second level)"
                                : operand.block.rows == 16 ? "16 tokens"
                                                           : "32 tokens";
  return {level, fmt::format("{} ({}) shares a scale over {}", path, described(operand), span)};
}

Reach shared_scale(std::string_view path, const Operand& operand) { return of(path, operand, reach_of(operand)); }

/// P at a static scale shares nothing.
Reach p_scale(std::string_view path, const Operand& p) {
  return p.block == Block::tensor() ? Reach{} : shared_scale(path, p);
}

/// A block of 32 keys is harmless on a tile that is not cut: every query of the tile sees all of it.
Reach tokens_over_keys(std::string_view path, const TokenProduct& product) {
  const Causality level = reach_of(product.tokens);
  return level == Causality::block && product.cut ? Reach{} : of(path, product.tokens, level);
}

/// Queries only ever collect positions before their own key, unless a scale is tensor-wide: it crosses documents.
Reach over_queries(std::string_view path, const Operand& operand) {
  const bool wide = operand.quantized() && operand.block.rows == 0;
  return wide ? of(path, operand, Causality::leaks) : Reach{};
}

Reach accumulation(DqAccumulation kind) {
  if (kind != DqAccumulation::f16_sequence) return {};
  return {Causality::leaks, "dq_accumulation f16_sequence shares a scale over all tokens"};
}

/// The first of the furthest.
Reach furthest(std::initializer_list<Reach> parts) { return *std::ranges::max_element(parts, {}, &Reach::level); }

Reaches derive(const Recipe& r) {
  const Reach forward =
      furthest({shared_scale("s.left", r.s.left), shared_scale("s.right", r.s.right), p_scale("o.weights", r.o.weights),
                tokens_over_keys("o.tokens", r.o), r.o.cut ? p_scale("o.cut.weights", r.o.cut->weights) : Reach{},
                r.o.cut ? shared_scale("o.cut.tokens", r.o.cut->tokens) : Reach{}});
  const Reach backward = furthest({forward, shared_scale("dp.left", r.dp.left), shared_scale("dp.right", r.dp.right),
                                   shared_scale("dq.weights", r.dq.weights), tokens_over_keys("dq.tokens", r.dq),
                                   r.dq.cut ? shared_scale("dq.cut.weights", r.dq.cut->weights) : Reach{},
                                   r.dq.cut ? shared_scale("dq.cut.tokens", r.dq.cut->tokens) : Reach{},
                                   accumulation(r.dq_accumulation), over_queries("dv.tokens", r.dv.tokens),
                                   over_queries("dk.weights", r.dk.weights), over_queries("dk.tokens", r.dk.tokens)});
  return {forward, backward};
}

// ---- Rules: each names the field, what was given and what is allowed ----

Status refuse(std::string_view field, std::string_view given, std::string_view allowed) {
  return invalid(fmt::format("{} is {}; allowed: {}", field, given, allowed));
}

std::string field_of(const Place& place, std::string_view field) { return fmt::format("{}.{}", place.path, field); }

Status check_name(const Recipe& recipe) {
  const bool fits = !recipe.name.empty() && std::ranges::all_of(recipe.name, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
  });
  if (fits) return {};
  return refuse("name", names::quoted(recipe.name), "one or more of a-z, 0-9 and -");
}

/// Values cast into an enumeration from outside it would fall through every switch of an engine.
Status check_enumerators(const Recipe& recipe) {
  const auto known = [](const auto& table, auto value) { return !names::word_of(table, value).empty(); };
  const auto unknown = [](std::string_view field, const auto& table) {
    return refuse(field, "not an enumerator", names::all_words(table));
  };
  if (!known(names::kPurposes, recipe.purpose)) return unknown("purpose", names::kPurposes);
  if (!known(names::kHadamards, recipe.hadamard)) return unknown("hadamard", names::kHadamards);
  if (!known(names::kExponentials, recipe.exponential)) return unknown("exponential", names::kExponentials);
  if (!known(names::kRowSums, recipe.row_sum)) return unknown("row_sum", names::kRowSums);
  if (!known(names::kDqAccumulations, recipe.dq_accumulation)) {
    return unknown("dq_accumulation", names::kDqAccumulations);
  }
  if (!known(names::kCausalities, recipe.claims.forward)) return unknown("claims.forward", names::kCausalities);
  if (!known(names::kCausalities, recipe.claims.backward)) return unknown("claims.backward", names::kCausalities);
  for (const Place& place : places_of(recipe)) {
    const Operand& o = *place.operand;
    if (!known(names::kEncodings, o.encoding)) return unknown(field_of(place, "encoding"), names::kEncodings);
    if (!known(names::kScaleRules, o.rule)) return unknown(field_of(place, "rule"), names::kScaleRules);
    if (!known(names::kRoundings, o.rounding)) return unknown(field_of(place, "rounding"), names::kRoundings);
    if (!known(names::kSecondLevels, o.second_level)) {
      return unknown(field_of(place, "second_level"), names::kSecondLevels);
    }
  }
  return {};
}

constexpr int kMaxTau = 32;

Status check_range_of_p(const Recipe& recipe) {
  if (recipe.beta < 1 || !std::has_single_bit(static_cast<unsigned>(recipe.beta))) {
    return refuse("beta", std::to_string(recipe.beta), "a power of two from 1 to 2^30");
  }
  if (recipe.tau < 0 || recipe.tau > kMaxTau) {
    return refuse("tau", std::to_string(recipe.tau), fmt::format("0 to {}", kMaxTau));
  }
  const double largest = std::ldexp(recipe.beta, recipe.tau);
  for (const Place& place : places_of(recipe)) {
    const auto format = element_format(place.operand->encoding);
    if (!is_p(place.role) || !format || place.operand->block != Block::tensor()) continue;
    const double max = static_cast<double>(spec_of(*format).max);
    if (largest > max) {
      return refuse("beta 2^tau", fmt::format("{} (beta {}, tau {})", largest, recipe.beta, recipe.tau),
                    fmt::format("at most {}, the maximum of {}, as {}.block is static", max,
                                to_string(place.operand->encoding), place.path));
    }
  }
  return {};
}

std::vector<Block> allowed_blocks(Role role, bool nvfp4) {
  switch (role) {
    case Role::dims:
      if (nvfp4) return {Block::dims16()};
      return {Block::token(), Block::tokens32(), Block::dims32(), Block::square32(), Block::tensor()};
    case Role::tokens:
      if (nvfp4) return {Block::channel16()};
      return {Block::token(), Block::tokens32(), Block::channel32(), Block::square32(), Block::tensor()};
    case Role::p_over_keys: return {Block::tensor(), Block::dims32()};
    case Role::p_over_queries: return {Block::tensor(), Block::channel32()};
    case Role::ds_over_keys:
      if (nvfp4) return {Block::dims16()};
      return {Block::square32(), Block::dims32()};
    case Role::ds_over_queries:
      if (nvfp4) return {Block::channel16()};
      return {Block::square32(), Block::channel32()};
  }
  return {};
}

std::string block_word(const Block& block, Role role) {
  return is_p(role) && block == Block::tensor() ? "static" : to_string(block);
}

/// dK may take the codes that dQ made, 1 x 32 ones too.
bool shares_codes(const Place& place, const Recipe& recipe) {
  return place.role == Role::ds_over_queries && recipe.dk.weights == recipe.dq.weights &&
         place.operand->encoding != Encoding::nvfp4 && place.operand->block == Block::dims32();
}

Status check_block(const Place& place, const Recipe& recipe) {
  const Operand& operand = *place.operand;
  if (!operand.quantized() || shares_codes(place, recipe)) return {};
  const bool nvfp4 = operand.encoding == Encoding::nvfp4;
  const auto allowed = allowed_blocks(place.role, nvfp4);
  if (std::ranges::find(allowed, operand.block) != allowed.end()) return {};
  std::string words;
  for (const Block& block : allowed) words.append(words.empty() ? "" : ", ").append(block_word(block, place.role));
  if (place.role == Role::ds_over_queries && !nvfp4) words.append(", or the whole operand as dq.weights");
  return refuse(field_of(place, "block"), block_word(operand.block, place.role),
                fmt::format("{} for {} here", words, to_string(operand.encoding)));
}

Status check_encoding(const Place& place) {
  if (!is_p(place.role) || place.operand->encoding != Encoding::nvfp4) return {};
  return refuse(field_of(place, "encoding"), "nvfp4",
                "f32, bf16, e4m3, e5m2, e2m3, e3m2, e2m1: P is scaled by powers of two, so that its sum stays exact");
}

Status check_scale(const Place& place) {
  const Operand& operand = *place.operand;
  if (operand.rule == ScaleRule::uos && operand.encoding != Encoding::e2m1) {
    return refuse(field_of(place, "rule"), fmt::format("uos with {}", to_string(operand.encoding)),
                  "floor, ceil; uos with e2m1 only");
  }
  if (operand.second_level == SecondLevel::adaptive && operand.encoding != Encoding::nvfp4) {
    return refuse(field_of(place, "second_level"), fmt::format("adaptive with {}", to_string(operand.encoding)),
                  "fixed; adaptive with nvfp4 only");
  }
  return {};
}

Status check_rounding(const Place& place) {
  if (place.operand->rounding == Rounding::nearest) return {};
  const std::string field = field_of(place, "rounding");
  if (!place.backward) return refuse(field, "stochastic", "nearest in the forward");
  if (is_p(place.role)) return refuse(field, "stochastic", "nearest for P: the backward rebuilds the forward's codes");
  if (!place.operand->quantized()) {
    return refuse(field, fmt::format("stochastic with {}", to_string(place.operand->encoding)),
                  "nearest with an encoding that is not quantized");
  }
  return {};
}

/// What replaces a leaking block must not leak itself.
Status check_cut(const Place& place) {
  if (!place.cut || place.role != Role::tokens || reach_of(*place.operand) == Causality::exact) return {};
  return refuse(field_of(place, "block"), to_string(place.operand->block), "token, or f32 or bf16 as the encoding");
}

Status check_cut_over_queries(const Recipe& recipe) {
  for (const auto& [field, product] : {std::pair{"dv.cut", &recipe.dv}, std::pair{"dk.cut", &recipe.dk}}) {
    if (product->cut) return refuse(field, "a pair", "null: a product over queries needs no cut");
  }
  return {};
}

Status check_row_sum(const Recipe& recipe) {
  if (recipe.row_sum == RowSum::quantized || recipe.purpose == Purpose::negative) return {};
  return refuse("row_sum", "unquantized",
                fmt::format("quantized in a recipe of purpose {}", to_string(recipe.purpose)));
}

Status check_exponential(const Recipe& recipe) {
  if (recipe.exponential == Exponential::exact) return {};
  const bool mitchell = recipe.exponential == Exponential::mitchell;
  const std::string word(names::word_of(names::kExponentials, recipe.exponential));
  if (recipe.purpose != Purpose::inference) {
    return refuse("exponential", word, fmt::format("exact in a recipe of purpose {}", to_string(recipe.purpose)));
  }
  const Encoding needed = mitchell ? Encoding::e2m1 : Encoding::e4m3;
  for (const Place& place : places_of(recipe)) {
    if (place.role != Role::p_over_keys || place.operand->encoding == needed) continue;
    return refuse("exponential",
                  fmt::format("{} with {}.encoding {}", word, place.path, to_string(place.operand->encoding)),
                  fmt::format("{} with {} only", word, to_string(needed)));
  }
  return {};
}

/// f32 stands for "no such product": a backward is there wholly or not at all.
Status check_backward(const Recipe& recipe) {
  const bool wanted =
      recipe.purpose == Purpose::training || (recipe.purpose == Purpose::negative && has_backward(recipe));
  for (const Place& place : places_of(recipe)) {
    if (!place.backward) continue;
    const bool set = place.operand->encoding != Encoding::f32;
    if (set == wanted || (wanted && place.cut)) continue;
    return refuse(
        field_of(place, "encoding"), to_string(place.operand->encoding),
        wanted ? fmt::format("bf16 or a quantized encoding in a {} recipe with a backward", to_string(recipe.purpose))
               : "f32 in a recipe of purpose inference, which has no backward");
  }
  if (!wanted && recipe.dq.cut) return refuse("dq.cut", "a pair", "null in a recipe of purpose inference");
  return {};
}

Status check_claim(std::string_view field, Causality claim, const Reach& reach) {
  if (claim >= reach.level) return {};
  return refuse(field, to_string(claim), fmt::format("{}, as {}", to_string(reach.level), reach.because));
}

Status check_claims(const Recipe& recipe) {
  const Reaches reaches = derive(recipe);
  if (Status status = check_claim("claims.forward", recipe.claims.forward, reaches.forward); !status) return status;
  return check_claim("claims.backward", recipe.claims.backward, reaches.backward);
}

Status check_operands(const Recipe& recipe) {
  for (const Place& place : places_of(recipe)) {
    if (Status status = check_encoding(place); !status) return status;
    if (Status status = check_block(place, recipe); !status) return status;
    if (Status status = check_scale(place); !status) return status;
    if (Status status = check_rounding(place); !status) return status;
    if (Status status = check_cut(place); !status) return status;
  }
  return check_cut_over_queries(recipe);
}

}  // namespace

Status validate(const Recipe& recipe) {
  for (const auto rule : {check_name, check_enumerators, check_range_of_p, check_row_sum, check_exponential,
                          check_backward, check_operands, check_claims}) {
    if (Status status = rule(recipe); !status) return status;
  }
  return {};
}

Claims derive_claims(const Recipe& recipe) {
  const Reaches reaches = derive(recipe);
  return {reaches.forward.level, reaches.backward.level};
}

Status validate_backward(const Recipe& recipe) {
  if (Status status = validate(recipe); !status) return status;
  if (has_backward(recipe)) return {};
  return invalid(fmt::format("recipe {} of purpose {} has no backward; allowed: a recipe of purpose training",
                             names::quoted(recipe.name), to_string(recipe.purpose)));
}

Result<Recipe> with_causality(const Recipe& recipe, Causality level) {
  if (Status status = validate(recipe); !status) return status.error();
  if (level != Causality::exact && level != Causality::block) {
    return invalid(fmt::format("causality is {}; allowed: exact, block", to_string(level)));
  }
  Recipe changed = recipe;
  if (level == Causality::exact) {
    changed.claims.backward = Causality::exact;
    const bool shared = changed.dk.weights == changed.dq.weights;
    if (changed.dq.weights.block == Block::square32()) changed.dq.weights.block = Block::dims32();
    if (changed.dq.cut && changed.dq.cut->weights.block == Block::square32()) {
      changed.dq.cut->weights.block = Block::dims32();
    }
    if (shared) changed.dk.weights = changed.dq.weights;
  }
  const Reach reach = derive(changed).backward;
  if (reach.level > level) {
    return invalid(fmt::format("causality of recipe {} is {}; allowed: {}, as {}", names::quoted(recipe.name),
                               to_string(level), to_string(reach.level), reach.because));
  }
  if (Status status = validate(changed); !status) return status.error();
  return changed;
}

}  // namespace mxflash
