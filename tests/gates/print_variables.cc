// Prints the registry of NVX_* variables as the table of docs/environment.md.

#include <cstdio>

#include "base/config.h"

int main() {
  std::puts("| variable | default | accepts | meaning |\n|---|---|---|---|");
  for (const nvx::Variable& v : nvx::variables()) {
    std::printf("| `%s` | %s | %s | %s |\n", v.name, nvx::default_of(v).c_str(), nvx::accepted(v).c_str(), v.meaning);
  }
}
