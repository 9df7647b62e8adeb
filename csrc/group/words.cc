// How what happens to a group is worded, and what ranks write into their pads of it.

#include <cstdio>
#include <cstring>

#include "group/group.h"

namespace nvx {

using kernel::Collective;

std::string seconds(double span) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f s", span);
  return text;
}

std::string seconds(const Deadline& deadline) { return seconds(deadline.elapsed_s()); }

size_t advice_at(const std::string& text) {
  for (const char* mark : {"; Next: ", ". Next: "}) {
    if (const size_t at = text.find(mark); at != std::string::npos) return at;
  }
  return text.size();
}

std::string read_note(const kernel::FailureNote& note) {
  return printable(std::string(note.text, strnlen(note.text, sizeof note.text)));
}

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

std::string told_by_words(const std::string& why, const std::string& teller, const std::string& me) {
  const size_t awaited = why.find(kWaitingFor);
  const std::string name = me.substr(0, me.find(')'));  // in which more may be said of it
  const bool here = awaited != std::string::npos && why.find(name, awaited) != std::string::npos;
  return "told by " + teller +
         (here ? ". Next: see what kept this rank, or allow more time (init_process_group(timeout=), NVX_TIMEOUT_S, "
                 "nvx.set_timeout)"
               : ". Next: see the log of the rank named first");
}

Status met_in(const Status& status, const std::string& context) {
  const std::string& text = status.what();
  const size_t at = advice_at(text);
  const std::string advice = at == text.size() ? "" : ". " + text.substr(at + 2);
  return {status.code(), text.substr(0, at) + "; " + context + advice};
}

void write_note(kernel::FailureNote& note, Code code, const std::string& text) {
  if (note.state.load(std::memory_order_relaxed) != kernel::FailureNote::kNone) return;
  note.state.store(kernel::FailureNote::kBeingWritten, std::memory_order_relaxed);
  note.code = uint32_t(code);
  std::snprintf(note.text, sizeof note.text, "%s", text.c_str());
  note.state.store(kernel::FailureNote::kReadable, std::memory_order_release);
}

}  // namespace nvx
