# Sourced by run.sh. The system packages that the target needs: as root on Debian or Ubuntu those that are missing are
# installed; elsewhere they are named, and what can run without them does.
# shellcheck shell=bash

# By the compiler that CMake takes; CXX may be several words.
# shellcheck disable=SC2086
has_header() { echo "#include <$1>" | ${CXX:-$(command -v c++ || echo g++)} -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; }

# Prints the Debian packages of what is not there.
missing_packages() {
  has g++ || has "${CXX:-c++}" || echo g++
  has ccache || echo ccache
  has cmake || echo cmake
  has ninja || echo ninja-build
  has_header ucp/api/ucp.h || echo libucx-dev
  if [ "$target" = test-hosts ]; then has ip || echo iproute2; fi
  if [ "$target" = quick ]; then
    has clang-format-14 || echo clang-format-14
    has ctags || echo universal-ctags
    has shellcheck || echo shellcheck
  fi
  case $target in
    quick | test | selected)
      has_header gtest/gtest.h || echo libgtest-dev
      has_header gmock/gmock.h || echo libgmock-dev ;;
  esac
}

can_install() { [ "$(id -u)" = 0 ] && has apt-get; }

install_packages() {
  local log=$logs/apt.log
  note "apt-get install $*"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update && apt-get install -y "$@"; } >"$log" 2>&1 || note "apt-get failed, see $log; going on without"
}

system_step() {
  local missing
  mapfile -t missing < <(missing_packages)
  if [ ${#missing[@]} = 0 ]; then
    note "compiler and tools: all there"
  elif can_install; then
    install_packages "${missing[@]}"
  else
    note "not here: ${missing[*]}"
    note "on Debian or Ubuntu: apt-get install ${missing[*]}"
  fi
}
