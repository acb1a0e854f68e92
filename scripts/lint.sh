#!/usr/bin/env bash
# Formatters and linters over every file of their language: no exemptions. "lint.sh fix" formats instead of checking.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:-check}
jobs=$(nproc)
tidy=${TIDY:-src|tools|python|tests|bench|examples} # The folders that clang-tidy reads.

files() { # files <folder>... -- <name>...: sorted, null-terminated
  local folders=() names=()
  while [[ $1 != -- ]]; do
    [[ ! -e $1 ]] || folders+=("$1")
    shift
  done
  shift
  names=(-name "$1")
  for name in "${@:2}"; do names+=(-o -name "$name"); done
  find "${folders[@]}" -type f \( "${names[@]}" \) -print0 | sort --zero-terminated
}
mapfile -d '' cpp < <(files include src tools python tests bench examples -- '*.cpp' '*.hpp' '*.cu' '*.cuh')
mapfile -d '' cmake < <(files CMakeLists.txt cmake src tools python tests bench examples -- CMakeLists.txt '*.cmake')
mapfile -d '' python < <(files python scripts tests examples bench -- '*.py')
mapfile -d '' shell < <(files scripts tests .ci -- '*.sh' run)
echo "lint: ${#cpp[@]} C++ and CUDA, ${#cmake[@]} CMake, ${#python[@]} Python and ${#shell[@]} shell files"
if [[ $mode == fix ]]; then
  clang-format-19 -i "${cpp[@]}"
  .venv/bin/gersemi --in-place "${cmake[@]}"
  .venv/bin/ruff check --quiet --fix "${python[@]}"
  .venv/bin/ruff format --quiet "${python[@]}"
  exit 0
fi
clang-format-19 --dry-run -Werror "${cpp[@]}"
.venv/bin/gersemi --check "${cmake[@]}"
.venv/bin/ruff check --quiet "${python[@]}"
.venv/bin/ruff format --check --quiet "${python[@]}"
shellcheck "${shell[@]}"

cmake --preset tidy >/dev/null
log=build/tidy/clang-tidy.log
echo "lint: clang-tidy over build/tidy/compile_commands.json"
if ! run-clang-tidy-19 -quiet -p build/tidy -j "$jobs" "^$PWD/($tidy)/.*" >"$log" 2>&1; then
  grep -vE '^(\[ *[0-9]+/[0-9]+\]|clang-tidy-19|[0-9]+ warnings? (generated|treated))|^$' "$log" >&2
  exit 1
fi
checked=$(grep -c '^\[.*clang-tidy-19' "$log" || true)
((checked > 0)) || { echo "lint: clang-tidy checked no file" >&2; exit 1; }
echo "lint: clean ($checked sources through clang-tidy)"
