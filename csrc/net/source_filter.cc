#include "net/source_filter.h"

#include <linux/sock_diag.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/config.h"
#include "base/error.h"

namespace nvx::net {
namespace {

/// Where an IP header has its version and its source, whose words the filter keeps in these places of its own memory.
constexpr uint32_t kVersion = uint32_t(SKF_NET_OFF), kSourceOf4 = kVersion + 12, kSourceOf6 = kVersion + 8;
constexpr unsigned kWordBits = 32;

/// With fewer prefixes than this, the filter and its predecessor fit into what kernels before 6.9 let a socket have
/// (net.core.optmem_max, 20 KiB).
constexpr size_t kPrefixes = 512;

sock_filter statement(uint16_t code, uint32_t k) { return BPF_STMT(code, k); }
sock_filter unless_equal(uint32_t k, uint8_t skip) { return BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, k, 0, skip); }
sock_filter accept_packet() { return statement(BPF_RET | BPF_K, UINT32_MAX); }
sock_filter drop_packet() { return statement(BPF_RET | BPF_K, 0); }

uint32_t word_of(const AddressBytes& address, unsigned at) {
  return uint32_t(address[at]) << 24 | uint32_t(address[at + 1]) << 16 | uint32_t(address[at + 2]) << 8 |
         address[at + 3];
}

void append(std::vector<sock_filter>& program, const AddressPrefix& prefix) {
  std::vector<sock_filter> test;
  const unsigned begin = prefix.begin() / 8;
  for (unsigned word = 0; word * kWordBits < prefix.bits; ++word) {
    const unsigned bits = std::min(prefix.bits - word * kWordBits, kWordBits);
    test.push_back(statement(BPF_LD | BPF_MEM, word));
    if (bits < kWordBits) test.push_back(statement(BPF_ALU | BPF_AND | BPF_K, ~(UINT32_MAX >> bits)));
    test.push_back(unless_equal(word_of(prefix.address, begin + 4 * word), 0));
  }
  test.push_back(accept_packet());
  for (size_t i = 0; i < test.size(); ++i) {
    if (BPF_CLASS(test[i].code) == BPF_JMP) test[i].jf = uint8_t(test.size() - i - 1);
  }
  program.insert(program.end(), test.begin(), test.end());
}

std::vector<sock_filter> part(std::span<const AddressPrefix> admitted, uint8_t family) {
  std::vector<sock_filter> program;
  const unsigned words = family == 4 ? 1 : 4;
  for (unsigned word = 0; word < words; ++word) {
    const uint32_t source = family == 4 ? kSourceOf4 : kSourceOf6;
    program.push_back(statement(BPF_LD | BPF_W | BPF_ABS, source + 4 * word));
    program.push_back(statement(BPF_ST, word));
  }
  for (const AddressPrefix& prefix : admitted) {
    if (prefix.family == family) append(program, prefix);
  }
  program.push_back(drop_packet());
  return program;
}

bool attach(int socket, std::span<sock_filter> program) {
  const sock_fprog filter{.len = uint16_t(program.size()), .filter = program.data()};
  return setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) == 0;
}

}  // namespace

std::vector<sock_filter> source_filter(std::span<const AddressPrefix> admitted) {
  if (admitted.empty()) return {drop_packet()};
  const std::vector<sock_filter> of_4 = part(admitted, 4), of_6 = part(admitted, 6);
  std::vector<sock_filter> program = {
      statement(BPF_LD | BPF_B | BPF_ABS, kVersion), statement(BPF_ALU | BPF_RSH | BPF_K, 4),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 4, 1, 0), statement(BPF_JMP | BPF_JA, uint32_t(of_4.size()))};
  program.insert(program.end(), of_4.begin(), of_4.end());
  program.insert(program.end(), of_6.begin(), of_6.end());
  return program;
}

std::set<AddressPrefix> allowed_sources() {
  const auto allowed = parse_prefixes(config().allow_from);
  if (allowed) return {allowed->begin(), allowed->end()};
  throw Error(Code::kInvalid, "nvx: NVX_ALLOW_FROM=" + config().allow_from + " is not a list of addresses",
              "separate addresses and prefixes by commas: 10.0.0.7,10.1.0.0/16,fd00::/8");
}

bool holds_every_address(const std::set<AddressPrefix>& admitted) {
  return std::ranges::count(admitted, 0, &AddressPrefix::bits) == 2;
}

std::optional<size_t> attach_source_filter(int socket, const std::vector<AddressPrefix>& admitted) {
  for (size_t most = kPrefixes; most > 0; most /= 2) {
    const std::vector<AddressPrefix> prefixes = merged(admitted, most);
    std::vector<sock_filter> program = source_filter(prefixes);
    if (program.size() <= BPF_MAXINSNS && attach(socket, program)) return prefixes.size();
    if (program.size() <= BPF_MAXINSNS && errno != ENOMEM && errno != EINVAL) return std::nullopt;
  }
  return std::nullopt;
}

void detach_source_filter(int socket) {
  int listens = 1;
  socklen_t bytes = sizeof listens;
  if (getsockopt(socket, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) == 0 && !listens)
    (void)setsockopt(socket, SOL_SOCKET, SO_DETACH_FILTER, &listens, sizeof listens);
}

uint32_t dropped_by(int socket) {
  uint32_t values[SK_MEMINFO_VARS] = {};
  socklen_t bytes = sizeof values;
  return getsockopt(socket, SOL_SOCKET, SO_MEMINFO, values, &bytes) == 0 ? values[SK_MEMINFO_DROPS] : 0;
}

uint64_t Drops::of_others(uint64_t all) {
  if (ignored_until_ != Clock::time_point{}) ignored_ = std::max(ignored_, all);
  if (Clock::now() >= ignored_until_) ignored_until_ = {};  // only now: nobody may have asked in time
  return all - std::min(all, ignored_);                     // `all` lacks a listener that has been closed
}

}  // namespace nvx::net
