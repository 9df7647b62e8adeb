#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "group/setup/store.h"

/// The stores of tests.
namespace nvx::test {

/// A store for the threads of one process.
class MemoryStore : public Store {
 public:
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::optional<std::vector<uint8_t>> get(const std::string& key, std::chrono::milliseconds span) override;
  int64_t add(const std::string& key, int64_t n) override;
  void remove(const std::string& key) override;
  /// All keys, except counters.
  std::vector<std::string> keys();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::vector<uint8_t>> values_;
  std::map<std::string, int64_t> numbers_;
};

/// A store for the processes of one host: one file per key, in a folder that the creating process removes.
class FolderStore : public Store {
 public:
  FolderStore();
  ~FolderStore() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::optional<std::vector<uint8_t>> get(const std::string& key, std::chrono::milliseconds span) override;
  int64_t add(const std::string& key, int64_t n) override;

 private:
  std::string path(const std::string& key) const;

  std::string folder_;
  pid_t owner_;
};

/// Sleeps until the condition holds, or until the timeout. Returns whether it holds.
bool eventually(std::chrono::milliseconds most, const std::function<bool()>& condition);

}  // namespace nvx::test
