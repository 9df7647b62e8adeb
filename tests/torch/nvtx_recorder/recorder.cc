// A tool of NVTX: writes the ranges of each thread to the file that NVX_TEST_RANGES names, as lines "push nvx
// all_reduce 4000".

#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

void write(const std::string& line) {
  static std::FILE* const file = std::fopen(std::getenv("NVX_TEST_RANGES"), "a");
  std::fprintf(file, "%s\n", line.c_str());
  std::fflush(file);
}

std::string& name_of(nvtxDomainHandle_t domain) { return *reinterpret_cast<std::string*>(domain); }

nvtxDomainHandle_t NVTX_API create(const char* name) {
  return reinterpret_cast<nvtxDomainHandle_t>(new std::string(name));
}

int NVTX_API push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* range) {
  write("push " + name_of(domain) + " " + range->message.ascii + " " + std::to_string(range->payload.ullValue));
  return 0;
}

int NVTX_API pop(nvtxDomainHandle_t domain) {
  write("pop " + name_of(domain));
  return 0;
}

}  // namespace

// NVTX looks for it by this name when the program first calls it.
__attribute__((visibility("default"))) int initialize(NvtxGetExportTableFunc_t exports) __asm__(
    "InitializeInjectionNvtx2");

int initialize(NvtxGetExportTableFunc_t exports) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(exports(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
  *table[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(create);
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(push);
  *table[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}
