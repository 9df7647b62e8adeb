#pragma once

namespace nvx {

/// While it lives, this thread may ask and tell GPUs what it must, though somebody in the process captures a stream
/// into a graph. Else CUDA refuses what might not belong beside a capture, as asking for an event, and breaks the
/// capture. Nothing that is captured itself may be asked for all the same. Costs nothing worth counting; may be nested.
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
