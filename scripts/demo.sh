#!/usr/bin/env bash
# The main job on real gradients: every training recipe, forward and backward, against float64; the causality audit of
# every recipe; one table and one HTML report, in demo/.
set -euo pipefail
cd "$(dirname "$0")/.."
mxflash=build/release/tools/mxflash/mxflash
capture=examples/gpt_small_l3.safetensors
out=demo
probes=${MXFLASH_DEMO_PROBES:-24} # A recipe: few, so that all of them take a minute; `mxflash audit` alone makes 64.

mkdir -p "$out"
rm -f "$out"/*.json "$out/report.html"
"$mxflash" recipes --json "$out/recipes.json" >/dev/null
mapfile -t recipes < <(python3 scripts/demo_table.py names "$out/recipes.json")
for recipe in "${recipes[@]}"; do
  echo "demo: mxflash run $capture --recipe $recipe --check"
  "$mxflash" run "$capture" --recipe "$recipe" --check --json "$out/run-$recipe.json" >"$out/run-$recipe.log"
done
echo "demo: mxflash audit $capture --recipe all"
verdict=0
"$mxflash" audit "$capture" --recipe all --probes "$probes" --json "$out/audit.json" >"$out/audit.log" || verdict=$?
[[ $verdict -le 1 ]] || exit "$verdict"
results=("${recipes[@]/#/$out/run-}")
"$mxflash" report "${results[@]/%/.json}" "$out/audit.json" --out "$out/report.html"
python3 scripts/demo_table.py table "$out" "${recipes[@]}"
echo "demo: plots in $out/report.html"
exit "$verdict"
