# One libFuzzer program per tests/fuzz/*_fuzz.cc. Configure with clang and the desired sanitizers:
#   cmake -B build-fuzz -DCMAKE_CXX_COMPILER=clang++ -DNVX_FUZZ=ON -DNVX_SANITIZE=address,undefined
# Only the fuzzed code is instrumented for the fuzzer, so that this build serves the tests too.
if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "nvx: NVX_FUZZ needs clang")
endif()
set(watched -fsanitize=fuzzer-no-link)
target_compile_options(nvx_core PRIVATE ${watched})
file(GLOB schedules CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/schedule/*.cc)
set_source_files_properties(${schedules} PROPERTIES COMPILE_OPTIONS -fno-sanitize=fuzzer-no-link)  # they parse no input

add_library(nvx_fuzz_support OBJECT ${PROJECT_SOURCE_DIR}/tests/support/stores.cc)
target_include_directories(nvx_fuzz_support PRIVATE ${PROJECT_SOURCE_DIR}/tests)
target_link_libraries(nvx_fuzz_support PRIVATE nvx_core)
target_compile_options(nvx_fuzz_support PRIVATE ${watched})

file(GLOB fuzz_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/fuzz/*_fuzz.cc)
if(NOT NVX_UCX_INCLUDE)
  list(FILTER fuzz_sources EXCLUDE REGEX "/port_fuzz\\.cc$")
endif()
foreach(source ${fuzz_sources})
  get_filename_component(target ${source} NAME_WE)
  add_executable(${target} ${source} $<TARGET_OBJECTS:nvx_fuzz_support>)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_include_directories(${target} SYSTEM PRIVATE ${NVX_UCX_INCLUDE})
  target_link_libraries(${target} PRIVATE nvx_core)
  target_compile_options(${target} PRIVATE ${watched})
  target_link_options(${target} PRIVATE -fsanitize=fuzzer)
endforeach()
