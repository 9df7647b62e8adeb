#include "base/error.h"
#include "net/ucx/ucx.h"

namespace nvx::net {

std::unique_ptr<Link> open_ucx(const std::string& /*store_host*/) {
  throw Error(Code::kSystem, "nvx: this build has no UCX, which ranks on several hosts need",
              "install UCX's headers ('pip install libucx-cu13' or 'apt-get install libucx-dev') and build nvx again "
              "('pip install --no-build-isolation .')");
}

bool built_with_ucx() { return false; }

}  // namespace nvx::net
