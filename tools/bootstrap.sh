# Sourced by ./run and ./test: brings a fresh machine to a built tree, and does nothing on one that is ready.
#
#   bootstrap release run      packages, configuration and build of the command in the preset `release`
#   bootstrap release test     the same for everything: tests, benchmarks and examples too
#
# Debian 12/13 and Ubuntu 24.04. A LibTorch that is already there is used instead of the packaged one:
# Torch_DIR, CMAKE_PREFIX_PATH, or that of an importable Python torch.

# Package names of what the build needs. LibTorch and what must match it are listed separately, because another LibTorch may
# already be there.
penstock_tools="g++ cmake ninja-build ccache mold"
penstock_libraries="libcli11-dev libspdlog-dev libfmt-dev nlohmann-json3-dev libtomlplusplus-dev libboost-graph-dev
  libxxhash-dev libucx-dev"
penstock_torch="libtorch-dev libgloo-dev libopenblas0-openmp"
penstock_test_packages="clang-format-14 doxygen libgtest-dev libgmock-dev librapidcheck-dev libbenchmark-dev openmpi-bin"

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 2; }

# Whether a LibTorch other than the distribution's is at hand.
own_torch() {
  [ -n "${Torch_DIR:-}" ] && [ -e "$Torch_DIR/TorchConfig.cmake" ] && return 0
  local prefix
  local IFS=':;'
  for prefix in ${CMAKE_PREFIX_PATH:-}; do
    [ -e "$prefix/share/cmake/Torch/TorchConfig.cmake" ] && return 0
    [ -e "$prefix/lib/cmake/Torch/TorchConfig.cmake" ] && return 0
    [ -e "$prefix/Torch/TorchConfig.cmake" ] && return 0
  done
  command -v python3 >/dev/null || return 1
  local folder
  folder=$(python3 -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')" 2>/dev/null) || return 1
  [ -n "$folder" ] && [ -e "$folder/share/cmake/Torch/TorchConfig.cmake" ]
}

missing_packages() {
  local wanted="$penstock_tools $penstock_libraries" package
  own_torch || wanted="$wanted $penstock_torch"
  [ "$1" = run ] || wanted="$wanted $penstock_test_packages"
  for package in $wanted; do
    dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || printf '%s ' "$package"
  done
}

install_packages() {
  command -v dpkg-query >/dev/null || { say "not a Debian-like system: using the compilers and libraries that are there"; return 0; }
  local missing
  missing=$(missing_packages "$1")
  [ -n "$missing" ] || return 0
  local command="apt-get install -y --no-install-recommends $missing"
  if [ "$(id -u)" -ne 0 ]; then
    printf 'These packages are missing. Run this once, then try again:\n\n  sudo sh -c "apt-get update && %s"\n\n' "$command" >&2
    exit 2
  fi
  say "installing: $missing"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q >&2 || say "the package lists could not be refreshed; trying with those that are here"
  # One package that this release does not have must not keep the others away: the build says what it goes without.
  local available="" package
  for package in $missing; do
    if apt-cache show "$package" >/dev/null 2>&1; then available="$available $package"; else say "no package $package in this release: going on without"; fi
  done
  apt-get install -y -q --no-install-recommends $available >&2 || die "installing failed; see above"
}

# Configures once for each kind (run, test); CMake itself notices changed CMakeLists on later builds.
configure() {
  local preset=$1 kind=$2 folder="$root/build/$1"
  [ -e "$folder/build.ninja" ] && [ -e "$folder/.configured-for-$kind" ] && return 0
  install_packages "$kind"
  command -v cmake >/dev/null && command -v ninja >/dev/null || die "cmake and ninja are needed and not found; install them and try again"
  say "configuring $folder"
  # A half-written folder of an earlier, interrupted try would be taken for a good one.
  cmake --preset "$preset" >&2 || { rm -f "$folder/build.ninja"; die "configuring failed; see above"; }
  touch "$folder/.configured-for-run" "$folder/.configured-for-$kind"
}

build() {
  local folder="$root/build/$1" kind=$2 cores
  local target=all what="everything" minutes=34
  [ "$kind" = run ] && target=penstock what="the library and the command" minutes=11
  # A no-op build is silent; a real one shows its progress.
  if ! ninja -C "$folder" -n "$target" 2>/dev/null | grep -q 'no work to do'; then
    cores=$(nproc 2>/dev/null || echo 1)
    say "building $what in $folder: a first build takes about $(((minutes + cores - 1) / cores)) minutes on $cores cores"
    NINJA_STATUS='[%p, %e s] ' cmake --build "$folder" --target "$target" >&2 || die "the build failed; see above"
  fi
}

bootstrap() {
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  cd "$root" || exit 2
  configure "$1" "${2:-test}"
  build "$1" "${2:-test}"
}
