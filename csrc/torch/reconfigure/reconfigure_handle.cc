#include "torch/reconfigure/reconfigure_handle.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <map>
#include <set>
#include <string_view>
#include <tuple>

#include "base/hash.h"
#include "base/text.h"
#include "torch/core/argument_error.h"

namespace nvx {
namespace {

// "nvx:<rank>:<uuid>:<pid>:<process>:<group>:<host>"; `process` and `group` are hexadecimal.
constexpr std::string_view kName = "nvx";
constexpr std::string_view kNone = "none";  // replaces the uuid if there is none
constexpr size_t kFields = 7;

[[noreturn]] void refuse(const std::string& text) {
  constexpr size_t kMost = 200;
  throw_argument_error("nvx: this is no reconfigure handle of nvx: \"" + printable(text.substr(0, kMost)) +
                       "\". Next: pass on the texts of get_reconfigure_handle(), from ranks whose backend is nvx too");
}

std::string hex(uint64_t number) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(number));
  return text;
}

/// The fields between colons. The last field is the rest of the text.
std::vector<std::string_view> fields_of(std::string_view text) {
  std::vector<std::string_view> fields;
  while (fields.size() + 1 < kFields) {
    const size_t colon = text.find(':');
    if (colon == std::string_view::npos) break;
    fields.push_back(text.substr(0, colon));
    text.remove_prefix(colon + 1);
  }
  fields.push_back(text);
  return fields;
}

bool read(std::string_view text, auto* number, int base = 10) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number, base);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace

std::string MemberHandle::text() const {
  std::string text(kName);
  for (const std::string& field : {std::to_string(rank), uuid ? std::to_string(*uuid) : std::string(kNone),
                                   std::to_string(pid), hex(process.high) + hex(process.low), hex(group), host})
    text += ":" + field;
  return text;
}

MemberHandle MemberHandle::parse(const std::string& text) {
  constexpr size_t kDigits = 16;
  const std::vector<std::string_view> fields = fields_of(text);
  if (fields.size() != kFields || fields[0] != kName || fields[4].size() != 2 * kDigits) refuse(text);
  MemberHandle handle;
  if (fields[2] != kNone && !read(fields[2], &handle.uuid.emplace())) refuse(text);
  const bool numbers = read(fields[1], &handle.rank) && read(fields[3], &handle.pid) &&
                       read(fields[4].substr(0, kDigits), &handle.process.high, 16) &&
                       read(fields[4].substr(kDigits), &handle.process.low, 16) && read(fields[5], &handle.group, 16);
  if (!numbers) refuse(text);
  handle.host = printable(std::string(fields[6]));
  if (handle.text() != text) refuse(text);  // accepts only the canonical form
  return handle;
}

std::vector<MemberHandle> members_of(const std::vector<std::string>& handles, RankBy by) {
  if (handles.empty()) throw_argument_error("nvx: reconfigure needs the handles of all ranks, this rank's included");
  if (std::set<std::string>(handles.begin(), handles.end()).size() != handles.size())
    throw_argument_error("nvx: reconfigure was given a handle twice: each rank has one of its own");
  std::vector<MemberHandle> members;
  std::map<std::tuple<ArenaId, uint64_t>, std::string> known;  // the first handle of each rank
  for (const std::string& handle : handles) {
    const MemberHandle& member = members.emplace_back(MemberHandle::parse(handle));
    const auto [first, fresh] = known.emplace(std::tuple(member.process, member.group), handle);
    if (!fresh) {
      throw_argument_error("nvx: reconfigure was given two handles of one rank, " + first->second + " and " + handle +
                           ": each rank has one of its own, until it is reconfigured. Next: pass on the "
                           "text that get_reconfigure_handle() returns now");
    }
  }
  if (by == RankBy::kHandle) {
    std::ranges::sort(members, [](const MemberHandle& a, const MemberHandle& b) {
      const auto key = [](const MemberHandle& m) { return std::tuple(!m.uuid, m.rank, m.process, m.group); };
      return key(a) < key(b);
    });
  }
  return members;
}

uint64_t digest_of(const std::vector<MemberHandle>& members) {
  Hash hash;
  for (const MemberHandle& member : members) hash.add(member.text());
  return hash.value();
}

}  // namespace nvx
