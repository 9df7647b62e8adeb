# The Python module nvx._C, from csrc/torch, if torch was found.
if(NOT NVX_TORCH_DIR)
  return()
endif()
file(GLOB_RECURSE torch_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/torch/*.cc)
set(NVX_BUILD_CUDA "")
if(NVX_CUDA_ON)
  set(NVX_BUILD_CUDA "${CMAKE_CUDA_COMPILER_VERSION}")
endif()
message(STATUS "nvx: torch ${NVX_TORCH_VERSION} in ${NVX_TORCH_DIR}")
if(NVX_TORCH_CUDA AND NVX_CUDA STREQUAL "OFF")
  set(NVX_NO_KERNELS "NVX_CUDA=0")
  message(STATUS "nvx: this torch has CUDA ${NVX_TORCH_CUDA}: its tensors go through host memory (-DNVX_CUDA=ON: by kernels)")
endif()

# Compiled alone, so that the module for the fake accelerator has all other objects in common with this one, in ccache too.
set(kernel_device ${PROJECT_SOURCE_DIR}/csrc/torch/streams/kernel_device.cc)
set_source_files_properties(${kernel_device} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
# NVTX's ranges need its headers, which come with CUDA, and no library. Builds with kernels have them, and a build of the tests.
if(NVX_CUDA_ON OR NVX_SIMULATED)
  find_path(NVX_NVTX_INCLUDE nvtx3/nvToolsExt.h HINTS ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES} ENV CUDA_HOME
    ${NVX_TORCH_DIR}/../nvidia/cu13 ${NVX_TORCH_DIR}/../nvidia/nvtx /usr/local/cuda PATH_SUFFIXES include NO_CACHE)
  if(NVX_NVTX_INCLUDE)
    set_source_files_properties(${PROJECT_SOURCE_DIR}/csrc/torch/core/tool_range.cc PROPERTIES
      COMPILE_OPTIONS "-isystem;${NVX_NVTX_INCLUDE}" SKIP_UNITY_BUILD_INCLUSION ON)
  else()
    message(STATUS "nvx: no nvtx3/nvToolsExt.h here: no ranges for Nsight Systems")
  endif()
endif()
nvx_read_together(torch_sources ${PROJECT_SOURCE_DIR}/csrc 12)
if(NVX_SIMULATED)
  list(REMOVE_ITEM torch_sources ${kernel_device})
  set(simulated ${PROJECT_SOURCE_DIR}/tests/torch/simulated/kernels.cc ${PROJECT_SOURCE_DIR}/tests/support/simulated_device.cc)
  set_source_files_properties(${simulated} PROPERTIES INCLUDE_DIRECTORIES ${PROJECT_SOURCE_DIR}/tests)
  list(APPEND torch_sources ${simulated})
endif()
python_add_library(_C MODULE WITH_SOABI ${torch_sources})
target_link_libraries(_C PRIVATE nvx_core nvx_flags)
target_include_directories(_C SYSTEM PRIVATE ${NVX_TORCH_DIR}/include ${NVX_TORCH_DIR}/include/torch/csrc/api/include)
# With torch's version in every command, another torch compiles anew even where its headers have older times.
target_compile_definitions(_C PRIVATE NVX_TORCH="${NVX_TORCH_VERSION}" _GLIBCXX_USE_CXX11_ABI=1 TORCH_EXTENSION_NAME=_C TORCH_API_INCLUDE_EXTENSION_H
  USE_DISTRIBUTED NVX_BUILD_TYPE="$<CONFIG>" NVX_COMPILER="${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
foreach(lib c10 torch_cpu torch_python)
  target_link_libraries(_C PRIVATE ${NVX_TORCH_DIR}/lib/lib${lib}.so)
endforeach()
if(NOT NVX_UNITY)
  target_precompile_headers(_C PRIVATE <torch/csrc/distributed/c10d/Utils.hpp> <torch/csrc/distributed/c10d/PrefixStore.hpp>
    <torch/csrc/distributed/c10d/ParamCommsUtils.hpp> <torch/csrc/distributed/c10d/ProcessGroup.hpp>
    <torch/csrc/utils/pybind.h> <ATen/ATen.h>)
endif()
# For tests: kernels that host threads simulate on tests/torch/fake_device, over the tests' own libcuda.
if(NVX_SIMULATED)
  include(fake_cuda)
endif()
# Only the module's entry point is exported, so the module cannot interpose on anything in the process.
set(exports ${PROJECT_SOURCE_DIR}/cmake/exports.map)
target_link_options(_C PRIVATE -Wl,--version-script=${exports} -Wl,--exclude-libs,ALL)
set_target_properties(_C PROPERTIES
  LINK_DEPENDS ${exports}
  SKIP_BUILD_RPATH ON  # torch is loaded before it, and its libraries are found by name, wherever torch is installed
  LIBRARY_OUTPUT_DIRECTORY ${NVX_OUTPUT_DIR})
configure_file(${PROJECT_SOURCE_DIR}/cmake/built.py.in ${NVX_OUTPUT_DIR}/_built.py @ONLY)
