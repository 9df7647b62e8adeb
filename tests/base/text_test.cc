// Text from other processes.

#include "base/text.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>

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

TEST(ContentOf, IsThatOfAFileOnly) {
  const std::string path = testing::TempDir() + "nvx_content" + std::to_string(getpid());
  std::ofstream(path) << "some text";
  EXPECT_EQ(content_of(path, 100), "some text");
  EXPECT_EQ(content_of(path, 4), "some");
  std::ofstream(path).close();
  EXPECT_EQ(content_of(path, 100), "");
  std::remove(path.c_str());
  EXPECT_FALSE(content_of(path, 100));
  EXPECT_EQ(errno, ENOENT);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  for (const std::string& endless : {path, std::string("/dev/zero"), std::string("/")}) {
    EXPECT_FALSE(content_of(endless, 100)) << endless;
    EXPECT_EQ(errno, 0) << endless;
  }
  std::remove(path.c_str());
}

}  // namespace
}  // namespace nvx
