# nvx_flags: the compile options of all objects of nvx.
include(CheckCXXCompilerFlag)
find_package(Threads REQUIRED)

add_library(nvx_flags INTERFACE)
target_link_libraries(nvx_flags INTERFACE Threads::Threads)
# No contraction: all levels and algorithms must give the same bits.
target_compile_options(nvx_flags INTERFACE -ffp-contract=off -Wall -Wextra)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(nvx_flags INTERFACE -Wno-restrict)  # false positives of gcc 12 in std::string (gcc bug 105651)
endif()
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_options(nvx_flags INTERFACE -Wthread-safety)
endif()
if(NVX_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(nvx_flags INTERFACE -Wno-subobject-linkage)  # files that a unity build includes are not headers
endif()
if(NVX_WERROR)
  target_compile_options(nvx_flags INTERFACE -Werror)
endif()

if(NVX_SANITIZE)
  target_compile_options(nvx_flags INTERFACE -fsanitize=${NVX_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer
    "$<IF:$<CONFIG:Debug>,-g,-O1;-g1>")  # debug information dominates the compile time; stack traces need line numbers only
  target_link_options(nvx_flags INTERFACE -fsanitize=${NVX_SANITIZE})
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    target_compile_options(nvx_flags INTERFACE -Wno-pass-failed)  # loops that contain sanitizer checks do not vectorise
  endif()
else()
  foreach(flag -fstack-protector-strong -fstack-clash-protection -fcf-protection)
    string(MAKE_C_IDENTIFIER "has${flag}" has)
    check_cxx_compiler_flag(${flag} ${has})
    if(${has})
      target_compile_options(nvx_flags INTERFACE ${flag})
    endif()
  endforeach()
  target_compile_options(nvx_flags INTERFACE "$<$<NOT:$<CONFIG:Debug>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=2>")
  target_link_options(nvx_flags INTERFACE -Wl,-z,relro,-z,now)
endif()
