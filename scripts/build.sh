# Sourced by run.sh. Builds nvx for Python, and the C++ tests.
# shellcheck shell=bash

# The module goes where $py finds it: build/site or .venv. Nothing is done where no source is newer than the last build.
build_module() {
  local stamp=$root/build/built-by-run began=$SECONDS identity
  identity="$py $site $("$py" cmake/find_torch.py) ${CMAKE_ARGS:-} ${NVX_CUDA:-} ${CMAKE_BUILD_TYPE:-}"
  identity+=" ${CXX:-} ${CXXFLAGS:-} ${CUDA_HOME:-} ${TORCH_CUDA_ARCH_LIST:-} ${NVX_UCX_ROOT:-} $(command -v nvcc || true)"
  if has_header ucp/api/ucp.h || has_module libucx; then identity+=" UCX"; fi
  if [ "$(cat "$stamp" 2>/dev/null)" = "$identity" ] && [ -z "$(find csrc cmake python setup.py pyproject.toml CMakeLists.txt \
      -newer "$stamp" -type f ! -name '*.pyc' ! -path '*.egg-info/*' -print -quit)" ]; then
    note "up to date"
    return
  fi
  has "${CXX:-c++}" || has g++ || die "a C++20 compiler is needed to build nvx (on Debian: apt-get install g++)"
  rm -f "$stamp"
  [ -z "$site" ] || rm -rf "$site"/nvx "$site"/*nvx-*.dist-info
  if ! add -v --no-deps --no-build-isolation --force-reinstall . 2>&1 | tee "$logs/build.log" |
      grep --line-buffered -oE '(\[[0-9]+/[0-9]+\] .*|-- nvx: .*|.*(error|FAILED): .*)' | sed -u 's/^/    /'; then
    tail -n 40 "$logs/build.log" >&2
    die "nvx did not build; all of it is in $logs/build.log"
  fi
  echo "$identity" >"$stamp"
  note "built in $((SECONDS - began)) s"
}

# As deep as setup.py's folder and the gates': so ccache knows their objects again.
cpp=build/make/cpp

# build_cpp_tests [PROGRAM ...]: these test programs, or all.
build_cpp_tests() {
  local generator=() wanted=()
  # CMake refuses the folder of a checkout that was moved.
  grep -sqxF -e "CMAKE_CACHEFILE_DIR:INTERNAL=$PWD/$cpp" -e "CMAKE_CACHEFILE_DIR:INTERNAL=$(pwd -P)/$cpp" \
    $cpp/CMakeCache.txt || rm -rf $cpp/CMakeCache.txt $cpp/CMakeFiles/[0-9]*
  # CMake refuses another generator than the one of the folder.
  if has ninja && [ ! -e $cpp/CMakeCache.txt ]; then generator=(-G Ninja); fi
  if [ $# -gt 0 ]; then wanted=(--target "$@"); fi
  # shellcheck disable=SC2086  # CMAKE_ARGS is several
  cmake -S . -B $cpp "${generator[@]}" -DNVX_TESTS=ON -DNVX_PYTHON=OFF -DPython_EXECUTABLE="$py" ${CMAKE_ARGS:-} \
    >"$logs/cmake.log" 2>&1 || { cat "$logs/cmake.log"; return 1; }
  cmake --build $cpp --parallel "$jobs" "${wanted[@]}"
}
