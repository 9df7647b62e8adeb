#pragma once

#include <linux/filter.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/address_prefix.h"

namespace nvx::net {

/// A filter for sockets of TCP (classic BPF, SO_ATTACH_FILTER) that lets packets in whose source address has one of
/// these prefixes. A listener that has it drops all others without an answer, so that no connection comes about; the
/// connections that it accepts inherit it.
std::vector<sock_filter> source_filter(std::span<const AddressPrefix> admitted);

/// Has a socket let in what comes from these addresses, and nothing else, from one packet to the next. Where the kernel
/// takes no filter of that length, neighbouring addresses are joined to prefixes that hold more. Returns how many
/// prefixes there are in the end, or nothing, and errno, if the kernel takes no filter.
std::optional<size_t> let_in(int socket, const std::vector<AddressPrefix>& admitted);

/// How many packets a socket has dropped.
uint32_t dropped_by(int socket);

}  // namespace nvx::net
