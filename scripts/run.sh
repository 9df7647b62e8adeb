#!/usr/bin/env bash
# scripts/run.sh TARGET, with a target of the Makefile, which calls it. Its pieces: system.sh and python.sh find or install
# what the target needs, build.sh builds it, test.sh has the tests. T=... selects tests of `make test`: select_tests.py.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
targets="demo quick test test-install test-two-hosts test-rdma test-hosts test-slow test-frameworks check bench conformance wheels"
target=${1:?usage: scripts/run.sh TARGET, one of: $targets}
jobs=${MAX_JOBS:-$(nproc)}
logs=$root/build/logs results=$root/build/results

if [ -t 1 ]; then bold=$'\033[1m' plain=$'\033[0m'; else bold='' plain=''; fi
say() { printf '%s==>%s %s\n' "$bold" "$plain" "$*"; }
note() { printf '    %s\n' "$*"; }
die() { printf 'nvx: %s\n' "$*" >&2; exit 1; }
has() { command -v "$1" >/dev/null 2>&1; }

case " $targets " in
  *" $target "*) ;;
  *) die "no target $target: one of $targets" ;;
esac
mkdir -p "$logs" "$results"

# shellcheck source=scripts/system.sh
source scripts/system.sh
# shellcheck source=scripts/python.sh
source scripts/python.sh
# shellcheck source=scripts/build.sh
source scripts/build.sh
# shellcheck source=scripts/test.sh
source scripts/test.sh

run_demo() { "$py" -m nvx demo; }
run_bench() { "$py" -m nvx.bench all_reduce -n 2 -b 8 -e 64M -f 2 --vs gloo; }
run_check() { "$py" tests/gates/run --install --jobs "$jobs"; }
run_wheels() { "$py" scripts/wheels.py; }
run_conformance() {
  local failed=0
  "$py" -m tests.conformance --quiet --floor bench/results/conformance.json --junit "$results/conformance.xml" || failed=1
  "$py" -m tests.conformance --quiet --served --junit "$results/conformance-served.xml" || failed=1
  return $failed
}

if [ "$target" = test ] && [ -n "${T:-}" ]; then
  target=selected
  select_tests "$T"
fi
say "Finding compilers and Python"
system_step
if needs_nvx; then python_step; else interpreter_step; fi
if needs_nvx && [ "$target" != check ]; then
  say "Building nvx"
  build_module
fi
say "make ${*}${T:+ T=$T}"
"run_${target//-/_}"
