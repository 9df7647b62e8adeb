# Cross-build for aarch64 on Debian (g++-aarch64-linux-gnu, qemu-user):
#   cmake -B build-aarch64 -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake -DNVX_TESTS=ON
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
find_program(NVX_QEMU_AARCH64 NAMES qemu-aarch64 qemu-aarch64-static)
if(NVX_QEMU_AARCH64)
  set(CMAKE_CROSSCOMPILING_EMULATOR "${NVX_QEMU_AARCH64};-L;/usr/aarch64-linux-gnu")
endif()
