#include "penstock/pipeline/runtime/step_actions.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "penstock/base/describe.h"
#include "penstock/base/env.h"
#include "penstock/base/log.h"
#include "penstock/errors.h"
#include "penstock/pipeline/contract/stage_meta.h"
#include "penstock/torch/compat/dtype.h"
#include "penstock/torch/tree/dense_layout.h"

namespace penstock {

using schedule::Action;
using schedule::ActionKind;

namespace {

// An announcement has one row of numbers per tensor: element type, number of dims, sizes and strides of the
// local part, sizes and strides of the global tensor. A row is all zeros if no gradient is sent.
constexpr std::int64_t kMaxDims = 25;
constexpr std::int64_t kRow = 2 + 4 * kMaxDims;

at::Tensor announce(const OptionalTensorMetas& metas) {
  at::Tensor rows = at::zeros({static_cast<std::int64_t>(metas.size()), kRow}, at::kLong);
  auto* row = rows.data_ptr<std::int64_t>();
  for (const auto& meta : metas) {
    if (meta) {
      const TensorRecord& local = local_record(*meta);
      const auto dims = static_cast<std::int64_t>(local.shape().size());
      if (dims > kMaxDims)
        throw PipeliningMetadataError(describe("dims of a tensor whose shape is announced",
                                               std::to_string(dims), fmt::format("at most {}", kMaxDims),
                                               "reshape it before it leaves the stage"));
      row[0] = *dtype_number(local.dtype());
      row[1] = dims;
      const auto* whole = std::get_if<DistributedRecord>(&*meta);
      const std::vector<std::int64_t>* parts[] = {&local.shape(), &local.stride(),
                                                  whole != nullptr ? &whole->global_shape() : nullptr,
                                                  whole != nullptr ? &whole->global_stride() : nullptr};
      for (std::int64_t i = 0; i < 4; ++i)
        if (parts[i] != nullptr) std::copy(parts[i]->begin(), parts[i]->end(), row + 2 + i * kMaxDims);
    }
    row += kRow;
  }
  return rows;
}

// Returns the announced record of a tensor whose record in the plan is `agreed`.
TensorMeta announced_meta(const at::Tensor& rows, std::size_t tensor, const TensorMeta& agreed) {
  const auto* row = rows.data_ptr<std::int64_t>() + static_cast<std::int64_t>(tensor) * kRow;
  const DtypeEntry* dtype =
      row[0] >= 0 && row[0] <= 255 ? find_dtype(static_cast<std::uint8_t>(row[0])) : nullptr;
  if (dtype == nullptr || !dtype->here || row[1] < 0 || row[1] > kMaxDims)
    throw PipeliningMetadataError(
        describe("an announced tensor", fmt::format("element type {}, {} dims", row[0], row[1]),
                 fmt::format("a known type and 0 to {} dims", kMaxDims), "run the same build on all ranks"));
  const auto part = [&](std::int64_t i) {
    return std::vector<std::int64_t>(row + 2 + i * kMaxDims, row + 2 + i * kMaxDims + row[1]);
  };
  const bool differentiable = at::isFloatingType(*dtype->here) || at::isComplexType(*dtype->here);
  TensorRecord local(part(0), part(1), *dtype->here, differentiable && requires_grad(agreed));
  const auto* whole = std::get_if<DistributedRecord>(&agreed);
  if (whole == nullptr) return local;
  return DistributedRecord(std::move(local), part(2), part(3), whole->placements(), whole->mesh_key());
}

// At debug level one line for each action; StageRunner adds what it made.
void log_action(const Action& action) {
  if (log().should_log(spdlog::level::debug)) [[unlikely]]
    log().debug("pipeline: stage {} runs {}", action.stage(), schedule::to_text(action));
}

// A second stream is useful if overlapped units run on one device that supports it.
std::optional<OverlapStreams> streams_of(const std::vector<StageRunner>& runners, bool overlaps) {
  if (!overlaps || runners.empty()) return std::nullopt;
  const at::Device device = runners.front().stage().device();
  for (const StageRunner& each : runners)
    if (each.stage().device() != device) return std::nullopt;
  return OverlapStreams::of(device);
}

}  // namespace

TorchStepActions::TorchStepActions(std::vector<StageRunner>& runners, const ChannelGroups& groups,
                                   std::vector<SkipTensor> skips, UnitOptions units, BorderOptions borders)
    : runners_(runners),
      groups_(groups),
      skips_(std::move(skips)),
      codec_(std::move(borders)),
      streams_(streams_of(runners_, units.any)) {
  const auto on_one_kind = [&] {
    return streams_ || std::all_of(runners_.begin(), runners_.end(),
                                   [](const StageRunner& each) { return each.stage().device().is_cpu(); });
  };
  if (units.any && units.overlap_exchanges && on_one_kind())
    // A pipeline of one rank has no group of its own.
    halves_ = std::make_unique<OverlappedHalves>(groups_.control() ? groups_.control().timeout()
                                                                   : default_timeout());
  for (StageRunner& each : runners_) by_stage_[each.stage().index()] = &each;
}

void TorchStepActions::begin(const StepDescription& step,
                             const std::vector<std::shared_ptr<const MicrobatchPlan>>& plans,
                             StepContext context, std::function<void(int)> reduce) {
  clear();
  step_ = &step;
  plans_ = plans;
  context_ = context;
  reduce_ = std::move(reduce);
  peak_live_ = 0;
  units_on_two_streams_ = 0;
  earlier_exchanges_ = halves_ ? halves_->overlapped_exchanges() : 0;
  codec_.begin_step();
  if (streams_) streams_->begin_step();
  for (StageRunner& each : runners_) {
    std::vector<const StagePlan*> of_stage;
    for (const auto& microbatch : plans_) {
      const auto at = microbatch->find(each.stage().index());
      of_stage.push_back(at == microbatch->end() ? nullptr : &at->second);
    }
    each.begin_step(step.has_backward, std::move(of_stage));
  }
}

void TorchStepActions::clear() {
  step_ = nullptr;
  reduce_ = nullptr;
  arrivals_.clear();
  waiting_for_sizes_.clear();
  sends_.clear();
  unanswered_.clear();
}

StageRunner& TorchStepActions::runner(int stage) { return *by_stage_.at(stage); }

const StagePlan& TorchStepActions::plan(int stage, int microbatch) const {
  return plans_[static_cast<std::size_t>(microbatch)]->at(stage);
}

std::size_t TorchStepActions::skip_ordinal(int skip, int stage, bool from) const {
  std::size_t ordinal = 0;
  for (int k = 0; k < skip; ++k)
    ordinal +=
        (from ? skips_[static_cast<std::size_t>(k)].from : skips_[static_cast<std::size_t>(k)].to) == stage;
  return ordinal;
}

TorchStepActions::Span TorchStepActions::received_by(const Channel& channel, const StagePlan& plan) const {
  const bool forward = channel.kind == Channel::Kind::Activation;
  const std::size_t main = forward ? plan.main_inputs : plan.main_outputs;
  if (channel.skip < 0) return {0, main};
  return {main + skip_ordinal(channel.skip, channel.to_stage, !forward), 1};
}

TorchStepActions::Span TorchStepActions::sent_by(const Channel& channel, const StagePlan& plan) const {
  const bool forward = channel.kind == Channel::Kind::Activation;
  const std::size_t main = forward ? plan.main_outputs : plan.main_inputs;
  if (channel.skip < 0) return {0, main};
  return {main + skip_ordinal(channel.skip, channel.from_stage, forward), 1};
}

const TensorMeta* TorchStepActions::Agreed::meta(std::size_t i) const {
  const std::size_t place = span.first + i;
  if (forward) return &(outputs ? *plan->meta.outputs : *plan->meta.inputs)[place];
  const auto& gradient = (outputs ? *plan->meta.output_grads : *plan->meta.input_grads)[place];
  return gradient ? &*gradient : nullptr;
}

TorchStepActions::Agreed TorchStepActions::agreed_by(const Channel& channel, int microbatch,
                                                     bool sends) const {
  const StagePlan& of = plan(sends ? channel.from_stage : channel.to_stage, microbatch);
  const bool forward = channel.kind == Channel::Kind::Activation;
  Agreed agreed{&of, forward, forward == sends, sends ? sent_by(channel, of) : received_by(channel, of),
                false};
  if (agreed.span.count == 0) return agreed;
  if (agreed.outputs ? of.announces_output(agreed.span.first) : of.announces_input(agreed.span.first))
    for (std::size_t i = 0; i < agreed.span.count && !agreed.announced; ++i)
      agreed.announced = agreed.meta(i) != nullptr;
  return agreed;
}

StepContext TorchStepActions::context_of(const Action& action) const {
  StepContext context = context_;
  context.microbatch = *action.microbatch();
  return context;
}

// Runs the action on the stream of its pair, which is the caller's unless its forward ran in an overlapped
// unit.
void TorchStepActions::run_alone(const Action& action) {
  if (!streams_) return run_action(action);
  const int stage = action.stage();
  const int microbatch = *action.microbatch();
  const c10::Stream stream = streams_->of_pair(stage, microbatch);
  runner(stage).record_stream(microbatch, stream);
  if (!streams_->is_second(stream)) return run_action(action);
  streams_->fork();
  {
    const c10::StreamGuard guard(stream);
    run_action(action);
  }
  streams_->join();
}

void TorchStepActions::run_action(const Action& action) {
  log_action(action);
  StageRunner& stage = runner(action.stage());
  const int microbatch = *action.microbatch();
  const auto m = static_cast<std::size_t>(microbatch);
  const StepContext context = context_of(action);
  switch (action.kind()) {
    case ActionKind::Forward:
      stage.forward(microbatch, context, step_->args[m], step_->kwargs[m], step_->targets[m]);
      break;
    case ActionKind::Backward:
      stage.backward(microbatch, context);
      break;
    case ActionKind::BackwardInput:
      stage.backward_input(microbatch, context);
      break;
    case ActionKind::BackwardWeight:
      stage.backward_weight(microbatch, context);
      break;
    default:
      PENSTOCK_INVARIANT(false, "an instruction that computes something else than F, B, I or W");
  }
}

void TorchStepActions::compute(std::span<const Instruction> unit) {
  unit.size() == 1 ? run_alone(unit[0].action) : run_unit(unit);
  count_live();
  reap();
}

std::optional<c10::Stream> TorchStepActions::stream_for(const Action& action,
                                                        const std::optional<c10::Stream>& of_backward) {
  if (!streams_) return std::nullopt;
  const int stage = action.stage();
  const int microbatch = *action.microbatch();
  if (action.kind() == ActionKind::Forward && of_backward)
    streams_->set_pair(stage, microbatch, streams_->other(*of_backward));
  const c10::Stream stream = streams_->of_pair(stage, microbatch);
  runner(stage).record_stream(microbatch, stream);
  return stream;
}

template <class Body>
void TorchStepActions::timed_piece(int member, const Body& body) {
  const std::int64_t begin = steady_now_ns();
  body();
  pieces_.push_back({member, begin, steady_now_ns()});
}

// The members of a unit that run block by block: forwards, and backwards.
struct TorchStepActions::UnitParts {
  struct Part {
    int member;
    std::optional<c10::Stream> stream;
    std::unique_ptr<StageRunner::Forward> forward;
    std::unique_ptr<StageRunner::Backward> backward;
    bool advance() const {
      std::optional<c10::StreamGuard> guard;
      if (stream) guard.emplace(*stream);
      return forward ? forward->advance() : backward->advance();
    }
  };
  std::vector<Part> forwards, backwards;

  // Runs the next block of each part; removes the parts that are done.
  template <class Timed>
  static void advance(std::vector<Part>& parts, const Timed& timed) {
    std::erase_if(parts, [&](const Part& each) {
      bool more = false;
      timed(each.member, [&] { more = each.advance(); });
      return !more;
    });
  }
};

// Runs the members in turns: on CPU so that the transfers of one can start before the other is done, on CUDA
// so that both streams have work.
void TorchStepActions::run_unit(std::span<const Instruction> unit) {
  std::optional<c10::Stream> of_backward;
  if (streams_) {
    for (const Instruction& each : unit)
      if (each.action.kind() != ActionKind::Forward && !of_backward)
        of_backward = streams_->of_pair(each.action.stage(), *each.action.microbatch());
    streams_->fork();
  }
  UnitParts parts;
  bool on_first = false, on_second = false;
  pieces_.clear();
  for (int member = 0; member < static_cast<int>(unit.size()); ++member) {
    const Action& action = unit[static_cast<std::size_t>(member)].action;
    StageRunner& stage = runner(action.stage());
    const int microbatch = *action.microbatch();
    const auto m = static_cast<std::size_t>(microbatch);
    const std::optional<c10::Stream> stream = stream_for(action, of_backward);
    if (stream) (streams_->is_second(*stream) ? on_second : on_first) = true;
    std::optional<c10::StreamGuard> guard;
    if (stream) guard.emplace(*stream);
    // A weight gradient is logged by run_action().
    if (action.kind() != ActionKind::BackwardWeight) log_action(action);
    if (action.kind() == ActionKind::Forward) {
      parts.forwards.push_back({member, stream,
                                stage.start_forward(microbatch, context_of(action), step_->args[m],
                                                    step_->kwargs[m], step_->targets[m]),
                                nullptr});
    } else if (action.kind() == ActionKind::BackwardWeight) {
      timed_piece(member, [&] { run_action(action); });
    } else {
      parts.backwards.push_back(
          {member, stream, nullptr,
           stage.start_backward(microbatch, context_of(action), action.kind() == ActionKind::BackwardInput)});
    }
  }
  count_live();
  if (halves_ && !parts.forwards.empty() && !parts.backwards.empty()) {
    run_halves(parts);
  } else {
    const auto timed = [this](int member, const auto& body) { timed_piece(member, body); };
    while (!parts.forwards.empty() || !parts.backwards.empty())
      for (auto* half : {&parts.forwards, &parts.backwards}) UnitParts::advance(*half, timed);
  }
  if (streams_) {
    streams_->join();
    units_on_two_streams_ += on_first && on_second;
  }
}

void TorchStepActions::run_halves(UnitParts& parts) {
  const auto all_of = [](std::vector<UnitParts::Part>& of_half) {
    return [&of_half](OverlappedHalves::Half& half) {
      while (!of_half.empty()) {
        UnitParts::advance(of_half, [&half](int member, const auto& body) { half.piece(member, body); });
        if (!of_half.empty()) half.hand_over();
      }
    };
  };
  const std::vector<UnitPiece> pieces =
      halves_->run(all_of(parts.forwards), all_of(parts.backwards), runners_.front().stage().device());
  pieces_.insert(pieces_.end(), pieces.begin(), pieces.end());
}

void TorchStepActions::count_live() {
  int live = 0;
  for (const StageRunner& each : runners_) live += each.live();
  peak_live_ = std::max(peak_live_, live);
}

void TorchStepActions::receive(Arrival& arrival, at::Tensor tensor, const Channel& channel, int tag,
                               const std::string& label) {
  arrival.works.push_back(groups_.group_of(channel).irecv(tensor, groups_.global_rank(channel.from_rank),
                                                          {.tag = tag, .label = label, .timeout = {}}));
}

// Posts the receives of a channel, now that the sizes are known. A tensor is sent as its memory, so it
// arrives with its strides.
void TorchStepActions::start_receive(Arrival& arrival, const Instruction& instruction, const Channel& channel,
                                     int microbatch) {
  const std::string label = schedule::to_text(instruction.action);
  const int peer = groups_.global_rank(channel.from_rank);
  std::vector<LoggedTransfer> logged;
  const bool logs = transfer_log_.on();
  StageRunner& stage = runner(channel.to_stage);
  const Agreed agreed = agreed_by(channel, microbatch, false);
  arrival.started = true;
  for (std::size_t i = 0; i < agreed.span.count; ++i) {
    const TensorMeta* meta = agreed.meta(i);
    if (agreed.announced) arrival.announced.emplace_back();
    if (meta == nullptr) {
      arrival.tensors.emplace_back();
      continue;
    }
    if (agreed.announced) {
      TensorMeta told = announced_meta(arrival.announcement, i, *meta);
      stage.check_announced(microbatch, agreed.forward, agreed.span.first + i, told, agreed.varies(i));
      arrival.announced.back() = agreed.varies(i) ? std::move(told) : *meta;
      meta = &*arrival.announced.back();
    }
    arrival.tensors.push_back(make_raw_tensor(*meta, stage.stage().device()));
    at::Tensor memory = memory_of(arrival.tensors.back());
    if (codec_.changes(*meta)) {
      arrival.messages.resize(agreed.span.count, {at::Tensor(), *meta});
      memory = codec_.buffer_for(memory, *meta);
      arrival.messages[i] = {memory, *meta};
    }
    receive(arrival, memory, channel, groups_.tag(channel, i), label);
    if (logs)
      logged.push_back({LoggedTransfer::Type::Receive, peer, arrival.tensors.back(), agreed.needs_grad(i)});
  }
  if (logs) transfer_log_.batch("post", instruction, channel, logged);
}

void TorchStepActions::post(const Instruction& instruction, const Channel& channel) {
  const int microbatch = *instruction.action.microbatch();
  const Agreed agreed = agreed_by(channel, microbatch, false);
  Arrival& arrival = arrivals_[{instruction.channel, microbatch}];
  if (!agreed.announced) return start_receive(arrival, instruction, channel, microbatch);
  arrival.announcement = at::empty({static_cast<std::int64_t>(agreed.span.count), kRow}, at::kLong);
  receive(arrival, arrival.announcement, channel, groups_.announcement_tag(channel),
          schedule::to_text(instruction.action));
  if (transfer_log_.on())
    transfer_log_.batch("post announcement of", instruction, channel,
                        {{LoggedTransfer::Type::Receive, groups_.global_rank(channel.from_rank),
                          arrival.announcement, false}});
  waiting_for_sizes_[instruction.channel].push_back(microbatch);
}

void TorchStepActions::await(const Instruction& instruction, const Channel& channel) {
  const int microbatch = *instruction.action.microbatch();
  const bool forward = channel.kind == Channel::Kind::Activation;
  // Announced tensors are received in the order of the announcements, which is the order in which they are
  // sent.
  if (auto& waiting = waiting_for_sizes_[instruction.channel]; !waiting.empty()) {
    while (!arrivals_[{instruction.channel, microbatch}].started && !waiting.empty()) {
      const int next = waiting.front();
      waiting.pop_front();
      Arrival& arrival = arrivals_[{instruction.channel, next}];
      comm::wait_all(arrival.works);
      arrival.works.clear();
      start_receive(arrival, instruction, channel, next);
    }
  }
  auto node = arrivals_.extract({instruction.channel, microbatch});
  PENSTOCK_INVARIANT(!node.empty() && node.mapped().started, "a program posts what it waits for");
  Arrival& arrival = node.mapped();
  if (transfer_log_.on())
    arrival.works.empty() ? transfer_log_.bypassed_wait(instruction, channel)
                          : transfer_log_.waits(instruction, channel, arrival.works.size());
  comm::wait_all(arrival.works);
  for (std::size_t i = 0; i < arrival.messages.size(); ++i)
    if (const auto& [message, meta] = arrival.messages[i]; message.defined())
      codec_.decode(message, memory_of(arrival.tensors[i]), meta);
  if (!forward) free_answered(channel, microbatch);
  StageRunner& stage = runner(channel.to_stage);
  const Span span = received_by(channel, plan(channel.to_stage, microbatch));
  if (forward) {
    stage.take_inputs(microbatch, span.first, std::move(arrival.tensors), std::move(arrival.announced));
  } else {
    stage.take_output_grads(microbatch, span.first, std::move(arrival.tensors), std::move(arrival.announced));
  }
}

void TorchStepActions::send(const Instruction& instruction, const Channel& channel) {
  const int microbatch = *instruction.action.microbatch();
  const Agreed agreed = agreed_by(channel, microbatch, true);
  const Span span = agreed.span;
  StageRunner& stage = runner(channel.from_stage);
  OptionalTensorMetas made;
  if (agreed.announced) made = stage.made_metas(microbatch, agreed.forward, span.first, span.count);
  const std::vector<at::Tensor> tensors = agreed.forward
                                              ? stage.give_outputs(microbatch, span.first, span.count)
                                              : stage.give_input_grads(microbatch, span.first, span.count);
  const comm::Group& group = groups_.group_of(channel);
  const int peer = groups_.global_rank(channel.to_rank);
  const std::string label = schedule::to_text(instruction.action);
  const bool logs = transfer_log_.on();
  const std::size_t earlier = sends_.size();
  std::vector<LoggedTransfer> logged;
  if (agreed.announced) {
    for (auto& meta : made)
      if (meta) meta = dense_meta(*meta);
    const at::Tensor announcement = announce(made);
    if (logs) logged.push_back({LoggedTransfer::Type::Send, peer, announcement, false});
    sends_.push_back(group.isend(announcement, peer,
                                 {.tag = groups_.announcement_tag(channel), .label = label, .timeout = {}}));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    // Sent in the layout that the receiver expects, whatever the stage made.
    const TensorMeta& meta = agreed.varies(i) ? *made[i] : *agreed.meta(i);
    const TensorRecord& record = local_record(meta);
    const bool fits = tensors[i].strides() == at::IntArrayRef(record.stride()) &&
                      tensors[i].is_contiguous() && !tensors[i].is_conj() && !tensors[i].is_neg();
    const at::Tensor sent =
        fits ? tensors[i] : in_layout(tensors[i], dense_strides(record.shape(), record.stride()));
    if (logs) logged.push_back({LoggedTransfer::Type::Send, peer, sent, agreed.needs_grad(i)});
    at::Tensor message = memory_of(sent);
    if (codec_.changes(meta)) message = codec_.encode(message, meta);
    codec_.count(message);
    sends_.push_back(
        group.isend(message, peer, {.tag = groups_.tag(channel, i), .label = label, .timeout = {}}));
  }
  if (agreed.forward)
    unanswered_[{channel.from_stage, channel.to_stage, channel.skip, microbatch}].assign(
        sends_.begin() + static_cast<std::ptrdiff_t>(earlier), sends_.end());
  if (logs) transfer_log_.batch("send", instruction, channel, logged);
}

// A gradient answers an output: whoever sent it has received the output, so that waiting for the send does
// not block, and the output can be freed. Not every backend can tell without waiting that a send has
// completed.
void TorchStepActions::free_answered(const Channel& gradient, int microbatch) {
  auto sent = unanswered_.extract({gradient.to_stage, gradient.from_stage, gradient.skip, microbatch});
  if (!sent.empty()) comm::wait_all(sent.mapped());
}

// Passed on unchanged: with their strides, and without a copy.
void TorchStepActions::pass(const Instruction& instruction, const Channel& channel) {
  const int microbatch = *instruction.action.microbatch();
  StageRunner& from = runner(channel.from_stage);
  StageRunner& to = runner(channel.to_stage);
  const Agreed out = agreed_by(channel, microbatch, true);
  const Agreed in = agreed_by(channel, microbatch, false);
  OptionalTensorMetas made;
  if (out.announced) made = from.made_metas(microbatch, out.forward, out.span.first, out.span.count);
  std::vector<at::Tensor> tensors = out.forward
                                        ? from.give_outputs(microbatch, out.span.first, out.span.count)
                                        : from.give_input_grads(microbatch, out.span.first, out.span.count);
  if (transfer_log_.on()) {
    std::vector<LoggedTransfer> logged;
    for (std::size_t i = 0; i < tensors.size(); ++i)
      if (tensors[i].defined())
        logged.push_back({LoggedTransfer::Type::HandOver, groups_.global_rank(channel.to_rank), tensors[i],
                          out.needs_grad(i)});
    transfer_log_.batch("pass", instruction, channel, logged);
  }
  for (std::size_t i = 0; i < made.size(); ++i)
    if (made[i]) to.check_announced(microbatch, in.forward, in.span.first + i, *made[i], in.varies(i));
  if (in.forward) {
    to.take_inputs(microbatch, in.span.first, std::move(tensors), std::move(made));
  } else {
    to.take_output_grads(microbatch, in.span.first, std::move(tensors), std::move(made));
  }
}

void TorchStepActions::stage_wide(const Instruction& instruction) {
  const int stage = instruction.action.stage();
  log_action(instruction.action);
  StageRunner& of = runner(stage);
  switch (instruction.action.kind()) {
    case ActionKind::Unshard:
      of.sharded().unshard();
      break;
    case ActionKind::Reshard:
      of.sharded().reshard();
      break;
    case ActionKind::ReduceGrad:
      of.run_joined_weights();
      of.reduce_gradients();
      if (reduce_) reduce_(stage);
      break;
    default:
      break;
  }
}

// Frees the tensors of completed sends.
void TorchStepActions::reap() {
  for (; !sends_.empty() && sends_.front().done(); sends_.pop_front()) sends_.front().wait();
}

void TorchStepActions::finish() {
  for (StageRunner& each : runners_) {
    // For a schedule without REDUCE_GRAD.
    each.run_joined_weights();
    each.reduce_gradients();
    each.sharded().end_step();
  }
  for (; !sends_.empty(); sends_.pop_front()) sends_.front().wait();
  unanswered_.clear();
}

}  // namespace penstock
