#pragma once

#include <dlfcn.h>
#include <link.h>

#include <string>
#include <utility>

#include "base/error.h"

namespace nvx {

/// A library that is loaded at run time and never unloaded. A struct of pointers to its functions has it as the first
/// member, `from`, and finds each function in the initializer of its pointer: `NVX_FUNCTION(int, cuInit, unsigned
/// flags);`.
class Library {
 public:
  struct Function {
    void* at;
    template <class F>
    operator F*() const {
      return reinterpret_cast<F*>(at);
    }
  };

  /// `too_old`: the end of the error for a function that is missing, such as "the driver is too old".
  Library(const std::string& path, std::string too_old)
      : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)), too_old_(std::move(too_old)) {
    link_map* file = nullptr;
    if (!handle_) error_ = dlerror();
    if (handle_ && dlinfo(handle_, RTLD_DI_LINKMAP, &file) == 0) path_ = file->l_name;
  }

  explicit operator bool() const { return handle_ != nullptr; }
  /// The loader's reason, if it could not be loaded.
  const std::string& error() const { return error_; }
  const std::string& path() const { return path_; }

  /// Throws Error if the library has no such function.
  Function operator()(const char* name) const {
    if (void* at = dlsym(handle_, name)) return {at};
    throw Error(Code::kSystem, "nvx: " + path_ + " has no " + name + ": " + too_old_);
  }

 private:
  void* handle_;
  std::string too_old_, error_, path_;
};

}  // namespace nvx

#define NVX_FUNCTION(result, name, ...) result (*name)(__VA_ARGS__) = from(#name)
