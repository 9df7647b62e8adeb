#include "support/results.h"

#include <gtest/gtest.h>

#include <fstream>

namespace nvx::test {

std::filesystem::path source_root() { return NVX_SOURCE_ROOT; }

std::vector<std::map<std::string, std::string>> rows_of_file(const std::filesystem::path& file) {
  std::vector<std::map<std::string, std::string>> rows(1);
  std::ifstream lines(file);
  EXPECT_TRUE(lines) << file;
  for (std::string line; std::getline(lines, line);) {
    std::erase_if(line, [](char c) { return c == ' ' || c == '"' || c == ','; });
    const size_t colon = line.find(':');
    if (line.find_first_of("{}") != std::string::npos)
      rows.emplace_back();
    else if (colon != std::string::npos)
      rows.back()[line.substr(0, colon)] = line.substr(colon + 1);
  }
  return rows;
}

}  // namespace nvx::test
