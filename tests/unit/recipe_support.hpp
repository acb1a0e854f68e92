// Recipes to change, and what a refusal has to name.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>

#include "mxflash/recipe.hpp"

namespace mxflash::test {

inline Recipe shipped(std::string_view name) {
  const Result<Recipe> recipe = find_recipe(name);
  if (!recipe) ADD_FAILURE() << recipe.error().message;
  return recipe ? *recipe : Recipe{};
}

inline void expect_words(const Error& error, std::initializer_list<std::string_view> words) {
  EXPECT_EQ(error.kind, ErrorKind::invalid_argument);
  EXPECT_EQ(error.message.find('\n'), std::string::npos) << error.message;
  for (const std::string_view word : words) {
    EXPECT_NE(error.message.find(word), std::string::npos) << "no \"" << word << "\" in: " << error.message;
  }
}

inline void expect_refused(const Recipe& recipe, std::initializer_list<std::string_view> words) {
  const Status status = validate(recipe);
  ASSERT_FALSE(status.ok()) << "accepted, though it should name " << *words.begin();
  expect_words(status.error(), words);
}

inline void expect_accepted(const Recipe& recipe) {
  const Status status = validate(recipe);
  EXPECT_TRUE(status.ok()) << status.error().message;
}

/// The shipped recipe after a change.
inline Recipe changed(std::string_view name, const std::function<void(Recipe&)>& change) {
  Recipe recipe = shipped(name);
  change(recipe);
  return recipe;
}

}  // namespace mxflash::test
