"""Recipes and engines: what there is, as data."""

import json
import os
from pathlib import Path
from typing import Any

from mxflash import _native


def recipes() -> dict[str, dict[str, Any]]:
    """The catalogue by name. An entry is data: change a copy and give it as `recipe=` for one of your own."""
    return {entry["name"]: entry for entry in json.loads(_native.recipes())}


def engines() -> list[dict[str, Any]]:
    """The engines, best first: name, description, available, reason (when not), and which recipes each runs: by name,
    whether it runs, the reason (when not), and the same of its backward."""
    return [
        {**engine, "recipes": {entry.pop("name"): entry for entry in engine["recipes"]}}
        for engine in json.loads(_native.engines())
    ]


def recipe(given: Any) -> dict[str, Any]:
    """A recipe by name, from a dictionary or from a JSON file, checked; ValueError names the broken rule."""
    return json.loads(_native.recipe(recipe_text(given)))


def recipe_text(given: Any) -> str:
    """What the compiled part reads: a name, or JSON; JSON text stays what it is."""
    if isinstance(given, dict):
        try:
            return json.dumps(given)
        except TypeError as error:
            raise ValueError(f"recipe: {error}; what JSON has allowed") from None
    if isinstance(given, str) and (given.startswith("{") or not given.endswith(".json")):
        return given
    if isinstance(given, str | os.PathLike):
        return Path(given).read_text(encoding="utf-8").strip()
    raise ValueError(f"recipe: a {type(given).__name__} given, a name, a dictionary or a path allowed")
