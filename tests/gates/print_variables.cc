// Prints the registry of NVX_* variables as the table of docs/environment.md.

#include <cstdio>

#include "base/config.h"

int main() {
  std::puts("| variable | default | meaning |\n|---|---|---|");
  for (const nvx::Variable& v : nvx::variables()) {
    std::printf("| `%s` | %s%s%s | %s |\n", v.name, *v.fallback ? "`" : "", v.fallback, *v.fallback ? "`" : "",
                v.meaning);
  }
}
