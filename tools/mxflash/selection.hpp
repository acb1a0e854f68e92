// The engines that a verb computes with: `auto` may choose another one for the backward than for the forward.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "mxflash/attention.hpp"

namespace mxflash::tool {

/// By name.
struct Selection {
  std::string forward;
  std::string backward;  ///< Empty: no backward is computed.
};

/// Refuses what the engine asked for cannot run, before anything is computed.
Result<Selection> select_engines(const Options& options, const Recipe& recipe, bool backward);
/// {"name": the forward's, "backward": the backward's or null}
nlohmann::ordered_json selection_json(const Selection& selection);
/// One name where both are the same.
std::string describe(const Selection& selection);

}  // namespace mxflash::tool
