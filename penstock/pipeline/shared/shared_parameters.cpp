#include "penstock/shared_parameters.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/comm/message/message.h"
#include "penstock/dtensor/tensor/layout_text.h"
#include "penstock/errors.h"
#include "penstock/fully_shard.h"
#include "penstock/gradients.h"
#include "penstock/pipeline/shared/tie_plan.h"
#include "penstock/shard/state/shard_info.h"
#include "penstock/torch/tree/distributed_type.h"

namespace penstock {

namespace {

constexpr comm::MessageKind kTiesMessage{"TIES"};
constexpr int kTiesVersion = 2;
// Gradients are gathered in one message for each tie, and added in the order of stages, up to this size in
// all.
constexpr std::int64_t kMostGatheredBytes = std::int64_t{1} << 20;

at::Tensor local_of_use(const at::Tensor& tensor) { return local_if_distributed(tensor, kDetach); }

bool uses_share_memory(const at::Tensor& a, const at::Tensor& b) {
  return local_of_use(a).data_ptr() == local_of_use(b).data_ptr();
}

std::vector<std::uint8_t> encode_declaration(const DeclaredUses& declared) {
  std::vector<std::int32_t> ties, stages, again;
  std::vector<std::string> names, layouts;
  for (const PlacedUse& use : declared.uses) {
    ties.push_back(use.tie);
    stages.push_back(use.stage);
    again.push_back(use.again ? 1 : 0);
    names.push_back(use.name);
    layouts.push_back(use.layout);
  }
  comm::MessageWriter writer(kTiesMessage, kTiesVersion);
  writer.write(declared.ties).write(ties).write(stages).write(again).write(names).write(layouts);
  return writer.finish();
}

DeclaredUses decode_declaration(const at::Tensor& bytes) {
  const auto* first = bytes.data_ptr<std::uint8_t>();
  comm::MessageReader reader({first, static_cast<std::size_t>(bytes.numel())}, kTiesMessage,
                             {kTiesVersion, kTiesVersion});
  DeclaredUses declared;
  reader.read(declared.ties);
  const auto ties = reader.read<std::vector<std::int32_t>>(),
             stages = reader.read<std::vector<std::int32_t>>(),
             again = reader.read<std::vector<std::int32_t>>();
  const auto names = reader.read<std::vector<std::string>>(),
             layouts = reader.read<std::vector<std::string>>();
  reader.expect_end();
  for (std::size_t i = 0; i < ties.size(); ++i)
    declared.uses.push_back({ties[i], stages.at(i), names.at(i), layouts.at(i), again.at(i) != 0});
  return declared;
}

// Returns what all ranks of the group declare, in group order.
std::vector<DeclaredUses> exchange_declarations(const comm::Group& group, const DeclaredUses& own) {
  const std::vector<std::uint8_t> message = encode_declaration(own);
  const at::Tensor size = at::full({1}, static_cast<std::int64_t>(message.size()), at::kLong);
  const at::Tensor sizes = at::empty({group.size()}, at::kLong);
  group.all_gather(sizes, size, {.label = "sizes of the declarations of ties", .timeout = {}}).wait();
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group.size(); ++rank)
    parts.push_back(at::empty({sizes.data_ptr<std::int64_t>()[rank]}, at::kByte));
  const at::Tensor bytes = at::empty({static_cast<std::int64_t>(message.size())}, at::kByte);
  std::memcpy(bytes.data_ptr(), message.data(), message.size());
  group.all_gather_uneven(parts, bytes, {.label = "declarations of ties", .timeout = {}}).wait();
  std::vector<DeclaredUses> all;
  for (const at::Tensor& part : parts) all.push_back(decode_declaration(part));
  return all;
}

// Adds the gradients of uses on this rank, in order; the first one gets the sum.
void add_here(const std::vector<at::Tensor>& uses) {
  at::Tensor& sum = uses.front().mutable_grad();
  for (std::size_t i = 1; i < uses.size(); ++i) {
    at::Tensor& gradient = uses[i].mutable_grad();
    if (sum.defined() && gradient.defined())
      local_of_use(sum).add_(local_of_use(gradient));
    else if (gradient.defined())
      sum = gradient;
    gradient.reset();
  }
}

// Returns the local part of the gradient, which is zeros if there was none.
at::Tensor gradient_or_zeros(const at::Tensor& parameter) {
  at::Tensor& gradient = parameter.mutable_grad();
  if (!gradient.defined()) gradient = at::zeros_like(parameter.detach(), at::MemoryFormat::Preserve);
  return local_of_use(gradient);
}

}  // namespace

ParameterTie tie(std::vector<std::string> names) { return {std::move(names)}; }

std::vector<ParameterUse> parameter_uses(const std::vector<PipelineStage>& stages) {
  std::vector<ParameterUse> uses;
  for (const PipelineStage& stage : stages) {
    const StageModule::Modules& modules = stage.module().modules();
    for (std::size_t i = 0; i < modules.size(); ++i)
      for (const auto& entry : modules[i]->named_parameters())
        uses.push_back({modules.size() == 1 ? entry.key() : fmt::format("{}.{}", i, entry.key()),
                        stage.index(), entry.value()});
  }
  return uses;
}

std::vector<ParameterUse> parameter_uses(const std::vector<PipelineStage>& stages,
                                         const schedule::StageMap& map) {
  std::vector<ParameterUse> uses = parameter_uses(stages);
  for (ParameterUse& use : uses) use.stage -= map.chain_of(use.stage).first_stage;
  return uses;
}

struct SharedParameters::Impl {
  // A tie with several uses, of which this rank has one or more.
  struct Tie {
    std::string name;  // in optimizers and checkpoints
    std::string text;
    std::vector<at::Tensor> uses;  // of this rank, in the order of stages
    bool trainable = false;
    bool counts = false;               // whether this rank has the use that counts in norms
    std::optional<comm::Group> group;  // if other ranks have uses, too
    TieCover cover;
    std::size_t most_uses = 0;  // on one member of the cover

    bool is_gathered() const {
      const at::Tensor part = local_of_use(uses.front());
      return static_cast<std::int64_t>(part.nbytes() * cover.terms.size()) <= kMostGatheredBytes;
    }
  };

  Impl(const std::vector<ParameterTie>& declared, std::vector<ParameterUse> uses,
       const SharedParameterOptions& options);
  void add_tie(const ParameterTie& declared, const TiePlan& plan, std::vector<at::Tensor> uses,
               const SharedParameterOptions& options, const std::vector<int>& ranks, int own);
  void describe_tie(const TiePlan& plan, const std::vector<int>& ranks);

  // The sum of one tie over ranks, in flight.
  struct Sum {
    const Tie* tie;
    bool present;             // whether this rank has a gradient
    at::Tensor sent, result;  // gathered: of this rank, of all ranks; reduced: the same tensor
    at::Tensor mark;          // reduced: how many ranks have a gradient
    comm::Work values, marks;
  };
  Sum start_gathered(const Tie& tie) const;
  Sum start_reduced(const Tie& tie) const;
  void finish_gathered(Sum& sum) const;
  void finish_reduced(Sum& sum) const;
  const Tie* find(const at::Tensor& parameter) const;

  std::vector<Tie> ties;
  std::vector<std::string> lines;
};

SharedParameters::Impl::Impl(const std::vector<ParameterTie>& declared, std::vector<ParameterUse> uses,
                             const SharedParameterOptions& options) {
  std::vector<int> ranks = options.ranks;
  if (ranks.empty())
    for (int rank = 0; rank < options.world.size(); ++rank) ranks.push_back(rank);
  const auto place = std::find(ranks.begin(), ranks.end(), options.world.rank());
  if (place == ranks.end())
    throw ValueError(describe("ranks of a pipeline with shared parameters",
                              fmt::format("{}", fmt::join(ranks, ", ")),
                              fmt::format("a list with this rank, {}", options.world.rank())));
  const int own = static_cast<int>(place - ranks.begin());
  std::stable_sort(uses.begin(), uses.end(),
                   [](const ParameterUse& a, const ParameterUse& b) { return a.stage < b.stage; });

  DeclaredUses here;
  std::map<std::string, std::int32_t> tie_of;
  for (const ParameterTie& each : declared) {
    for (const std::string& name : each.names)
      tie_of.emplace(name, static_cast<std::int32_t>(here.ties.size()));
    here.ties.push_back(each.names);
  }
  std::vector<std::vector<at::Tensor>> found(declared.size());
  for (const ParameterUse& use : uses) {
    const auto known = tie_of.find(use.name);
    if (known == tie_of.end()) continue;
    ensure_sharded(use.parameter);
    std::vector<at::Tensor>& tensors = found[static_cast<std::size_t>(known->second)];
    // Autograd has added the gradients of all names of one tensor already.
    const bool again = std::any_of(tensors.begin(), tensors.end(),
                                   [&](const at::Tensor& each) { return each.is_same(use.parameter); });
    here.uses.push_back(
        {known->second, use.stage, use.name, layout_text("", use.parameter).substr(2), again});
    if (!again) tensors.push_back(use.parameter);
  }
  const std::vector<DeclaredUses> all =
      ranks.size() == 1
          ? std::vector<DeclaredUses>{here}
          : exchange_declarations(
                options.world.group_of(
                    ranks, {.purpose = "declare ties", .p2p = comm::P2PTransport::Auto, .timeout = {}}),
                here);
  const std::vector<TiePlan> plans = plan_ties(all);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    if (plans[i].stages.size() < 2) continue;
    if (ranks.size() > 1) describe_tie(plans[i], ranks);
    if (!found[i].empty()) add_tie(declared[i], plans[i], std::move(found[i]), options, ranks, own);
  }
}

void SharedParameters::Impl::describe_tie(const TiePlan& plan, const std::vector<int>& ranks) {
  std::vector<std::string> who;
  for (const TieCover& cover : plan.covers) {
    std::vector<int> members;
    for (const int member : cover.members) members.push_back(ranks[static_cast<std::size_t>(member)]);
    who.push_back(members.size() == 1 ? fmt::format("rank {}, without communication", members.front())
                                      : fmt::format("ranks {}", fmt::join(members, ", ")));
  }
  lines.push_back(fmt::format("shared parameter {}: {} uses at stages {}; gradients are added on {}",
                              plan.text, plan.stages.size(), fmt::join(plan.stages, ", "),
                              fmt::join(who, " and on ")));
}

void SharedParameters::Impl::add_tie(const ParameterTie& declared, const TiePlan& plan,
                                     std::vector<at::Tensor> uses, const SharedParameterOptions& options,
                                     const std::vector<int>& ranks, int own) {
  Tie tie;
  tie.name = declared.names.front();
  tie.text = plan.text;
  tie.trainable = uses.front().requires_grad();
  tie.cover = *std::find_if(plan.covers.begin(), plan.covers.end(), [&](const TieCover& cover) {
    return std::binary_search(cover.members.begin(), cover.members.end(), own);
  });
  const TieCover& first = plan.covers.front();
  tie.counts = first.members[first.terms.front().member] == own;
  std::vector<std::size_t> uses_of(tie.cover.members.size());
  for (const TieCover::Term& term : tie.cover.terms)
    tie.most_uses = std::max(tie.most_uses, ++uses_of[term.member]);
  if (tie.cover.members.size() > 1) {
    std::vector<int> members;
    for (const int member : tie.cover.members) members.push_back(ranks[static_cast<std::size_t>(member)]);
    tie.group = options.world.group_of(
        members, {.purpose = "shared parameters", .p2p = comm::P2PTransport::Auto, .timeout = {}});
  }
  // Sharded stages gather, free and reduce their own parameters: each keeps its own shard.
  for (std::size_t i = 1; i < uses.size(); ++i)
    if (!shard_of(uses[i]) && !shard_of(uses.front()) && !uses_share_memory(uses.front(), uses[i]))
      uses[i].set_data(uses.front());
  tie.uses = std::move(uses);
  ties.push_back(std::move(tie));
}

// Every rank sends the gradients of all its uses, each with a mark that says whether there is one.
SharedParameters::Impl::Sum SharedParameters::Impl::start_gathered(const Tie& tie) const {
  const at::Tensor like = local_of_use(tie.uses.front());
  const std::int64_t elements = like.numel(), rows = static_cast<std::int64_t>(tie.most_uses);
  Sum sum{.tie = &tie, .present = false, .sent = at::zeros({rows, elements + 1}, like.options())};
  for (std::size_t i = 0; i < tie.uses.size(); ++i) {
    at::Tensor& gradient = tie.uses[i].mutable_grad();
    if (!gradient.defined()) continue;
    const at::Tensor row = sum.sent.select(0, static_cast<std::int64_t>(i));
    row.narrow(0, 0, elements).copy_(local_of_use(gradient).reshape({-1}));
    row.narrow(0, elements, 1).fill_(1);
    sum.present = true;
    if (i > 0) gradient.reset();
  }
  const auto members = static_cast<std::int64_t>(tie.cover.members.size());
  sum.result = at::empty({members, rows, elements + 1}, like.options());
  sum.values = tie.group->all_gather(sum.result, sum.sent,
                                     {.label = fmt::format("gradients of {}", tie.text), .timeout = {}});
  return sum;
}

void SharedParameters::Impl::finish_gathered(Sum& sum) const {
  sum.values.wait();
  const at::Tensor& parameter = sum.tie->uses.front();
  at::Tensor total;
  for (const TieCover::Term& term : sum.tie->cover.terms) {
    const at::Tensor each = sum.result.select(0, static_cast<std::int64_t>(term.member))
                                .select(0, static_cast<std::int64_t>(term.use));
    total = total.defined() ? total.add_(each) : each.clone();
  }
  const std::int64_t elements = total.numel() - 1;
  // A rank that has a gradient itself need not wait for the device to know that there is one.
  if (!sum.present && total[elements].item<double>() == 0) return;
  const at::Tensor gradient = gradient_or_zeros(parameter);
  gradient.copy_(total.narrow(0, 0, elements).view(gradient.sizes()));
}

SharedParameters::Impl::Sum SharedParameters::Impl::start_reduced(const Tie& tie) const {
  add_here(tie.uses);
  const at::Tensor& parameter = tie.uses.front();
  const bool present = parameter.grad().defined();
  const at::Tensor local = gradient_or_zeros(parameter);
  Sum sum{.tie = &tie,
          .present = present,
          .sent = local,
          .result = local.contiguous(),
          .mark = at::full({1}, present ? 1.0 : 0.0, local.options())};
  sum.marks = tie.group->all_reduce(sum.mark, comm::ReduceOp::Sum,
                                    {.label = fmt::format("uses of {}", tie.text), .timeout = {}});
  sum.values = tie.group->all_reduce(sum.result, comm::ReduceOp::Sum,
                                     {.label = fmt::format("gradient of {}", tie.text), .timeout = {}});
  return sum;
}

void SharedParameters::Impl::finish_reduced(Sum& sum) const {
  sum.marks.wait();
  sum.values.wait();
  if (!sum.result.is_same(sum.sent)) sum.sent.copy_(sum.result);
  if (!sum.present && sum.mark.item<double>() == 0) sum.tie->uses.front().mutable_grad().reset();
}

const SharedParameters::Impl::Tie* SharedParameters::Impl::find(const at::Tensor& parameter) const {
  for (const Tie& tie : ties)
    for (const at::Tensor& use : tie.uses)
      if (use.is_same(parameter)) return &tie;
  return nullptr;
}

SharedParameters::SharedParameters(const std::vector<ParameterTie>& ties,
                                   const std::vector<ParameterUse>& uses,
                                   const SharedParameterOptions& options)
    : impl_(std::make_unique<Impl>(ties, uses, options)) {}
SharedParameters::~SharedParameters() = default;
SharedParameters::SharedParameters(SharedParameters&&) noexcept = default;

void SharedParameters::copy_values() {
  const at::NoGradGuard no_grad;
  for (const Impl::Tie& tie : impl_->ties) {
    if (!tie.group) continue;
    ensure_sharded(tie.uses);
    const at::Tensor local = local_of_use(tie.uses.front()), values = local.contiguous();
    tie.group
        ->broadcast(values, tie.group->rank_at(static_cast<int>(tie.cover.terms.front().member)),
                    {.label = fmt::format("values of {}", tie.text), .timeout = {}})
        .wait();
    if (!values.is_same(local)) local.copy_(values);
  }
  share_values();
}

void SharedParameters::sum_gradients() {
  const at::NoGradGuard no_grad;
  std::vector<optim::NamedParameter> uses;
  for (const Impl::Tie& tie : impl_->ties)
    if (tie.trainable)
      for (const at::Tensor& use : tie.uses) uses.push_back({tie.name, use});
  optim::settle_gradients(uses);
  // All are started before the first one is waited for: what they cost is mostly latency.
  std::vector<Impl::Sum> sums;
  for (const Impl::Tie& tie : impl_->ties) {
    if (!tie.trainable) continue;
    if (!tie.group)
      add_here(tie.uses);
    else
      sums.push_back(tie.is_gathered() ? impl_->start_gathered(tie) : impl_->start_reduced(tie));
  }
  for (Impl::Sum& sum : sums) {
    if (sum.mark.defined())
      impl_->finish_reduced(sum);
    else
      impl_->finish_gathered(sum);
  }
}

void SharedParameters::share_values() {
  const at::NoGradGuard no_grad;
  for (const Impl::Tie& tie : impl_->ties) {
    ensure_sharded(tie.uses);
    for (std::size_t i = 1; i < tie.uses.size(); ++i)
      if (!uses_share_memory(tie.uses.front(), tie.uses[i])) tie.uses[i].copy_(tie.uses.front());
  }
}

void SharedParameters::clear_gradients() {
  for (const at::Tensor& use : further_uses()) use.mutable_grad().reset();
}

bool SharedParameters::is_shared(const at::Tensor& parameter) const {
  return impl_->find(parameter) != nullptr;
}

bool SharedParameters::is_further_use(const at::Tensor& parameter) const {
  const Impl::Tie* tie = impl_->find(parameter);
  return tie != nullptr && !tie->uses.front().is_same(parameter);
}

bool SharedParameters::counts(const at::Tensor& parameter) const {
  const Impl::Tie* tie = impl_->find(parameter);
  return tie == nullptr || (tie->counts && tie->uses.front().is_same(parameter));
}

std::vector<at::Tensor> SharedParameters::further_uses() const {
  std::vector<at::Tensor> all;
  for (const Impl::Tie& tie : impl_->ties) all.insert(all.end(), tie.uses.begin() + 1, tie.uses.end());
  return all;
}

std::vector<optim::NamedParameter> SharedParameters::each_once(
    const std::vector<optim::NamedParameter>& parameters) const {
  std::vector<optim::NamedParameter> once;
  std::set<const at::TensorImpl*> known;
  for (const optim::NamedParameter& each : parameters) {
    if (!known.insert(each.tensor.unsafeGetTensorImpl()).second) continue;
    const Impl::Tie* tie = impl_->find(each.tensor);
    if (tie == nullptr)
      once.push_back(each);
    else if (tie->uses.front().is_same(each.tensor))
      once.push_back({tie->name, each.tensor});
  }
  return once;
}

std::vector<std::string> SharedParameters::report() const { return impl_->lines; }

}  // namespace penstock
