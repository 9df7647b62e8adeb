# nvx_gpu: the program of the GPU tests, which needs neither torch nor GoogleTest. `ctest -L gpu` runs its parts; they are
# skipped, with the reason, where there is no GPU. tests/gpu/simulated runs the same parts with kernels on the host's threads.
option(NVX_GPU_TESTS "Build the program of the GPU tests (needs NVX_CUDA=ON)" ${NVX_TESTS})
set(gpu_dir ${PROJECT_SOURCE_DIR}/tests/gpu)
file(GLOB gpu_sources CONFIGURE_DEPENDS ${gpu_dir}/*.cc)
list(FILTER gpu_sources EXCLUDE REGEX "_test\\.cc$")
list(APPEND gpu_sources ${PROJECT_SOURCE_DIR}/tests/support/specs.cc)

# The files without CUDA, for their own tests.
set(gpu_tested ${gpu_dir}/cases.cc ${gpu_dir}/report.cc ${gpu_dir}/hub.cc)
set_source_files_properties(${gpu_tested} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
if(TARGET gpu_test)
  target_sources(gpu_test PRIVATE ${gpu_tested})
endif()
nvx_read_together(gpu_sources ${PROJECT_SOURCE_DIR}/tests 7)

# Its parts, with a runtime and kernels that threads of the host simulate. CUDA's headers are wanted, and nothing else of it.
if(TARGET nvx_fake_cuda AND NOT NVX_CUDA_ON AND NOT NVX_SANITIZE AND EXISTS ${NVX_CUDA_HEADER_DIR}/cuda_runtime_api.h AND NOT CMAKE_CROSSCOMPILING)
  add_executable(nvx_gpu_simulated ${gpu_sources} ${gpu_dir}/simulated/host_cuda.cc ${PROJECT_SOURCE_DIR}/tests/support/simulated_device.cc)
  target_include_directories(nvx_gpu_simulated PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_compile_options(nvx_gpu_simulated PRIVATE "SHELL:-idirafter ${NVX_CUDA_HEADER_DIR}")
  target_link_libraries(nvx_gpu_simulated PRIVATE nvx_core)
  # Processes share memory through the driver: tests/memory/fake_cuda.c.
  set(simulated_driver ${PROJECT_BINARY_DIR}/simulated_driver)
  file(MAKE_DIRECTORY ${simulated_driver})
  file(CREATE_LINK ${PROJECT_BINARY_DIR}/libnvx_fake_cuda.so ${simulated_driver}/libcuda.so.1 SYMBOLIC)
  add_dependencies(nvx_gpu_simulated nvx_fake_cuda)
  function(nvx_simulated_test name)
    add_test(NAME simulated.${name} COMMAND nvx_gpu_simulated ${ARGN})
    set_tests_properties(simulated.${name} PROPERTIES TIMEOUT 300 LABELS simulated ENVIRONMENT LD_LIBRARY_PATH=${simulated_driver})
  endfunction()
  foreach(part facts correct streams absent abort graph)
    nvx_simulated_test(${part} ${part} --lean --ranks 2,3 --seconds 200 --patience 200)
  endforeach()
  # Figures have no meaning here: a few sizes, until their time is over.
  foreach(part bench product host_calls copies)
    nvx_simulated_test(${part} ${part} --ranks 2 --seconds 3)
  endforeach()
  foreach(part processes killed)
    nvx_simulated_test(${part} ${part} --ranks 2,3 --seconds 100)
  endforeach()
  nvx_simulated_test(processes_over_host processes --kind host --ranks 2,3 --seconds 100)
  nvx_simulated_test(bench_processes bench_processes --together --ranks 2 --seconds 12)
endif()

if(NOT NVX_GPU_TESTS OR NOT NVX_CUDA_ON)
  return()
endif()

# The control kernels and the fused launches: as in cmake/core.cmake, nvcc knows none of the other flags.
add_library(nvx_gpu_control OBJECT ${gpu_dir}/control.cu ${gpu_dir}/fused.cu ${gpu_dir}/without.cu)
target_include_directories(nvx_gpu_control PRIVATE ${PROJECT_SOURCE_DIR}/csrc ${PROJECT_SOURCE_DIR}/tests)
target_compile_options(nvx_gpu_control PRIVATE --fmad=false --expt-relaxed-constexpr)
set_target_properties(nvx_gpu_control PROPERTIES CUDA_RUNTIME_LIBRARY Static)

add_library(nvx_gpu_parts OBJECT ${gpu_sources})
target_include_directories(nvx_gpu_parts PRIVATE ${PROJECT_SOURCE_DIR}/tests)
target_include_directories(nvx_gpu_parts SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(nvx_gpu_parts PRIVATE nvx_core)
add_executable(nvx_gpu $<TARGET_OBJECTS:nvx_gpu_parts> $<TARGET_OBJECTS:nvx_gpu_control>)
target_link_libraries(nvx_gpu PRIVATE nvx_core)

# The torch module once more without the kernels, as builds without NVX_CUDA have it; what stands in for them comes first too.
if(TARGET _C)
  python_add_library(nvx_staged MODULE WITH_SOABI $<TARGET_OBJECTS:_C> ${PROJECT_SOURCE_DIR}/csrc/stubs/no_cuda.cc)
  get_target_property(libraries _C LINK_LIBRARIES)
  get_target_property(options _C LINK_OPTIONS)
  target_link_libraries(nvx_staged PRIVATE ${libraries})
  target_link_options(nvx_staged PRIVATE ${options})
  set_target_properties(nvx_staged PROPERTIES OUTPUT_NAME _C SKIP_BUILD_RPATH ON EXCLUDE_FROM_ALL ON
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/staged)
endif()

if(NVX_TESTS)
  foreach(part facts correct streams absent abort killed processes graph bench product host_calls copies pairs)
    add_test(NAME gpu.${part} COMMAND nvx_gpu ${part} --seconds 100)
    set_tests_properties(gpu.${part} PROPERTIES TIMEOUT 300 LABELS gpu RUN_SERIAL ON SKIP_REGULAR_EXPRESSION "\"end\": \"skipped\"")
  endforeach()
endif()
