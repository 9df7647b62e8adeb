#!/usr/bin/env bash
# scripts/run.sh demo|test|test-hosts|test-slow|check|bench|conformance: finds or installs what the target needs, builds nvx, runs it. The Makefile calls it.
#
# The active environment is used where it has a torch that nvx serves, and is left as it is: nvx and the test tools go to
# build/site. Otherwise .venv is made, and everything goes there. As root on Debian or Ubuntu, missing system packages are
# installed; elsewhere they are named, and what can run without them does.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
target=${1:?usage: scripts/run.sh demo|test|test-hosts|test-slow|check|bench|conformance}
jobs=${MAX_JOBS:-$(nproc)}
logs=$root/build/logs

if [ -t 1 ]; then bold=$'\033[1m' plain=$'\033[0m'; else bold='' plain=''; fi
say() { printf '%s==>%s %s\n' "$bold" "$plain" "$*"; }
note() { printf '    %s\n' "$*"; }
die() { printf 'nvx: %s\n' "$*" >&2; exit 1; }

has() { command -v "$1" >/dev/null 2>&1; }

case $target in
  demo | test | test-hosts | test-slow | check | bench | conformance) ;;
  *) die "no target $target: demo, test, test-hosts, test-slow, check, bench or conformance" ;;
esac
mkdir -p "$logs" "$root/build/results"

# --- the system ----------------------------------------------------------------------------------------------------------

# Prints the Debian packages of what is not there. $1 is the target.
missing_packages() {
  has g++ || has "${CXX:-c++}" || echo g++
  has ccache || echo ccache
  has cmake || echo cmake
  has ninja || echo ninja-build
  has_header ucp/api/ucp.h || echo libucx-dev
  if [ "$1" = test-hosts ]; then has ip || echo iproute2; fi
  [ "$1" = test ] || return 0
  has_header gtest/gtest.h || echo libgtest-dev
  has_header gmock/gmock.h || echo libgmock-dev
}

has_header() { has g++ && echo "#include <$1>" | g++ -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; }

install_packages() {
  local log=$logs/apt.log
  note "apt-get install $*"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update && apt-get install -y "$@"; } >"$log" 2>&1 || note "apt-get failed, see $log; going on without"
}

system_step() {
  local missing
  missing=$(missing_packages "$target" | xargs)
  if [ -z "$missing" ]; then
    note "compiler and tools: all there"
  elif [ "$(id -u)" = 0 ] && has apt-get; then
    install_packages $missing
  else
    note "not here: $missing"
    note "on Debian or Ubuntu: apt-get install $missing"
  fi
}

# --- Python ----------------------------------------------------------------------------------------------------------------

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

# Prints the version of the interpreter's torch if nvx serves it.
served_torch() {
  local facts minor
  facts=$("$1" cmake/find_torch.py 2>/dev/null) || return 1
  minor=$(cut -d';' -f3 <<<"$facts")
  case $minor in
    2.1[1-5]) cut -d';' -f2 <<<"$facts" ;;
    *) note "$1 has torch $minor; nvx serves 2.11 to 2.15" >&2; return 1 ;;
  esac
}

choose_python() {
  local python version
  for python in ${PYTHON:-}; do has "$python" || die "PYTHON=$PYTHON: there is no $python"; done
  for python in ${PYTHON:-python3 python}; do
    if has "$python" && is_recent "$python" && version=$(served_torch "$python"); then
      py=$(command -v "$python")
      site=$root/build/site
      note "torch $version of the active environment ($py); nvx goes to build/site, the environment stays as it is"
      return
    fi
  done
  py=$root/.venv/bin/python
  site=
  if [ ! -x "$py" ]; then make_venv; fi
  if ! version=$(served_torch "$py"); then
    version=${TORCH_VERSION:-2.13.0}
    note "installing torch $version into .venv (without a CPU-only index this can be some gigabytes)"
    "$py" -m pip install "torch==$version" || die "torch $version could not be installed into .venv"
  fi
  note "torch $version in .venv"
}

make_venv() {
  local python
  for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python3.14}; do
    if has "$python" && is_recent "$python"; then
      note "no active torch: making .venv with $(command -v "$python")"
      if ! "$python" -m venv .venv >"$logs/venv.log" 2>&1; then
        rm -rf .venv
        [ "$(id -u)" = 0 ] && has apt-get || die "$python cannot make a venv (on Debian: apt-get install python3-venv)"
        install_packages python3-venv
        "$python" -m venv .venv >>"$logs/venv.log" 2>&1 || die "$python cannot make a venv, see $logs/venv.log"
      fi
      return
    fi
  done
  die "Python 3.10 or newer is needed, with or without torch"
}

# pip, into .venv or build/site.
add() {
  local where=()
  [ -z "$site" ] || where=(--target "$site" --upgrade)
  if "$py" -m pip --version >/dev/null 2>&1; then
    "$py" -m pip install --disable-pip-version-check "${where[@]}" "$@"
  elif has uv; then
    uv pip install --python "$py" "${where[@]}" "$@"
  else
    die "$py has no pip"
  fi
}

# add_missing module=package ...: the packages whose module cannot be imported.
add_missing() {
  local pair wanted=()
  for pair in "$@"; do
    "$py" -c "import importlib.util as u, sys; sys.exit(u.find_spec('${pair%%=*}') is None)" || wanted+=("${pair#*=}")
  done
  [ ${#wanted[@]} -gt 0 ] || return 0
  note "pip install ${wanted[*]}"
  add -q "${wanted[@]}" >"$logs/pip.log" 2>&1 || { cat "$logs/pip.log"; die "pip could not install ${wanted[*]}"; }
}

python_step() {
  choose_python
  if [ -n "$site" ]; then
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$PATH
  else
    export PATH=$root/.venv/bin:$PATH
  fi
  add_missing setuptools=setuptools wheel=wheel
  has cmake || add_missing cmake=cmake
  has ninja || add_missing ninja=ninja
  local include
  include=$("$py" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  if [ ! -e "$include/Python.h" ]; then
    [ "$(id -u)" = 0 ] && has apt-get || die "Python.h is missing (on Debian: apt-get install python3-dev)"
    install_packages python3-dev
  fi
  case $target in
    demo | bench) [ -n "$site" ] || add_missing numpy=numpy ;;  # without it torch warns, in every rank
    test | test-hosts | test-slow | conformance) add_missing expecttest=expecttest pytest=pytest pytest_timeout=pytest-timeout hypothesis=hypothesis numpy=numpy psutil=psutil ;;
  esac
  case $target in test | test-hosts) add_second_ucx ;; esac
}

# What is tested beside the system's UCX. Its tests say aloud that they are skipped where it cannot be had.
add_second_ucx() {
  if ! "$py" -c "import importlib.util as u, sys; sys.exit(u.find_spec('libucx') is None)"; then
    add -q --retries 1 --timeout 20 libucx-cu13 >"$logs/ucx.log" 2>&1 || note "pip could not install libucx-cu13, see $logs/ucx.log; going on without"
  fi
}

# --- nvx -----------------------------------------------------------------------------------------------------------------

build_step() {
  local stamp=$root/build/built-by-run began=$SECONDS
  local identity="$py $site $("$py" cmake/find_torch.py) ${CMAKE_ARGS:-} ${CMAKE_BUILD_TYPE:-}"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$identity" ] && [ -z "$(find csrc cmake python setup.py pyproject.toml CMakeLists.txt \
      -newer "$stamp" -type f ! -name '*.pyc' ! -path '*.egg-info/*' -print -quit)" ]; then
    note "up to date"
    return
  fi
  has "${CXX:-c++}" || has g++ || die "a C++20 compiler is needed to build nvx (on Debian: apt-get install g++)"
  rm -f "$stamp"
  [ -z "$site" ] || rm -rf "$site"/nvx "$site"/nvx-*.dist-info
  if ! add -v --no-deps --no-build-isolation --force-reinstall . 2>&1 | tee "$logs/build.log" |
      grep --line-buffered -oE '(\[[0-9]+/[0-9]+\] .*|-- nvx: .*|.*(error|FAILED): .*)' | sed -u 's/^/    /'; then
    tail -n 40 "$logs/build.log" >&2
    die "nvx did not build; all of it is in $logs/build.log"
  fi
  echo "$identity" >"$stamp"
  note "built in $((SECONDS - began)) s"
}

# --- the targets -----------------------------------------------------------------------------------------------------------

run_demo() { "$py" -m nvx.demo; }

run_bench() { "$py" -m nvx.bench all_reduce -n 2 -b 8 -e 64M -f 2 --vs gloo; }

run_check() { "$py" tests/gates/run --install --jobs "$jobs"; }

run_conformance() { "$py" -m tests.conformance --quiet --junit "$root/build/results/conformance.xml"; }

# The ranks of tests/torch once more, on two hosts by name: what crosses between them goes over UCX and loopback.
run_python_tests_on_two_hosts() {
  if ! "$py" -c "import sys; from nvx._C import build_info; sys.exit(not build_info()['ucx'])"; then
    note "SKIPPED: this nvx was built without UCX (on Debian: apt-get install libucx-dev)"
    return 0
  fi
  NVX_TEST_HOSTS=2 "$py" -m pytest tests/torch -m "not slow" --ignore=tests/torch/test_ranks.py --timeout 600 \
    --junitxml="$root/build/results/python-on-two-hosts.xml" -q
}

# Half of what they do is to wait, so one more than there are cores runs at once.
run_cpp_tests() {
  if ! has_header gtest/gtest.h; then
    note "C++ tests SKIPPED: no GoogleTest (on Debian: apt-get install libgtest-dev libgmock-dev)"
    return 0
  fi
  local generator=()
  if has ninja; then generator=(-G Ninja); fi
  local folder=build/make/cpp  # as deep as setup.py's folder and the gates': so ccache knows their objects again
  # shellcheck disable=SC2086
  cmake -S . -B $folder "${generator[@]}" -DNVX_TESTS=ON -DNVX_PYTHON=OFF -DPython_EXECUTABLE="$py" ${CMAKE_ARGS:-} >"$logs/cmake.log" 2>&1 ||
    { cat "$logs/cmake.log"; return 1; }
  cmake --build $folder --parallel "$jobs" && ctest --test-dir $folder -j $((jobs + 1)) --output-on-failure \
    --output-junit "$root/build/results/cpp.xml" | tee "$logs/ctest.log" | awk '
      /^ *Start +[0-9]+: / { next }
      / Test +#[0-9]+: .*(Passed|\*\*\*Skipped) +[0-9.]+ sec$/ { if (++well % 100 == 0) print "    " well " tests"; fflush(); next }
      { print; fflush() }'
}

# Ranks wait for each other half of their time, so the tests of commands, builds and the bench run beside them.
run_python_tests() {
  local failed=0 usual=(-m "not slow" --timeout 600 -q)
  "$py" -m pytest tests --ignore=tests/torch --ignore=tests/gates --ignore=tests/hosts "${usual[@]}" --durations=5 \
    --junitxml="$root/build/results/commands.xml" >"$logs/commands.log" 2>&1 &
  beside=$!
  trap 'kill $beside 2>/dev/null' EXIT
  "$py" -m pytest tests/torch "${usual[@]}" --durations=10 --junitxml="$root/build/results/python.xml" || failed=1
  say "Python tests: commands, builds, the bench"
  wait $beside || failed=1
  trap - EXIT
  cat "$logs/commands.log"
  return $failed
}

run_test_slow() {
  "$py" -m pytest tests -m slow --ignore=tests/gates --ignore=tests/hosts --timeout 900 --durations=5 --junitxml="$root/build/results/slow.xml" -q -rs
}

run_test_hosts() {
  "$py" -m pytest tests/hosts --timeout 600 --durations=5 --junitxml="$root/build/results/hosts.xml" -q -rs
}

run_test() {
  local failed=0
  rm -rf build/results && mkdir -p build/results
  say "C++ tests"
  run_cpp_tests || failed=1
  say "Python tests: ranks"
  run_python_tests || failed=1
  say "Python tests, ranks on two hosts by name"
  run_python_tests_on_two_hosts || failed=1
  "$py" scripts/count_tests.py build/results
  say "make test: $([ $failed = 0 ] && echo "all passed" || echo "FAILED, see above")"
  return $failed
}

say "What is here"
system_step
python_step
if [ "$target" != check ]; then
  say "Building nvx"
  build_step
fi
say "make $target"
"run_${target//-/_}"
