# Runs the tests of links once more, over the UCX of the Python package libucx, where net_test finds another one by itself:
#   cmake -DPROGRAM=net_test -DPYTHON=python -P other_ucx.cmake
# If that package is not installed, it prints the words that ctest takes for a skipped test.
set(SKIP "SKIPPED: no second libucp")
if(NOT PYTHON)
  set(PYTHON python3)
endif()
execute_process(
  COMMAND ${PYTHON} -c
    "import importlib.util as u; s = u.find_spec('libucx'); print(s.submodule_search_locations[0] if s else '')"
  OUTPUT_VARIABLE package ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
set(library ${package}/lib/libucp.so.0)
if(NOT package OR NOT EXISTS ${library})
  message("${SKIP}: ${PYTHON} has no package libucx (pip install libucx-cu13)")
  return()
endif()

execute_process(
  COMMAND ${CMAKE_COMMAND} -E env NVX_LIBUCP=${library} ${PROGRAM} "--gtest_filter=Ucx.*:Links/*/ucx"
  RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(output MATCHES "this build has no UCX")
  message("${SKIP}: this build serves one host")
elseif(NOT code EQUAL 0 OR NOT output MATCHES "PASSED  . [1-9]")
  message(FATAL_ERROR "over ${library}:\n${output}")
else()
  message("over ${library}:\n${output}")
endif()
