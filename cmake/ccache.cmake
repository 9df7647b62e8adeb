# Compiles through ccache where it is installed and can write its folder; -DNVX_CCACHE= compiles without it.
if(CMAKE_CXX_COMPILER_LAUNCHER)
  return()
endif()
find_program(NVX_CCACHE ccache)
if(NOT NVX_CCACHE)
  return()
endif()
separate_arguments(argument UNIX_COMMAND "${CMAKE_CXX_COMPILER_ARG1}")
execute_process(
  COMMAND ${NVX_CCACHE} ${CMAKE_CXX_COMPILER} ${argument} -x c++ -c /dev/null -o ${PROJECT_BINARY_DIR}/try_ccache.o
  RESULT_VARIABLE code OUTPUT_VARIABLE said ERROR_VARIABLE said)
if(NOT code EQUAL 0)
  string(STRIP "${said}" said)
  message(STATUS "nvx: ccache is not used: ${said}")
  return()
endif()
# Relative to the source tree, so that another checkout or an unpacked sdist finds the same objects in ccache. An environment
# inside the tree contains torch's headers, whose names must be the same as from outside.
set(base ${PROJECT_SOURCE_DIR})
if(EXISTS ${PROJECT_SOURCE_DIR}/.venv)
  set(base ${PROJECT_SOURCE_DIR}/csrc)
endif()
set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${base} ${NVX_CCACHE})
