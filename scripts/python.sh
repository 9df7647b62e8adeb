# Sourced by run.sh. Finds the interpreter, $py, and gives it what the target needs.
#
# The active environment is used where it has a torch that nvx serves, and is left as it is: nvx and the test tools go to
# build/site ($site). Otherwise .venv is made, and everything goes there.
# shellcheck shell=bash

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

# For what needs no torch: the interpreter that is active.
interpreter_step() {
  local python
  for python in ${PYTHON:-python3 python}; do
    if has "$python" && is_recent "$python"; then py=$(command -v "$python") site=; return; fi
  done
  die "Python 3.10 or newer is needed${PYTHON:+, and PYTHON=$PYTHON is none}"
}

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
        can_install || die "$python cannot make a venv (on Debian: apt-get install python3-venv)"
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

has_module() { "$py" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)"; }

# add_missing module=package ...: the packages whose module cannot be imported.
add_missing() {
  local pair wanted=()
  for pair in "$@"; do
    has_module "${pair%%=*}" || wanted+=("${pair#*=}")
  done
  [ ${#wanted[@]} -gt 0 ] || return 0
  note "pip install ${wanted[*]}"
  add -q "${wanted[@]}" >"$logs/pip.log" 2>&1 || { cat "$logs/pip.log"; die "pip could not install ${wanted[*]}"; }
}

python_step() {
  choose_python
  # The tools of an environment that is not active, too.
  case :$PATH: in *":${py%/*}:"*) ;; *) export PATH=${py%/*}:$PATH ;; esac
  [ -z "$site" ] || export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$PATH
  add_missing setuptools=setuptools wheel=wheel
  has cmake || add_missing cmake=cmake
  has ninja || add_missing ninja=ninja
  local include
  include=$("$py" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  if [ ! -e "$include/Python.h" ]; then
    can_install || die "Python.h is missing (on Debian: apt-get install python3-dev)"
    install_packages python3-dev
  fi
  case $target in
    check) ;;
    demo | bench) [ -n "$site" ] || add_missing numpy=numpy ;;  # without it torch warns, in every rank
    *) add_missing expecttest=expecttest pytest=pytest pytest_timeout=pytest-timeout xdist=pytest-xdist hypothesis=hypothesis numpy=numpy psutil=psutil ;;
  esac
  case $target in test | test-two-hosts | test-rdma | test-hosts | selected) add_second_ucx ;; esac
}

# It is tested beside the system's UCX. Its tests report that they are skipped where it cannot be had.
add_second_ucx() {
  has_module libucx || add -q --retries 1 --timeout 20 libucx-cu13 >"$logs/ucx.log" 2>&1 ||
    note "pip could not install libucx-cu13, see $logs/ucx.log; going on without"
}
