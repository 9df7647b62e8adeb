// How what happens to a group is worded, and what ranks write into their pads of it.

#include <cstdio>

#include "group/group.h"

namespace nvx {

using kernel::Collective;

std::string seconds(double span) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f s", span);
  return text;
}

std::string seconds(const Deadline& deadline) { return seconds(deadline.elapsed_s()); }

std::string describe(const kernel::Fingerprint& f) {
  std::string text = f.collective <= Collective::kBarrier ? name(f.collective) : "an unknown operation";
  if (f.collective == Collective::kBarrier || f.collective == Collective::kNone) return text;
  text += "(";
  if (reduces(f.collective) && size_t(f.op) < kernel::kReduceOpCount) text += std::string(nvx::name(f.op)) + ", ";
  text += size_t(f.dtype) < kernel::kDTypeCount ? nvx::name(f.dtype) : "?";
  if (f.form == kernel::Form::kSparse) text += ", sparse";
  if (f.count) text += ", " + std::to_string(f.count) + " elements";
  if (f.root >= 0) text += ", root " + std::to_string(f.root);
  return text + ")";
}

std::string contrast(const Called& one, const Called& other) {
  const kernel::Fingerprint &a = one.what, &b = other.what;
  std::string text = one.who + " called " + describe(a) + ", " + other.who + " called " + describe(b);
  if (a.collective == b.collective && a.root != b.root) return text + ": their roots differ";
  if (describe(a) != describe(b)) return text;
  return text +
         (a.history != b.history ? ", after operations that differed already" : ", with different sizes by rank");
}

void write_note(kernel::PostedNote& posted, const Failure& failure) {
  if (posted.state.load(std::memory_order_relaxed) != kernel::PostedNote::kNone) return;
  posted.state.store(kernel::PostedNote::kBeingWritten, std::memory_order_relaxed);
  posted.note = FailureNote::of(failure);
  posted.state.store(kernel::PostedNote::kReadable, std::memory_order_release);
}

std::optional<Failure> read_note(const kernel::PostedNote& posted, int ranks) {
  return FailureNote::read(std::as_bytes(std::span(&posted.note, 1)), ranks);
}

}  // namespace nvx
