# One gtest binary per component, of tests/<component>/**/*_test.cc. All of them share tests/support/*.cc.
if(CMAKE_CROSSCOMPILING AND EXISTS /usr/src/googletest)
  set(INSTALL_GTEST OFF CACHE BOOL "" FORCE)
  add_subdirectory(/usr/src/googletest ${PROJECT_BINARY_DIR}/googletest EXCLUDE_FROM_ALL)
else()
  find_package(GTest)
  if(NOT GTest_FOUND)
    message(FATAL_ERROR "nvx: NVX_TESTS needs GoogleTest. Debian and Ubuntu: apt-get install libgtest-dev libgmock-dev")
  endif()
endif()
include(GoogleTest)

file(GLOB support CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/support/*.cc)
list(FILTER support EXCLUDE REGEX "_test\\.cc$")
if(support)
  add_library(nvx_test_support STATIC ${support})
  target_include_directories(nvx_test_support PUBLIC ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(nvx_test_support PUBLIC nvx_core GTest::gtest)
  set_property(SOURCE ${PROJECT_SOURCE_DIR}/tests/support/results.cc APPEND
    PROPERTY COMPILE_DEFINITIONS NVX_SOURCE_ROOT="${PROJECT_SOURCE_DIR}")
endif()

# A test compares nvx's declarations of libcuda and NVML with cuda.h and nvml.h if those exist. Their folder comes last in the
# include path, because no other header in it is wanted.
find_path(NVX_CUDA_HEADER_DIR cuda.h PATHS $ENV{CUDA_HOME}/include /usr/local/cuda/include NO_DEFAULT_PATH)
set(abi_tests ${PROJECT_SOURCE_DIR}/tests/memory/driver/driver_library_test.cc ${PROJECT_SOURCE_DIR}/tests/group/setup/nvml_library_test.cc)
set_source_files_properties(${abi_tests} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
if(NVX_CUDA_HEADER_DIR AND NOT CMAKE_CROSSCOMPILING)
  set_source_files_properties(${abi_tests} PROPERTIES COMPILE_OPTIONS "-idirafter;${NVX_CUDA_HEADER_DIR}")
endif()

# Tests that wait and compare take longer to compile than to run. Those of kernel and schedule compute. With the checks of its
# sanitizers, clang takes less than half as long for -O0 as for -O1; gcc as long. Linked last: the last -O counts.
set(quick -O1)
if(NVX_SANITIZE AND CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  set(quick -O0)
endif()
add_library(nvx_quick INTERFACE)
target_compile_options(nvx_quick INTERFACE ${quick})

function(nvx_component_test component name label)
  set(component_tests ${ARGN})
  nvx_read_together(component_tests ${PROJECT_SOURCE_DIR}/tests 5)
  add_executable(${name} ${component_tests})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE nvx_core GTest::gtest_main)
  if(NVX_CUDA_ON)
    target_include_directories(${name} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  endif()
  if(TARGET nvx_test_support)
    target_link_libraries(${name} PRIVATE nvx_test_support)
  endif()
  if(NOT component MATCHES "^(kernel|schedule)$")
    target_link_libraries(${name} PRIVATE nvx_quick)
  endif()
  gtest_discover_tests(${name} TEST_PREFIX ${component}. DISCOVERY_MODE PRE_TEST PROPERTIES TIMEOUT 300 LABELS ${label})
endfunction()

# Labels: a component's name; `gpu` for what a GPU is needed for, which no other label contains, as -L takes a pattern.
file(GLOB components CONFIGURE_DEPENDS LIST_DIRECTORIES true ${PROJECT_SOURCE_DIR}/tests/*)
foreach(dir ${components})
  get_filename_component(component ${dir} NAME)
  file(GLOB_RECURSE component_tests CONFIGURE_DEPENDS ${dir}/*_test.cc)
  file(GLOB_RECURSE cuda_tests CONFIGURE_DEPENDS ${dir}/*_cuda_test.cc)
  if(cuda_tests)
    list(REMOVE_ITEM component_tests ${cuda_tests})
  endif()
  if(component_tests)
    string(REPLACE gpu simulated label ${component})
    nvx_component_test(${component} ${component}_test ${label} ${component_tests})
  endif()
  if(cuda_tests AND NVX_CUDA_ON)
    nvx_component_test(${component} ${component}_cuda_test gpu ${cuda_tests})
  endif()
endforeach()

# The link contract runs over each installed UCX; a process can load only one.
if(TARGET net_test AND NOT CMAKE_CROSSCOMPILING)
  add_test(NAME net.other_ucx COMMAND ${CMAKE_COMMAND} -DPROGRAM=$<TARGET_FILE:net_test> -DPYTHON=${Python_EXECUTABLE}
    -P ${PROJECT_SOURCE_DIR}/tests/net/other_ucx.cmake)
  set_tests_properties(net.other_ucx PROPERTIES TIMEOUT 300 LABELS net SKIP_REGULAR_EXPRESSION "SKIPPED: no second libucp")
endif()

if(TARGET memory_test)
  include(fake_cuda)
  add_dependencies(memory_test nvx_fake_cuda)
  set_property(SOURCE ${PROJECT_SOURCE_DIR}/tests/memory/driver/driver_library_test.cc APPEND
    PROPERTY COMPILE_DEFINITIONS NVX_FAKE_CUDA="$<TARGET_FILE:nvx_fake_cuda>")
endif()
