// Text from other processes.

#include "base/text.h"

#include <gtest/gtest.h>

namespace nvx {
namespace {

TEST(Printable, LeavesTextAlone) {
  for (const char* text : {"", "rank 3 (pid 7, host a)", "K\xc3\xb6ln", "\xe6\x9d\xb1\xe4\xba\xac", "\xf0\x9f\x99\x82"})
    EXPECT_EQ(printable(text), text);
}

TEST(Printable, ReplacesWhatControlsATerminalAndWhatIsNoText) {
  EXPECT_EQ(printable("a\nb\tc\x1b[2Jd\x7f"), "a b c [2Jd ");
  EXPECT_EQ(printable("a\xc2\x9b"
                      "2J"),
            "a  2J");
  EXPECT_EQ(printable("K\xc3\xb6ln"), "K\xc3\xb6ln");
  EXPECT_EQ(printable("K\xc3"), "K?") << "cut off";
  EXPECT_EQ(printable("\xe6\x9d"), "??");
  EXPECT_EQ(printable("\xff\xfe\x80z"), "???z");
  EXPECT_EQ(printable("\xc0\xaf"), "??") << "too long a form";
  EXPECT_EQ(printable("\xed\xa0\x80"), "???") << "half a pair";
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "????") << "beyond the last character";
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a b");
}

}  // namespace
}  // namespace nvx
