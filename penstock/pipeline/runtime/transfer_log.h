// Logs every transfer of a pipeline, if PENSTOCK_TRACE_TRANSFERS=1.
//
//   transfers 7: send 0SEND_F3 (activation of stage 0 to stage 1): send to rank 1 int64[2] on cpu, no grad
//   transfers 8: post 0RECV_B2 (gradient of stage 1 to stage 0): nothing
//   transfers 9: await 0RECV_B2 (gradient of stage 1 to stage 0): no wait, nothing is on its way
//
// Off by default, without overhead. At debug level (PENSTOCK_LOG=debug) the same lines are logged at debug
// level. The number counts the lines of this rank's pipeline. Thread safety: one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/pipeline/program/program.h"

namespace penstock {

struct LoggedTransfer {
  enum class Type : std::uint8_t { Send, Receive, HandOver };
  Type type = Type::Send;
  int peer = 0;  // global rank
  at::Tensor tensor;
  bool requires_grad = false;  // as agreed between the stages: a transferred tensor has no graph
};

class TransferLog {
 public:
  // Throws ConfigError if the variable is neither 0 nor 1.
  TransferLog();

  bool on() const;
  // Call only if on(). A batch without transfers is logged, too.
  void batch(std::string_view what, const Instruction& instruction, const Channel& channel,
             const std::vector<LoggedTransfer>& transfers);
  // Log the wait for posted receives, or that there is none because nothing was posted.
  void bypassed_wait(const Instruction& instruction, const Channel& channel);
  void waits(const Instruction& instruction, const Channel& channel, std::size_t transfers);

 private:
  void write(const std::string& line);
  bool switched_on_;
  std::uint64_t calls_ = 0;
};

}  // namespace penstock
