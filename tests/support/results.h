#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace nvx::test {

/// The root of the source tree.
std::filesystem::path source_root();

/// The innermost objects of a JSON file in which each field has a line of its own, as in those of
/// `scripts/gpu_evidence.py`. A text has no quotes. A file that cannot be read fails the test.
std::vector<std::map<std::string, std::string>> rows_of_file(const std::filesystem::path& file);

}  // namespace nvx::test
