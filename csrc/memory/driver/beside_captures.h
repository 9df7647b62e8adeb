#pragma once

namespace nvx {

/// While it lives, this thread may make the CUDA calls that it must, even if somebody in the process is capturing a
/// stream into a graph. Without it CUDA refuses calls that might not belong beside a capture, such as asking for an
/// event, and breaks the capture. It does not allow asking for what is itself being captured. It costs hardly anything,
/// and may be nested.
class BesideCaptures {
 public:
  BesideCaptures();
  ~BesideCaptures();
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  int before_;
};

}  // namespace nvx
