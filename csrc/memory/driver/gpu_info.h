#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/text.h"

/// The fixed layouts in which ranks describe their GPUs to each other.
namespace nvx {

/// The text of a field. It comes from a peer, so it is made printable.
template <size_t N>
std::string text_of(const char (&field)[N]) {
  return printable({field, strnlen(field, N)});
}

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

/// For a description that does not have this version's layout.
inline Error of_another_version(const std::string& rank) {
  return {Code::kMismatch, "nvx: " + rank + " describes its GPU in the format of another version of nvx", kOneVersion};
}

/// Decodes each rank's values and checks their size.
template <class T>
std::vector<T> read_infos(const std::vector<std::vector<std::byte>>& messages, size_t each, const RankNames& name_of) {
  std::vector<T> infos(messages.size() * each);
  for (size_t r = 0; r < messages.size(); ++r) {
    if (messages[r].size() != each * sizeof(T))
      throw Error(Code::kMismatch,
                  "nvx: the GPU description of " + name_of(int(r)) + " is damaged or from another version of nvx");
    std::memcpy(infos.data() + r * each, messages[r].data(), messages[r].size());
  }
  return infos;
}

/// The same for one description of each rank, which begins with `magic` and names its rank.
template <class T>
std::vector<T> read_infos(const std::vector<std::vector<std::byte>>& messages, const RankNames& name_of) {
  std::vector<T> infos = read_infos<T>(messages, 1, name_of);
  for (size_t r = 0; r < infos.size(); ++r) {
    if (infos[r].magic != T::kMagic || infos[r].rank != int32_t(r)) throw of_another_version(name_of(int(r)));
  }
  return infos;
}

}  // namespace nvx
