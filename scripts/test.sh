# Sourced by run.sh. The tests: all, those of a change to the core (quick), some (T=...), and what CI adds. Each part leaves
# a JUnit file in build/results.
# shellcheck shell=bash

# --- parts ---------------------------------------------------------------------------------------------------------------

no_gtest() {
  ! has_header gtest/gtest.h && skipped "C++ tests" "no GoogleTest (on Debian: apt-get install libgtest-dev libgmock-dev)"
}

# skipped WHAT WHY: fails where NO_SKIPS is set, as on a machine that should have every tool.
skipped() {
  note "$1 SKIPPED: $2"
  [ -z "${NO_SKIPS:-}" ] || die "NO_SKIPS is set: $1 must not be skipped"
}

# CI sets SECOND_TRY, as its machines are shared and at times half as fast: a test that fails runs once more, but not one
# of a process that crashed, one in which the tests' own helpers found a wrong result, nor one of strangers, who need only one
# chance. The first failure is printed all the same.
second_try=${SECOND_TRY:-}

# How tests say that a process of theirs crashed or a result was wrong; tests/gates/builds.py has the same words.
final='(exit code|ended with|assert) -(4|6|7|8|11)\b|signal (4|6|7|8|11)\b|wrong, first at [0-9]|wrong result of [^{]|wrong output|wrote outside (its|the) |changed its input|has another byte at'

# Half of what they do is to wait, so two more than there are cores run at once. Arguments are ctest's.
run_ctest() {
  ctest --test-dir $cpp -j $((jobs + 2)) ${second_try:+--repeat until-pass:2} --no-tests=error --output-on-failure \
    --output-junit "$results/cpp.xml" "$@" |
    tee "$logs/ctest.log" | awk '
      /^ *Start +[0-9]+: / { next }
      / Test +#[0-9]+: .*(Passed|\*\*\*Skipped) +[0-9.]+ sec$/ { if (++well % 100 == 0) print "    " well " tests"; fflush(); next }
      { print; fflush() }' || return
  if grep -aE "[*]{3}Exception|$final" "$logs/ctest.log"; then
    note "a test crashed or got a wrong result, and may have passed the second time"
    return 1
  fi
}

# run_pytest NAME ARGUMENTS: leaves NAME.xml, and NAME-again.xml if tests ran twice: the second time one after another.
run_pytest() {
  local name=$1 failed=0
  shift
  local pytest=("$py" -m pytest -q --timeout 600 -o cache_dir="$root/build/pytest/$name")
  rm -rf "$root/build/pytest/$name"
  "${pytest[@]}" --junitxml="$results/$name.xml" "$@" || failed=$?
  [ $failed = 1 ] && [ -n "$second_try" ] || return $failed
  # Names of tests have such words, too. Without -q, so that sed can write all of it.
  sed 's/ name="[^"]*"//g' "$results/$name.xml" |
    grep -E "$final|worker .gw[0-9]+. crashed|test_strangers\"[^>]*><failure" >/dev/null && return $failed
  say "Once more, one after another: the tests that failed"
  "${pytest[@]}" --junitxml="$results/$name-again.xml" "$@" -n 0 --last-failed --last-failed-no-failures none
}

# A file's tests stay together, as they share their ranks; tests/conftest.py has the files' order.
in_parallel=(-n "$((jobs < 8 ? jobs : 8))" --dist loadfile)
# Ranks wait for a part of their time, so one more process than there are cores runs tests.
with_ranks=(-n "$((jobs < 8 ? jobs + 1 : 8))" --dist loadfile)

# --- make quick ----------------------------------------------------------------------------------------------------------

# A tenth of the C++ tests and more than half of their time: processes of their own, calls that hang, peers that do not come.
long_tests='^simulated[.]|^net[.]other_ucx|Hang|[.](InterHost)?SetUp(Failure)?[.]|DeviceFaults|DeviceTrial|HierarchicalFailure|StoreBootstrap|Worlds[.]|IntraHostFailure[.]'
long_tests+='|HostProxy[.]Gives|DeviceAlgorithm[.]EveryType'

run_quick() {
  local failed=0
  "$py" tests/gates/run --quick --jobs "$jobs" || failed=1
  no_gtest || { build_cpp_tests && run_ctest -E "$long_tests"; } || failed=1
  return $failed
}

# --- make test T=... -----------------------------------------------------------------------------------------------------

programs=() ctest_regex='' pytest_arguments=()

select_tests() {
  local lines
  lines=$("${PYTHON:-python3}" scripts/select_tests.py "$1") || exit 1
  mapfile -t programs < <(sed -n 's/^program //p' <<<"$lines")
  mapfile -t pytest_arguments < <(sed -n 's/^pytest //p' <<<"$lines")
  ctest_regex=$(sed -n 's/^ctest //p' <<<"$lines")
}

run_selected() {
  local failed=0
  if [ ${#programs[@]} -gt 0 ]; then
    no_gtest || { build_cpp_tests "${programs[@]}" && run_ctest -R "$ctest_regex"; } || failed=1
  fi
  if [ "${pytest_arguments[0]:-}" = "$root/tests/torch" ]; then pytest_arguments+=("${in_parallel[@]}"); fi
  if [ ${#pytest_arguments[@]} -gt 0 ]; then run_pytest selected --durations=5 "${pytest_arguments[@]}" || failed=1; fi
  return $failed
}

# Targets that run Python need an interpreter with torch, and with nvx.
needs_nvx() {
  case $target in quick | wheels) return 1 ;; selected) [ ${#pytest_arguments[@]} -gt 0 ] ;; esac
}

# --- make test -----------------------------------------------------------------------------------------------------------

run_test() {
  local failed=0 began=$SECONDS
  rm -rf "$results" && mkdir -p "$results"
  say "C++ tests"
  no_gtest || { build_cpp_tests && run_ctest; } || failed=1
  note "built and run in $((SECONDS - began)) s"
  say "Python tests"
  run_pytest python tests --ignore=tests/gates --ignore=tests/hosts --ignore=tests/install --ignore=tests/bench -m "not slow" \
    --durations=15 "${with_ranks[@]}" || failed=1
  "$py" scripts/count_tests.py "$results"
  say "make test: $([ $failed = 0 ] && echo "all passed" || echo "FAILED, see above")"
  return $failed
}

# Fresh interpreters, builds from source, commands: apart from `make test`, as a change to csrc seldom concerns them.
run_test_install() { run_pytest python-of-install tests/install tests/bench -m "not slow" --durations=5 "${with_ranks[@]}"; }

# --- what CI adds --------------------------------------------------------------------------------------------------------

# The ranks of tests/torch once more, on two hosts by name: what crosses between them goes over UCX and loopback. In CI half of
# them, as the gates that CI_SHARD concerns.
run_test_two_hosts() {
  if ! "$py" -c "import sys; from nvx._C import build_info; sys.exit(not build_info()['ucx'])"; then
    skipped "two hosts" "this nvx was built without UCX (on Debian: apt-get install libucx-dev)"
    return
  fi
  local failed=0
  NVX_TEST_HALF=${CI_SHARD:+$((CI_SHARD % 2))} NVX_TEST_HOSTS=2 run_pytest python-on-two-hosts tests/torch -m "not slow" --ignore=tests/torch/test_ranks.py \
    --ignore=tests/torch/test_bad_input.py --durations=5 "${in_parallel[@]}" || failed=1
  run_test_rdma || failed=1
  return $failed
}

# Where the machine has an RDMA device, soft RoCE included: the same over each of its active ports. TCP is not allowed, so a
# message that does not go over RDMA is an error.
run_test_rdma() {
  local folder=${RDMA_DEVICES:-/sys/class/infiniband} ports port failed=0
  if [ -z "$(ls -A "$folder" 2>/dev/null)" ]; then
    note "RDMA SKIPPED: no RDMA device here ($folder is empty or absent)"
    return 0
  fi
  ports=$("$py" -c "from nvx._C import network; print(*network()['rdma_ports'])") || return 1
  [ -n "$ports" ] || note "RDMA SKIPPED: no port of $(ls "$folder" | xargs) is active"
  for port in $ports; do
    say "Ranks on two hosts by name, over RDMA on $port"
    NVX_TEST_HOSTS=2 NVX_UCX_TLS=rc,ud,dc NVX_UCX_NET_DEVICES=$port run_pytest "rdma-${port//[:\/]/-}" tests/torch/test_p2p.py \
      tests/torch/test_reduce.py tests/torch/test_ddp.py tests/torch/test_failures.py tests/torch/test_one_sided.py -m "not slow" || failed=1
  done
  return $failed
}

# Each test makes network namespaces of its own, and waits for most of its time.
run_test_hosts() { run_pytest hosts tests/hosts --durations=5 -rs "${in_parallel[@]}"; }

# The frameworks of examples/, pinned, in a venv of their own: they would change the environment's packages. Weekly rather than
# each time: it downloads some gigabytes the first time.
run_test_frameworks() {
  local venv=$root/build/frameworks torch
  torch=$("$py" -c 'import torch; print(torch.__version__)')
  [ -x "$venv/bin/python" ] || "$py" -m venv "$venv" || die "$py cannot make a venv"
  local pip=("$venv/bin/python" -m pip install --disable-pip-version-check -q)
  echo "torch==${torch%%+*}" >"$venv/torch.txt"
  note "installing torch ${torch%%+*} and the packages of tests/frameworks into build/frameworks; log: $logs/frameworks.log"
  { "${pip[@]}" "setuptools<82" wheel cmake ninja numpy "torch==${torch%%+*}" &&
    "${pip[@]}" -c "$venv/torch.txt" --no-build-isolation -r tests/frameworks/requirements.txt &&
    "${pip[@]}" --no-deps -r tests/frameworks/requirements_alone.txt &&
    "${pip[@]}" --no-deps --no-build-isolation --force-reinstall .; } >"$logs/frameworks.log" 2>&1 ||
    { tail -n 20 "$logs/frameworks.log" >&2; die "the frameworks could not be installed"; }
  env -u PYTHONPATH PATH="$venv/bin:$PATH" "$venv/bin/python" -m pytest -q -s -o junit_family=xunit1 --junitxml="$results/frameworks.xml" \
    --durations=0 -rs tests/frameworks
}

run_test_slow() {
  run_pytest slow tests -m slow --ignore=tests/gates --ignore=tests/hosts --ignore=tests/frameworks --timeout 900 --durations=5 -rs \
    "${in_parallel[@]}"
}
