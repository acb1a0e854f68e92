#!/usr/bin/env bash
# Installs on Debian 12 what is missing, as root or through sudo: "setup.sh" what building and running needs,
# "setup.sh dev" also what the tests, the linters and the fuzzers need. Debian's release fixes the major versions.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(make g++ cmake ninja-build libfmt-dev nlohmann-json3-dev libcli11-dev libthread-pool-dev libhwy-dev python3-venv)
requirements=(requirements.txt)
case "${1:-}" in
  "") ;;
  dev)
    packages+=(libgtest-dev libgmock-dev gcovr clang-19 clang-tidy-19 clang-format-19 libclang-rt-19-dev shellcheck)
    requirements+=(requirements-dev.txt)
    ;;
  *)
    echo "setup.sh: argument '$1' given; allowed: none, or dev" >&2
    exit 2
    ;;
esac

as_root() {
  if [[ $EUID -eq 0 ]]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    echo "setup.sh: neither root nor sudo; have an administrator run: apt-get install ${missing[*]}" >&2
    exit 1
  fi
}

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done
if ((${#missing[@]})); then
  echo "setup: installing ${missing[*]}"
  apt_options=(-qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -o Dpkg::Use-Pty=0)
  as_root apt-get "${apt_options[@]}" update
  as_root env DEBIAN_FRONTEND=noninteractive apt-get "${apt_options[@]}" install -y --no-install-recommends \
    "${missing[@]}" </dev/null
fi

# A virtual environment that was moved, or that another Python left behind, does not run: make it anew.
.venv/bin/python -c '' 2>/dev/null || /usr/bin/python3 -m venv --clear .venv
for file in "${requirements[@]}"; do
  if ! cmp --silent "$file" ".venv/$file"; then
    echo "setup: installing $file into .venv"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --retries 3 --no-deps --requirement "$file"
    cp "$file" ".venv/$file"
  fi
done
