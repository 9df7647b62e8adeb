#pragma once

namespace nvx {

/// Registers nvx's memory with `torch.distributed._symmetric_memory`, as the backend "NVX": for CPU tensors, which have
/// no other backend, at once; for tensors of the device that nvx's kernels serve, when the program calls
/// `symm_mem.set_backend("NVX")`, or at once if the device has no other backend.
void register_symmetric_memory();

}  // namespace nvx
