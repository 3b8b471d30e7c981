// Gathering and resharding of a group: the collectives, the memory they fill, and what is kept after forward.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/shard/pieces/piece_copy.h"
#include "penstock/shard/state/group_internal.h"
#include "penstock/shard/state/shard_context.h"
#include "penstock/shard/state/shard_group.h"
#include "penstock/shard/state/timed_part.h"
#include "penstock/torch/compat/streams.h"
#include "penstock/torch/dispatch/switch_data.h"

namespace penstock {

using detail::item_size;
using detail::NoHooksOrGradScope;

ShardTimes* ShardGroup::times() const { return context_ ? &context_->times : nullptr; }

void ShardGroup::check_materialized() const {
  if (!materialized_)
    throw StateError(
        fmt::format("the parameters of '{}' are fake and have no memory; call materialize_shards() before "
                    "the first forward",
                    name_));
}

void ShardGroup::before_shards_change() {
  if (gather_) {
    end_gather(*gather_);
    gather_.reset();
  }
  if (state_ == ShardGroupState::ShardedPostForward) {
    slice_.reset();
    state_ = ShardGroupState::Sharded;
  }
  if (!reads_) return;
  reads_->synchronize();
  reads_.reset();
}

void ShardGroup::fill_row(const at::Tensor& row) {
  if (flat_.device() != row.device()) reads_ = current_stream(row.device());
  const at::Tensor source =
      flat_.device() == row.device() ? flat_ : flat_.to(row.device(), /*non_blocking=*/true);
  const ShardedParameter& first = parameters_.front();
  const bool uniform = std::all_of(parameters_.begin(), parameters_.end(), [&](const ShardedParameter& p) {
    return !p.extension && p.dtype == first.dtype && p.compute_dtype == first.compute_dtype;
  });
  if (uniform) {
    const std::int64_t numel = row_bytes_ / item_size(first.compute_dtype);
    typed_part(row, 0, first.compute_dtype, {numel}).copy_(typed_part(source, 0, first.dtype, {numel}));
    return;
  }
  for (const ShardedParameter& p : parameters_) {
    const at::Tensor shard = typed_part(source, p.shard_byte, p.dtype, {p.layout().padded_numel()});
    if (p.extension)
      p.extension->encode(shard, row.narrow(0, p.row_byte, p.row_bytes));
    else
      typed_part(row, p.row_byte, p.compute_dtype, {p.layout().padded_numel()}).copy_(shard);
  }
}

void ShardGroup::unshard() {
  if (in_trial()) return;
  if (replaced_) adopt_replaced();
  if (state_ == ShardGroupState::Unsharded || gather_) return;
  check_materialized();
  const NoHooksOrGradScope quiet;
  Gather gather;
  if (context_ && !whole_is_flat_) gather.stream = context_->gather_stream(device_);
  // Every use of the stream begins after the work enqueued on the compute stream, so memory that the compute
  // stream freed is no longer read there.
  const SideStreamScope beside(gather.stream);
  if (state_ == ShardGroupState::ShardedPostForward) {
    const int ranks = std::get<ReshardTo>(reshard_after_forward_).ranks;
    gather.from_slice = true;
    gather.sent = slice_;
    gather.received = pool_.bytes(whole_bytes_, device_);
    const TimedPart timed(times(), &ShardTimes::gather);
    gather.work = mesh_.block_group(ranks).all_gather(gather.received, gather.sent,
                                                      {.label = fmt::format("gather {} again", name_)});
  } else if (!whole_is_flat_) {
    if (row_is_flat_) {
      gather.sent = flat_.narrow(0, 0, row_bytes_);
    } else {
      const TimedPart timed(times(), &ShardTimes::copy);
      gather.sent = pool_.bytes(row_bytes_, device_);
      fill_row(gather.sent);
    }
    if (mesh_.shard_ranks() == 1) {
      gather.received = gather.sent.view({1, row_bytes_});
    } else {
      gather.received =
          pool_.bytes(row_bytes_ * mesh_.shard_ranks(), device_).view({mesh_.shard_ranks(), row_bytes_});
      const TimedPart timed(times(), &ShardTimes::gather);
      gather.work = mesh_.gather_group().all_gather(gather.received.view({-1}), gather.sent,
                                                    {.label = fmt::format("gather {}", name_)});
    }
  }
  gather_ = std::move(gather);
}

void ShardGroup::allocate_whole() {
  if (whole_is_flat_) {
    // Not owned: the flat buffer lives as long as its users.
    auto* keep = new at::Tensor(flat_);
    whole_->set_data_ptr(at::DataPtr(
        flat_.data_ptr(), keep, [](void* tensor) { delete static_cast<at::Tensor*>(tensor); }, device_));
  } else {
    whole_->set_data_ptr(pool_.memory(whole_bytes_, device_));
  }
  whole_->set_nbytes(static_cast<std::size_t>(whole_bytes_));
}

void ShardGroup::free_whole() {
  whole_->set_data_ptr(at::DataPtr(nullptr, device_));
  whole_->set_nbytes(0);
}

void ShardGroup::copy_out(const at::Tensor& received) {
  at::Tensor typed;  // usually all parameters have one dtype
  for (const ShardedParameter& p : parameters_) {
    if (!p.extension) {
      const std::int64_t item = item_size(p.compute_dtype);
      if (!typed.defined() || typed.scalar_type() != p.compute_dtype)
        typed = typed_part(received, 0, p.compute_dtype, {received.size(0), row_bytes_ / item});
      join_pieces(typed, p.row_byte / item, p.layout(), p.whole);
      continue;
    }
    if (p.keeps_encoded) {
      p.whole.copy_(received.narrow(1, p.row_byte, p.row_bytes));
      continue;
    }
    const at::Tensor rows =
        pool_.empty({received.size(0), p.layout().padded_numel()}, p.compute_dtype, device_);
    for (std::int64_t rank = 0; rank < received.size(0); ++rank)
      p.extension->decode(received.select(0, rank).narrow(0, p.row_byte, p.row_bytes), rows.select(0, rank));
    join_pieces(rows, 0, p.layout(), p.whole);
  }
}

// Work that follows on the compute stream sees the received data, and the receive buffer is not reused before
// that.
void ShardGroup::end_gather(Gather& gather) {
  gather.work.wait();
  if (!gather.stream) return;
  const c10::Stream computing = current_stream(device_);
  order_after(computing, *gather.stream);
  if (gather.received.defined()) gather.received.record_stream(computing);
}

void ShardGroup::wait_for_unshard() {
  if (in_trial()) return;
  if (replaced_) adopt_replaced();
  if (state_ == ShardGroupState::Unsharded) return;
  unshard();
  const NoHooksOrGradScope quiet;
  Gather gather = std::move(*gather_);
  gather_.reset();
  {
    const TimedPart timed(times(), &ShardTimes::gather);
    end_gather(gather);
  }
  if (gather.from_slice) {
    const TimedPart timed(times(), &ShardTimes::copy);
    // The received bytes are those of the gathered storage.
    whole_->set_nbytes(static_cast<std::size_t>(whole_bytes_));
    at::DataPtr memory = pool_.memory(whole_bytes_, device_);
    whole_->set_data_ptr(std::move(memory));
    at::empty({0}, at::TensorOptions(at::kByte).device(device_))
        .set_(c10::Storage(whole_), 0, {whole_bytes_}, {1})
        .copy_(gather.received.view({-1}));
  } else {
    const TimedPart timed(times(), &ShardTimes::copy);
    allocate_whole();
    if (!whole_is_flat_) copy_out(gather.received);
  }
  // At this point the group exists twice, as received and as used.
  if (context_)
    context_->note_peak(gather.received.defined() ? static_cast<std::int64_t>(gather.received.nbytes()) : 0);
  slice_.reset();
  switch_all(true);
  state_ = ShardGroupState::Unsharded;
}

void ShardGroup::switch_all(bool to_unsharded) {
  for (const ShardedParameter& p : parameters_)
    if (const at::Tensor parameter = p.parameter(); parameter.defined())
      switch_data(parameter, to_unsharded ? p.unsharded : p.sharded);
}

void ShardGroup::reshard() {
  if (in_trial()) return;
  if (replaced_ && !writable()) adopt_replaced();
  if (gather_) {
    // The gather was not used; discard what was received.
    const TimedPart timed(times(), &ShardTimes::gather);
    end_gather(*gather_);
    gather_.reset();
  }
  if (state_ == ShardGroupState::ShardedPostForward) slice_.reset();
  if (state_ == ShardGroupState::Unsharded) {
    if (writable())
      throw StateError(fmt::format(
          "reshard of '{}': its gathered parameters are being written; end the UnshardedScope first", name_));
    const NoHooksOrGradScope quiet;
    switch_all(false);
    free_whole();
  }
  state_ = ShardGroupState::Sharded;
}

void ShardGroup::reshard_after_forward() {
  if (in_trial()) return;
  if (replaced_ && !writable()) adopt_replaced();
  if (state_ != ShardGroupState::Unsharded || writable()) return;
  if (const bool* free = std::get_if<bool>(&reshard_after_forward_)) {
    if (*free) reshard();
    return;
  }
  const NoHooksOrGradScope quiet;
  const int ranks = std::get<ReshardTo>(reshard_after_forward_).ranks;
  const std::int64_t bytes = whole_bytes_ / ranks;
  slice_ = pool_.bytes(bytes, device_);
  const at::Tensor all = at::empty({0}, at::TensorOptions(at::kByte).device(device_))
                             .set_(c10::Storage(whole_), 0, {whole_bytes_}, {1});
  slice_.copy_(all.narrow(0, bytes * (mesh_.shard_rank() % ranks), bytes));
  switch_all(false);
  free_whole();
  state_ = ShardGroupState::ShardedPostForward;
}

bool ShardGroup::reshards_after_forward() const {
  if (held_) return false;
  const bool* free = std::get_if<bool>(&reshard_after_forward_);
  return free == nullptr || *free;
}

void ShardGroup::set_reshard_after_forward(ReshardAfterForward value) {
  if (const auto* to = std::get_if<ReshardTo>(&value)) {
    if (to->ranks < 1 || mesh_.shard_ranks() % to->ranks != 0)
      throw ValueError(
          describe(fmt::format("reshard_after_forward of '{}'", name_), fmt::format("{} ranks", to->ranks),
                   fmt::format("a divisor of the {} ranks of the shard axis", mesh_.shard_ranks())));
    if (to->ranks == 1)
      value = false;  // every rank keeps everything
    else if (to->ranks == mesh_.shard_ranks())
      value = true;  // the shards themselves
  }
  if (whole_ && std::holds_alternative<ReshardTo>(value))
    throw StateError(fmt::format(
        "reshard_after_forward of '{}': a smaller mesh can only be chosen in ShardOptions", name_));
  if (state_ == ShardGroupState::ShardedPostForward) reshard();  // the slice fits only the old option
  reshard_after_forward_ = value;
  reshard_is_default_ = false;
}

}  // namespace penstock
