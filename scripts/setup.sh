#!/usr/bin/env bash
# Installs on Debian 12 what is missing, as root or through sudo: "setup.sh" what building and running needs,
# "setup.sh dev" also what the tests, the linters and the fuzzers need, "setup.sh neon" what building for AArch64 and
# running its tests needs, and nothing else, "setup.sh gpu" what building the CUDA engine and its tests needs, the
# compiler included. Debian's release fixes the major versions.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(make g++ cmake ninja-build libfmt-dev nlohmann-json3-dev libcli11-dev libthread-pool-dev libhwy-dev python3-dev
  python3-venv)
requirements=(requirements.txt)
arm64=()
case "${1:-}" in
  "") ;;
  dev)
    packages+=(libgtest-dev libgmock-dev gcovr clang-19 clang-tidy-19 clang-format-19 libclang-rt-19-dev shellcheck)
    requirements+=(requirements-dev.txt requirements-python.txt)
    ;;
  neon)
    packages=(make cmake ninja-build g++-aarch64-linux-gnu qemu-user)
    requirements=()
    arm64=(libfmt-dev libfmt9 libhwy-dev libhwy1 libgtest-dev libgmock-dev libthread-pool-dev nlohmann-json3-dev)
    ;;
  gpu)
    packages+=(libgtest-dev libgmock-dev)
    requirements+=(requirements-dev.txt requirements-gpu.txt)
    ;;
  *)
    echo "setup.sh: argument '$1' given; allowed: none, dev, neon, or gpu" >&2
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

# Unpacked, not installed: libthread-pool-dev for arm64 would replace this machine's, and a second architecture would
# bring a second libc that holds back its upgrades. Apt keeps its lists in here as well, so that nothing else changes.
sysroot=.sysroot-arm64
if ((${#arm64[@]})) && [[ $(cat "$sysroot/packages" 2>/dev/null) != "${arm64[*]}" ]]; then
  echo "setup: unpacking ${arm64[*]} into $sysroot"
  rm -rf "$sysroot"
  mkdir -p "$sysroot"/apt/{debs,state/lists/partial,cache/archives/partial}
  touch "$sysroot/apt/status"
  apt_options=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Acquire::Languages=none
    -o Acquire::Retries=3 -o APT::Sandbox::User=root -o Dir::State="$PWD/$sysroot/apt/state"
    -o Dir::State::status="$PWD/$sysroot/apt/status" -o Dir::Cache="$PWD/$sysroot/apt/cache")
  apt-get "${apt_options[@]}" update
  (cd "$sysroot/apt/debs" && apt-get "${apt_options[@]}" download "${arm64[@]}")
  for deb in "$sysroot"/apt/debs/*.deb; do dpkg-deb --extract "$deb" "$sysroot"; done
  rm -rf "$sysroot/apt"
  echo "${arm64[*]}" >"$sysroot/packages"
fi

((${#requirements[@]})) || exit 0
# A virtual environment that was moved, or that another Python left behind, does not run: make it anew.
.venv/bin/python -c '' 2>/dev/null || /usr/bin/python3 -m venv --clear .venv
for file in "${requirements[@]}"; do
  if ! cmp --silent "$file" ".venv/$file"; then
    echo "setup: installing $file into .venv"
    deps=(--no-deps)
    [[ $file != requirements-python.txt ]] || deps=()
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --retries 3 "${deps[@]}" --requirement "$file"
    cp "$file" ".venv/$file"
  fi
done

# The wheels have lib/ alone, and nvcc looks for its runtime in lib64/.
for toolkit in .venv/lib/python3.*/site-packages/nvidia/cu13; do
  [[ ! -d $toolkit/lib || -e $toolkit/lib64 ]] || ln -s lib "$toolkit/lib64"
done
