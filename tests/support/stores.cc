#include "support/stores.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "base/error.h"

namespace nvx::test {

void MemoryStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  const std::lock_guard lock(mutex_);
  values_[key] = value;
  changed_.notify_all();
}

std::optional<std::vector<uint8_t>> MemoryStore::get(const std::string& key, std::chrono::milliseconds span) {
  std::unique_lock lock(mutex_);
  const auto end = std::chrono::system_clock::now() + std::min(span, std::chrono::milliseconds(60'000));
  if (!changed_.wait_until(lock, end, [&] { return values_.count(key) != 0; })) {
    return std::nullopt;
  }
  return values_[key];
}

int64_t MemoryStore::add(const std::string& key, int64_t n) {
  const std::lock_guard lock(mutex_);
  return numbers_[key] += n;
}

void MemoryStore::remove(const std::string& key) {
  const std::lock_guard lock(mutex_);
  values_.erase(key);
}

std::vector<std::string> MemoryStore::keys() {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> keys;
  for (const auto& [key, value] : values_) keys.push_back(key);
  return keys;
}

FolderStore::FolderStore() : owner_(getpid()) {
  std::string name = (std::filesystem::temp_directory_path() / "nvx-store-XXXXXX").string();
  if (!mkdtemp(name.data())) throw system_error("cannot make a folder");
  folder_ = name;
}

FolderStore::~FolderStore() {
  std::error_code ignored;
  if (getpid() == owner_) std::filesystem::remove_all(folder_, ignored);
}

std::string FolderStore::path(const std::string& key) const {
  std::string name = key;
  std::replace(name.begin(), name.end(), '/', '_');
  return folder_ + "/" + name;
}

void FolderStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  const std::string written = path(key) + "." + std::to_string(getpid());
  std::ofstream(written, std::ios::binary).write(reinterpret_cast<const char*>(value.data()), long(value.size()));
  std::filesystem::rename(written, path(key));
}

std::optional<std::vector<uint8_t>> FolderStore::get(const std::string& key, std::chrono::milliseconds span) {
  if (!eventually(span, [&] { return std::filesystem::exists(path(key)); })) {
    return std::nullopt;
  }
  std::ifstream file(path(key), std::ios::binary);
  return std::vector<uint8_t>{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

int64_t FolderStore::add(const std::string& key, int64_t n) {
  const int file = open((path(key) + ".number").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || flock(file, LOCK_EX) != 0) throw system_error("cannot open a number");
  int64_t sum = 0;
  if (pread(file, &sum, sizeof sum, 0) < 0) throw system_error("cannot read a number");
  sum += n;
  if (pwrite(file, &sum, sizeof sum, 0) != ssize_t(sizeof sum)) throw system_error("cannot write a number");
  close(file);
  return sum;
}

bool eventually(std::chrono::milliseconds most, const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::min(most, std::chrono::milliseconds(60'000));
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace nvx::test
