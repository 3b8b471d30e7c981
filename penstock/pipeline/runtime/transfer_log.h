// Every transfer of a pipeline as a line in the log, for those who must see what travels: PENSTOCK_TRACE_TRANSFERS=1.
//
//   transfers 7: send 0SEND_F3 (activation of stage 0 to stage 1): send to rank 1 float32[2, 6] on cpu, requires grad
//   transfers 8: post 0RECV_B2 (gradient of stage 1 to stage 0): nothing                     an empty batch
//   transfers 9: await 0RECV_B2 (gradient of stage 1 to stage 0): no wait, nothing is on its way
//
// Off by default; an object that is off does nothing but say so. At debug level (PENSTOCK_LOG=debug) the same lines come as debug
// lines. The number counts the lines of this rank's pipeline. Thread rule: one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/pipeline/program/program.h"

namespace penstock::pipeline {

struct LoggedTransfer {
  enum class Type : std::uint8_t { Send, Receive, HandOver };
  Type type = Type::Send;
  int peer = 0;                // global rank
  at::Tensor tensor;
  bool requires_grad = false;  // as agreed between the stages: what travels has no graph
};

class TransferLog {
 public:
  // Throws ConfigError where the variable is neither 0 nor 1.
  TransferLog();

  bool on() const;
  // Only where on(). A batch of no transfers is a line too.
  void batch(std::string_view what, const Instruction& instruction, const Channel& channel, const std::vector<LoggedTransfer>& transfers);
  // The wait for what was posted; one that is left out because nothing is on its way.
  void bypassed_wait(const Instruction& instruction, const Channel& channel);
  void waits(const Instruction& instruction, const Channel& channel, std::size_t transfers);

 private:
  void write(const std::string& line);
  bool switched_on_;
  std::uint64_t calls_ = 0;
};

}  // namespace penstock::pipeline
