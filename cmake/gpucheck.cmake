# nvx_gpucheck: the program that `nvx gpucheck` runs on a machine with GPUs. Needs neither torch nor GoogleTest. With torch,
# `nvx gpucheck` also runs nvx_staged.
option(NVX_GPUCHECK "Build nvx_gpucheck (needs NVX_CUDA=ON)" OFF)
set(gpucheck_dir ${PROJECT_SOURCE_DIR}/tests/gpucheck)

# The parts without CUDA, for its own tests.
if(TARGET gpucheck_test)
  target_sources(gpucheck_test PRIVATE ${gpucheck_dir}/cases.cc ${gpucheck_dir}/report.cc ${gpucheck_dir}/hub.cc)
endif()

# Its parts over a runtime and kernels that host threads simulate. Needs only CUDA's headers.
if(TARGET nvx_fake_cuda AND NOT NVX_CUDA_ON AND NOT NVX_SANITIZE AND EXISTS ${NVX_CUDA_HEADER_DIR}/cuda_runtime_api.h AND NOT CMAKE_CROSSCOMPILING)
  file(GLOB twin_sources CONFIGURE_DEPENDS ${gpucheck_dir}/*.cc ${gpucheck_dir}/twin/*.cc)
  list(FILTER twin_sources EXCLUDE REGEX "_test\\.cc$")
  add_executable(nvx_gpucheck_twin ${twin_sources} ${PROJECT_SOURCE_DIR}/tests/support/plays.cc)
  target_include_directories(nvx_gpucheck_twin PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_compile_options(nvx_gpucheck_twin PRIVATE "SHELL:-idirafter ${NVX_CUDA_HEADER_DIR}")
  target_link_libraries(nvx_gpucheck_twin PRIVATE nvx_core)
  foreach(part facts correct streams absent abort graph)
    add_test(NAME gpucheck.twin_${part} COMMAND nvx_gpucheck_twin ${part} --lean --ranks 2,3 --seconds 200)
    set_tests_properties(gpucheck.twin_${part} PROPERTIES TIMEOUT 300 LABELS gpucheck)
  endforeach()
  # The figures are meaningless here, so measure a few sizes for a short time.
  foreach(part bench copies)
    add_test(NAME gpucheck.twin_${part} COMMAND nvx_gpucheck_twin ${part} --ranks 2 --seconds 3)
    set_tests_properties(gpucheck.twin_${part} PROPERTIES TIMEOUT 300 LABELS gpucheck)
  endforeach()
  # Processes share memory through the fake driver of tests/memory.
  set(played_driver ${PROJECT_BINARY_DIR}/played_driver)
  file(MAKE_DIRECTORY ${played_driver})
  file(CREATE_LINK ${PROJECT_BINARY_DIR}/libnvx_fake_cuda.so ${played_driver}/libcuda.so.1 SYMBOLIC)
  add_dependencies(nvx_gpucheck_twin nvx_fake_cuda)
  foreach(part processes killed processes_over_host)
    string(REPLACE "_over_" ";--kind;" words ${part})
    add_test(NAME gpucheck.twin_${part} COMMAND nvx_gpucheck_twin ${words} --ranks 2,3 --seconds 100)
    set_tests_properties(gpucheck.twin_${part} PROPERTIES TIMEOUT 300 LABELS gpucheck
      ENVIRONMENT LD_LIBRARY_PATH=${played_driver})
  endforeach()
  add_test(NAME gpucheck.twin_bench_processes COMMAND nvx_gpucheck_twin bench_processes --together --ranks 2 --seconds 12)
  set_tests_properties(gpucheck.twin_bench_processes PROPERTIES TIMEOUT 300 LABELS gpucheck
    ENVIRONMENT LD_LIBRARY_PATH=${played_driver})
endif()

if(NOT NVX_GPUCHECK)
  return()
endif()
if(NOT NVX_CUDA_ON)
  message(FATAL_ERROR "nvx: NVX_GPUCHECK needs the CUDA kernels: -DNVX_CUDA=ON")
endif()

# Its control kernels. As in cmake/core.cmake, nvcc does not know the other flags.
add_library(nvx_gpucheck_cuda OBJECT ${gpucheck_dir}/control.cu)
target_include_directories(nvx_gpucheck_cuda PRIVATE ${PROJECT_SOURCE_DIR}/csrc ${PROJECT_SOURCE_DIR}/tests)
target_compile_options(nvx_gpucheck_cuda PRIVATE --fmad=false --expt-relaxed-constexpr)
set_target_properties(nvx_gpucheck_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static)

# The torch module without the kernels, as in builds without NVX_CUDA. The stubs precede the core in the link order, so the
# linker takes no kernel from the core.
if(TARGET _C)
  python_add_library(nvx_staged MODULE WITH_SOABI $<TARGET_OBJECTS:_C> ${PROJECT_SOURCE_DIR}/csrc/stubs/no_cuda.cc)
  get_target_property(libraries _C LINK_LIBRARIES)
  get_target_property(options _C LINK_OPTIONS)
  target_link_libraries(nvx_staged PRIVATE ${libraries})
  target_link_options(nvx_staged PRIVATE ${options})
  set_target_properties(nvx_staged PROPERTIES OUTPUT_NAME _C SKIP_BUILD_RPATH ON
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/staged)
endif()

file(GLOB gpucheck_sources CONFIGURE_DEPENDS ${gpucheck_dir}/*.cc)
list(FILTER gpucheck_sources EXCLUDE REGEX "_test\\.cc$")
add_executable(nvx_gpucheck ${gpucheck_sources} ${PROJECT_SOURCE_DIR}/tests/support/plays.cc
  $<TARGET_OBJECTS:nvx_gpucheck_cuda>)
target_include_directories(nvx_gpucheck PRIVATE ${PROJECT_SOURCE_DIR}/tests)
target_include_directories(nvx_gpucheck SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(nvx_gpucheck PRIVATE nvx_core)
