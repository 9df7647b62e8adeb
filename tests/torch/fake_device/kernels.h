// The operators that the fake accelerator carries out itself.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>

namespace fake {

// As CUDA's: moves to new memory in the order of the current stream; the old one is freed at once.
void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace fake
