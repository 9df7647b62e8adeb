# One libFuzzer program for every tests/fuzz/*_fuzz.cc. Configure with clang, and with the sanitizers wanted beside it:
#   cmake -B build-fuzz -DCMAKE_CXX_COMPILER=clang++ -DNVX_FUZZ=ON -DNVX_SANITIZE=address,undefined
# All else of such a build runs as without, so that one build serves the tests and the fuzzing.
if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "nvx: NVX_FUZZ needs clang")
endif()
target_compile_options(nvx_flags INTERFACE -fsanitize=fuzzer-no-link)

file(GLOB fuzz_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/fuzz/*_fuzz.cc)
foreach(source ${fuzz_sources})
  get_filename_component(target ${source} NAME_WE)
  add_executable(${target} ${source} ${PROJECT_SOURCE_DIR}/tests/support/stores.cc)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${target} PRIVATE nvx_core)
  target_link_options(${target} PRIVATE -fsanitize=fuzzer)
endforeach()
