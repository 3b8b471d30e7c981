#include "penstock/pipeline/runtime/transfer_log.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "penstock/base/env.h"
#include "penstock/base/log.h"
#include "penstock/torch/tree/tensor_meta.h"

namespace penstock {

namespace {

std::string type_text(const LoggedTransfer& transfer) {
  switch (transfer.type) {
    case LoggedTransfer::Type::Send:
      return fmt::format("send to rank {}", transfer.peer);
    case LoggedTransfer::Type::Receive:
      return fmt::format("receive from rank {}", transfer.peer);
    case LoggedTransfer::Type::HandOver:
      return "hand over";
  }
  return "?";
}

std::string place(const Instruction& instruction, const Channel& channel) {
  return fmt::format("{} ({})", schedule::to_text(instruction.action), to_text(channel));
}

}  // namespace

TransferLog::TransferLog() : switched_on_(env_choice("PENSTOCK_TRACE_TRANSFERS", {"0", "1"}, "0") == "1") {}

bool TransferLog::on() const { return switched_on_ || log().should_log(spdlog::level::debug); }

void TransferLog::write(const std::string& line) {
  log().log(switched_on_ ? spdlog::level::info : spdlog::level::debug, "transfers {}: {}", ++calls_, line);
}

void TransferLog::batch(std::string_view what, const Instruction& instruction, const Channel& channel,
                        const std::vector<LoggedTransfer>& transfers) {
  std::string list;
  for (const LoggedTransfer& transfer : transfers)
    list += fmt::format("{}{} {} on {}, {}", list.empty() ? "" : "; ", type_text(transfer),
                        to_string(meta_of(transfer.tensor)), transfer.tensor.device().str(),
                        transfer.requires_grad ? "requires grad" : "no grad");
  write(fmt::format("{} {}: {}", what, place(instruction, channel), list.empty() ? "nothing" : list));
}

void TransferLog::bypassed_wait(const Instruction& instruction, const Channel& channel) {
  write(fmt::format("await {}: no wait, nothing is on its way", place(instruction, channel)));
}

void TransferLog::waits(const Instruction& instruction, const Channel& channel, std::size_t transfers) {
  write(fmt::format("await {}: for {}", place(instruction, channel), transfers));
}

}  // namespace penstock
