#!/usr/bin/env bash
# fuzz.sh SECONDS: every fuzzer of build/tidy from its kept corpus; new inputs stay in build/fuzz/<name>.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:?seconds for each fuzzer}
ran=0
for fuzzer in build/tidy/tests/fuzz/*_fuzz; do
  [[ -x $fuzzer ]] || continue
  name=$(basename "$fuzzer" _fuzz)
  work=build/fuzz/$name
  mkdir -p "$work" "build/fuzz/crashes"
  options=(-max_total_time="$seconds" -max_len=4096 -rss_limit_mb=2048 -print_final_stats=1 -verbosity=0
    -artifact_prefix="build/fuzz/crashes/$name-")
  [[ ! -f tests/fuzz/$name.dict ]] || options+=(-dict="tests/fuzz/$name.dict")
  echo "fuzz: $name for $seconds s"
  "$fuzzer" "${options[@]}" "$work" "tests/fuzz/corpus/$name"
  ran=$((ran + 1))
done
((ran > 0)) || { echo "fuzz: no fuzzer in build/tidy/tests/fuzz" >&2; exit 1; }
echo "fuzz: $ran fuzzers, no finding"
