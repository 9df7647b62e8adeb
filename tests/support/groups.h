#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "base/deadline.h"
#include "group/group.h"
#include "group/p2p/mailbox.h"
#include "support/ranks.h"
#include "support/specs.h"

/// Groups of threads or of forked processes, and their operations.
namespace nvx::test {

inline GroupOptions options(const std::string& name, int rank, int size, uint32_t first_epoch = 0) {
  GroupOptions options;
  options.name = name;
  options.rank = rank;
  options.size = size;
  options.timeout = std::chrono::seconds(60);
  options.first_epoch = first_epoch;
  return options;
}

/// Runs the body on each rank of a group, as threads.
inline void in_group(const std::string& name, int ranks, const std::function<void(Group& group, int rank)>& body) {
  MemoryStore store;
  as_threads(ranks, [&](int rank) {
    Group group(store, options(name, rank, ranks));
    body(group, rank);
  });
}

/// The operation of one rank's side of a spec.
inline Operation operation_of(const Spec& spec, const Side& side, int ranks) {
  const kernel::Fingerprint f = side.fingerprint();
  Operation o;
  o.collective = spec.collective;
  o.dtype = spec.dtype;
  o.op = spec.op;
  o.root = spec.root;
  o.in = side.in();
  o.out = side.out();
  o.count = spec.collective == kernel::Collective::kAllReduce || spec.collective == kernel::Collective::kReduce
                ? spec.counts[0]
                : size_t(f.count);
  o.factor = side.factor();
  o.send = Pieces(size_t(ranks));
  o.recv = Pieces(size_t(ranks));
  for (size_t r = 0; r < size_t(ranks); ++r) {
    o.send[r] = side.send()[r];
    o.recv[r] = side.recv()[r];
  }
  return o;
}

inline Status run(Group& group, const Spec& spec) {
  Side side(spec, group.rank(), group.size());
  Operation operation = operation_of(spec, side, group.size());
  return group.execute(operation);
}

/// Runs a spec in a group on this rank's thread. Returns what went wrong, or an empty text.
inline std::string perform(Group& group, const Spec& spec) {
  Side side(spec, group.rank(), group.size());
  Operation operation = operation_of(spec, side, group.size());
  const Status status = group.execute(operation);
  return status.ok() ? side.verdict() : status.what();
}

/// A barrier of all ranks.
inline Status barrier(Group& group) {
  Operation operation;
  operation.collective = kernel::Collective::kBarrier;
  operation.send = Pieces(size_t(group.size()));
  operation.recv = Pieces(size_t(group.size()));
  return group.execute(operation);
}

inline std::shared_ptr<Message> message(int peer, int64_t tag, std::byte* data, size_t bytes) {
  auto message = std::make_shared<Message>();
  message->peer = peer;
  message->tag = tag;
  message->data = data;
  message->bytes = bytes;
  return message;
}

/// Sends or receives a message, and waits for its end.
inline Status send_now(Group& group, const std::shared_ptr<Message>& message, Runner runner = Runner::kCaller) {
  group.mailbox().send(message, runner);
  return group.mailbox().wait(*message);
}
inline Status receive_now(Group& group, const std::shared_ptr<Message>& message, Runner runner = Runner::kCaller) {
  group.mailbox().receive(message, runner);
  return group.mailbox().wait(*message);
}

/// The error of creating the group, which must come long before the set-up's timeout.
inline std::string set_up_error(Store& store, const GroupOptions& options) {
  const auto began = Clock::now();
  try {
    Group group(store, options);
  } catch (const Error& error) {
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(20)) << error.what();
    return error.what();
  }
  return "nothing";
}

}  // namespace nvx::test

#define EXPECT_CONTAINS(status, text) \
  EXPECT_NE((status).what().find(text), std::string::npos) << "says: " << (status).what()
