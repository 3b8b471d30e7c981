#include "penstock/pipeline/runtime/trace_collection.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstring>
#include <limits>

#include "penstock/base/describe.h"
#include "penstock/comm/message/message.h"
#include "penstock/errors.h"
#include "penstock/pipeline/report/step_trace.h"

namespace penstock {

namespace {

constexpr int kRounds = 16;
constexpr int kClockTag = 1 << 27;
constexpr int kSizeTag = kClockTag + 1;
constexpr int kTimesTag = kClockTag + 2;
constexpr comm::MessageKind kTimes("STEP");
constexpr std::uint16_t kTimesVersion = 3;

struct RankStepTimes {
  std::uint64_t step = 0;
  bool has_backward = false;
  ClockOffset clock;
  std::vector<TimedInstruction> times;
};

std::vector<std::uint8_t> to_bytes(const TraceRequest& request) {
  comm::MessageWriter writer(kTimes, kTimesVersion);
  writer.write(request.step)
      .write(request.compile.has_backward)
      .write(request.clock.offset_ns)
      .write(request.clock.error_ns);
  std::vector<std::int64_t> times;
  times.reserve(2 * request.times.size());
  for (const TimedInstruction& each : request.times) {
    times.push_back(each.begin_ns);
    times.push_back(each.end_ns);
  }
  std::vector<std::int64_t> pieces;
  for (std::size_t i = 0; i < request.times.size(); ++i)
    for (const UnitPiece& piece : request.times[i].pieces)
      pieces.insert(pieces.end(), {static_cast<std::int64_t>(i), piece.member, piece.begin_ns, piece.end_ns,
                                   piece.kind == UnitPiece::Kind::Exchange});
  writer.write(times).write(pieces);
  return writer.finish();
}

RankStepTimes from_bytes(const std::vector<std::uint8_t>& bytes) {
  comm::MessageReader reader(bytes, kTimes, {kTimesVersion, kTimesVersion});
  RankStepTimes found;
  reader.read(found.step).read(found.has_backward).read(found.clock.offset_ns).read(found.clock.error_ns);
  const auto times = reader.read<std::vector<std::int64_t>>();
  const auto pieces = reader.read<std::vector<std::int64_t>>();
  reader.expect_end();
  for (std::size_t i = 0; i + 1 < times.size(); i += 2) found.times.push_back({times[i], times[i + 1]});
  for (std::size_t i = 0; i + 4 < pieces.size(); i += 5)
    found.times.at(static_cast<std::size_t>(pieces[i]))
        .pieces.push_back({static_cast<int>(pieces[i + 1]), pieces[i + 2], pieces[i + 3],
                           pieces[i + 4] != 0 ? UnitPiece::Kind::Exchange : UnitPiece::Kind::Compute});
  return found;
}

at::Tensor number(std::int64_t value) {
  at::Tensor tensor = at::empty({1}, at::kLong);
  *tensor.data_ptr<std::int64_t>() = value;
  return tensor;
}

void send_bytes(const comm::Group& control, const std::vector<std::uint8_t>& bytes) {
  at::Tensor payload = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::memcpy(payload.data_ptr(), bytes.data(), bytes.size());
  control.send(number(payload.numel()), control.rank_at(0),
               {.tag = kSizeTag, .label = "size of the times of a step", .timeout = {}});
  control.send(payload, control.rank_at(0), {.tag = kTimesTag, .label = "times of a step", .timeout = {}});
}

std::vector<std::uint8_t> receive_bytes(const comm::Group& control, int position) {
  at::Tensor size = number(0);
  control.recv(size, control.rank_at(position),
               {.tag = kSizeTag, .label = "size of the times of a step", .timeout = {}});
  const std::int64_t count = *size.data_ptr<std::int64_t>();
  if (count < 0 || count > static_cast<std::int64_t>(comm::kDefaultMaxMessageBytes))
    throw PipeliningMetadataError(describe(
        fmt::format("times of rank {}", position), fmt::format("{} bytes", count),
        fmt::format("at most {}", comm::kDefaultMaxMessageBytes), "run the same build on all ranks"));
  at::Tensor payload = at::empty({count}, at::kByte);
  control.recv(payload, control.rank_at(position),
               {.tag = kTimesTag, .label = "times of a step", .timeout = {}});
  const auto* data = payload.data_ptr<std::uint8_t>();
  return {data, data + count};
}

}  // namespace

ClockOffset align_clock(const comm::Group& control) {
  if (!control) return {};
  const auto options = [] {
    return comm::P2POptions{.tag = kClockTag, .label = "alignment of clocks", .timeout = {}};
  };
  at::Tensor remote_time = number(0);
  if (control.axis_rank() == 0) {
    for (int position = 1; position < control.size(); ++position)
      for (int round = 0; round < kRounds; ++round) {
        control.recv(remote_time, control.rank_at(position), options());
        control.send(number(steady_now_ns()), control.rank_at(position), options());
      }
    return {};
  }
  ClockOffset best{0, std::numeric_limits<std::int64_t>::max()};
  for (int round = 0; round < kRounds; ++round) {
    const std::int64_t asked = steady_now_ns();
    control.send(remote_time, control.rank_at(0), options());
    control.recv(remote_time, control.rank_at(0), options());
    const std::int64_t half = (steady_now_ns() - asked) / 2;
    if (half < best.error_ns) best = {*remote_time.data_ptr<std::int64_t>() - (asked + half), half};
  }
  // Processes of one host share the steady clock; the steady clocks of two hosts, which count from their
  // boot, are never that close.
  if (best.offset_ns >= -best.error_ns && best.offset_ns <= best.error_ns) best.offset_ns = 0;
  return best;
}

std::optional<StepTrace> collect_trace(const comm::Group& control, const TraceRequest& request) {
  if (control && control.axis_rank() != 0) {
    send_bytes(control, to_bytes(request));
    return std::nullopt;
  }
  StepTrace trace{.step = request.step, .schedule = request.lowered};
  for (int rank = 0; rank < request.lowered.ranks(); ++rank) {
    RankStepTimes found;
    if (rank == 0) {
      found = {request.step, request.compile.has_backward, request.clock, request.times};
    } else {
      found = from_bytes(receive_bytes(control, rank));
    }
    if (found.step != request.step || found.has_backward != request.compile.has_backward)
      throw PipeliningMetadataError(
          describe(fmt::format("last step of rank {}", rank),
                   fmt::format("step {}, {}", found.step, found.has_backward ? "training" : "evaluation"),
                   fmt::format("step {}, {}, as on rank 0", request.step,
                               request.compile.has_backward ? "training" : "evaluation"),
                   "request a trace after the same step on all ranks"));
    trace.ranks.push_back(trace_events(compile_program(request.lowered, rank, request.skips, request.compile),
                                       found.times, found.clock.offset_ns));
    trace.clock_error_ns.push_back(found.clock.error_ns);
  }
  start_at_zero(trace);
  return trace;
}

}  // namespace penstock
