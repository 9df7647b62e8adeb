#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/handle.h"
#include "memory/shm/process_watch.h"
#include "memory/shm/unix_socket.h"

namespace nvx {

/// The first message of a rank to a relay, and of a relay to its clients. Fixed layout; comes from peers.
struct PeerInfo {
  static constexpr uint32_t kMagic = 0x6378766e;  // "nvxc"
  uint32_t magic = kMagic;
  int32_t rank = -1;
  char description[120] = {};  ///< describes the rank in errors

  static PeerInfo of(int rank, const std::string& description);
};

/// A rank of this host, and its process.
struct LocalPeer {
  PeerInfo info;
  ProcessWatch process;
};

/// The first rank of a host to arrive watches the others, and passes on to them what it reads from the store, so that
/// they need not read it there. The data consists of records, which all ranks receive in the same order.
class HostRelay {
 public:
  explicit HostRelay(const PeerInfo& own);
  const std::string& name() const { return name_; }
  /// Readable when a process has connected.
  int fd() const { return listener_.get(); }

  /// Adds the next record. Throws Error if there is no memory for it.
  void publish(std::span<const uint8_t> record);
  /// Adds the last record: the reason why no other will come.
  void give_up(std::span<const uint8_t> reason);
  /// Accepts new connections, a bounded number, and sends all clients the records that exist. Never blocks.
  void serve();
  /// The ranks that have arrived, also those that have gone away.
  const std::vector<LocalPeer>& peers() const { return ranks_; }
  bool has_lost_clients() { return std::exchange(lost_, false); }

 private:
  struct Client {
    LocalSocket socket;
    size_t sent = 0;          // records
    bool introduced = false;  // its info has arrived ...
    bool answered = false;    // ... and that of the relay has been sent
  };
  struct Record {
    Fd file;
    bool is_reason;
  };
  void add(std::span<const uint8_t> record, bool is_reason);
  bool serve(Client& client);

  const PeerInfo own_;
  std::string name_;
  LocalSocket listener_;
  std::vector<Record> records_;
  std::vector<Client> clients_;
  std::vector<LocalPeer> ranks_;
  bool lost_ = false;
};

/// A rank's connection to the relay of its host.
class RelayClient {
 public:
  RelayClient(const std::string& name, const PeerInfo& own);
  /// False once its relay is gone: no further records will come.
  bool open() const { return open_; }
  /// The next record; nothing if none comes within the span.
  std::optional<std::vector<uint8_t>> next(std::chrono::milliseconds span);
  /// The reason that the relay gave when it gave up.
  const std::optional<std::vector<uint8_t>>& reason() const { return reason_; }
  bool introduced() const { return introduced_; }
  /// The process of the relay, once this one has connected.
  const ProcessWatch& process() const { return process_; }

 private:
  void connect();
  std::optional<std::vector<uint8_t>> take();

  const std::string name_;
  const PeerInfo own_;
  bool open_ = false;
  bool connected_ = false;   // this rank has introduced itself
  bool introduced_ = false;  // the relay has introduced itself
  LocalSocket socket_;       // none while the relay's backlog is full
  ProcessWatch process_;
  std::optional<std::vector<uint8_t>> reason_;
};

}  // namespace nvx
