# A fake libcuda, with which tests exercise the loading of the real one. Built without sanitizers, like the real one.
add_library(nvx_fake_cuda MODULE ${PROJECT_SOURCE_DIR}/tests/memory/fake_cuda.c)
set_source_files_properties(${PROJECT_SOURCE_DIR}/tests/memory/fake_cuda.c PROPERTIES LANGUAGE CXX)
set_target_properties(nvx_fake_cuda PROPERTIES CXX_VISIBILITY_PRESET default)
target_compile_features(nvx_fake_cuda PRIVATE cxx_std_20)
target_compile_options(nvx_fake_cuda PRIVATE -Wall -Wextra)
target_link_options(nvx_fake_cuda PRIVATE -Wl,-soname,libcuda.so.1)  # once loaded, dlopen() of this name finds it
