# One gtest binary a room: every tests/<room>/*_test.cc. tests/support/*.cc is shared by all of them.
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
endif()

# What nvx declares of libcuda and NVML itself is held against cuda.h and nvml.h where they are. Their folder comes last:
# nothing else of it is wanted.
find_path(NVX_CUDA_HEADER_DIR cuda.h PATHS $ENV{CUDA_HOME}/include /usr/local/cuda/include NO_DEFAULT_PATH)
set(abi_tests ${PROJECT_SOURCE_DIR}/tests/memory/driver/driver_library_test.cc ${PROJECT_SOURCE_DIR}/tests/group/meet/nvml_library_test.cc)
set_source_files_properties(${abi_tests} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
if(NVX_CUDA_HEADER_DIR AND NOT CMAKE_CROSSCOMPILING)
  set_source_files_properties(${abi_tests} PROPERTIES COMPILE_OPTIONS "-idirafter;${NVX_CUDA_HEADER_DIR}")
endif()

# Where compiling takes longer than running: tests that wait and compare. Those of kernel and schedule compute.
set(quick -O1)
if(NVX_SANITIZE)
  set(quick -O0)
endif()

file(GLOB rooms CONFIGURE_DEPENDS LIST_DIRECTORIES true ${PROJECT_SOURCE_DIR}/tests/*)
foreach(dir ${rooms})
  file(GLOB_RECURSE room_tests CONFIGURE_DEPENDS ${dir}/*_test.cc)
  if(NOT NVX_CUDA_ON)
    list(FILTER room_tests EXCLUDE REGEX "_cuda_test\\.cc$")
  endif()
  if(room_tests)
    get_filename_component(room ${dir} NAME)
    nvx_read_together(room_tests ${PROJECT_SOURCE_DIR}/tests 5)
    add_executable(${room}_test ${room_tests})
    target_include_directories(${room}_test PRIVATE ${PROJECT_SOURCE_DIR}/tests)
    target_link_libraries(${room}_test PRIVATE nvx_core GTest::gtest_main)
    if(NOT room MATCHES "^(kernel|schedule)$")
      target_compile_options(${room}_test PRIVATE ${quick})
    endif()
    if(NVX_CUDA_ON)
      target_include_directories(${room}_test SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
    endif()
    if(support)
      target_link_libraries(${room}_test PRIVATE nvx_test_support)
    endif()
    gtest_discover_tests(${room}_test TEST_PREFIX ${room}. DISCOVERY_MODE PRE_TEST
      PROPERTIES TIMEOUT 300 LABELS ${room})
  endif()
endforeach()

# The contract of links holds over whichever UCX is loaded, and a process loads one.
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
