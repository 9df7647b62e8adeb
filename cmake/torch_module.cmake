# The Python module nvx._C, from csrc/torch. torch is asked where it is, never imported, and never found through its own
# CMake package: that one drags a CUDA toolkit in behind a CUDA wheel.
file(GLOB torch_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/torch/*.cc)
if(NVX_PYTHON STREQUAL "OFF" OR CMAKE_CROSSCOMPILING)
  return()
endif()

if(NVX_PYTHON STREQUAL "ON")
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
else()
  find_package(Python 3.10 QUIET COMPONENTS Interpreter Development.Module)
endif()
if(Python_FOUND)
  execute_process(COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/find_torch.py
    OUTPUT_VARIABLE torch_facts ERROR_VARIABLE torch_error RESULT_VARIABLE torch_rc OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
if(NOT Python_FOUND OR NOT torch_rc EQUAL 0)
  if(NVX_PYTHON STREQUAL "ON")
    message(FATAL_ERROR "nvx: ${Python_EXECUTABLE} has no torch. Install it, then build again. ${torch_error}")
  endif()
  message(STATUS "nvx: no Python with torch here: building the core alone (-DPython_EXECUTABLE=... names one)")
  return()
endif()
list(GET torch_facts 0 NVX_TORCH_DIR)
list(GET torch_facts 1 NVX_TORCH_VERSION)
list(GET torch_facts 2 NVX_TORCH_MINOR)
list(GET torch_facts 3 NVX_TORCH_CUDA)

set(NVX_BUILD_CUDA "")
message(STATUS "nvx: torch ${NVX_TORCH_VERSION} in ${NVX_TORCH_DIR}")
if(NVX_TORCH_CUDA AND NOT "$ENV{NVX_CUDA}" STREQUAL "0")
  message(STATUS "nvx: this torch has CUDA ${NVX_TORCH_CUDA}; this version of nvx serves CPU tensors only")
endif()
if(NOT torch_sources)
  message(STATUS "nvx: csrc/torch is empty: no Python module")
  return()
endif()

python_add_library(_C MODULE WITH_SOABI ${torch_sources})
target_link_libraries(_C PRIVATE nvx_core nvx_flags)
target_include_directories(_C SYSTEM PRIVATE ${NVX_TORCH_DIR}/include ${NVX_TORCH_DIR}/include/torch/csrc/api/include)
target_compile_definitions(_C PRIVATE _GLIBCXX_USE_CXX11_ABI=1 TORCH_EXTENSION_NAME=_C TORCH_API_INCLUDE_EXTENSION_H
  USE_DISTRIBUTED NVX_BUILD_TYPE="$<CONFIG>" NVX_COMPILER="${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
foreach(lib c10 torch_cpu torch_python)
  target_link_libraries(_C PRIVATE ${NVX_TORCH_DIR}/lib/lib${lib}.so)
endforeach()
# Nothing but the module's entry leaves it, so nothing in the process can be interposed by it.
set(exports ${PROJECT_SOURCE_DIR}/cmake/exports.map)
target_link_options(_C PRIVATE -Wl,--version-script=${exports} -Wl,--exclude-libs,ALL)
set_target_properties(_C PROPERTIES
  LINK_DEPENDS ${exports}
  SKIP_BUILD_RPATH ON  # torch is loaded by then; its libraries are found by name, wherever it was installed
  LIBRARY_OUTPUT_DIRECTORY ${NVX_OUTPUT_DIR})
configure_file(${PROJECT_SOURCE_DIR}/cmake/built.py.in ${NVX_OUTPUT_DIR}/_built.py @ONLY)
