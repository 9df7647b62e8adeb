// The operators that the fake accelerator carries out itself.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>

namespace fake {

// Like CUDA's: copies to new memory in the order of the current stream and frees the old memory immediately.
void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace fake
