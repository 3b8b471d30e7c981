#include "penstock/checkpoint/tensors/world_agreement.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <utility>

namespace penstock::checkpoint {

namespace {

at::Tensor tensor_of(const Bytes& bytes) {
  at::Tensor tensor = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

Bytes bytes_of(const at::Tensor& tensor) {
  const auto* data = static_cast<const std::uint8_t*>(tensor.data_ptr());
  return Bytes(data, data + tensor.numel());
}

}  // namespace

Bytes WorldAgreement::exchange(const std::string& topic, Bytes own,
                               const std::function<Bytes(std::vector<Bytes>)>& judge) {
  if (group_.size() == 1) return judge({std::move(own)});
  const comm::OpOptions label{.label = "checkpoint: " + topic};
  const at::Tensor sizes = at::empty({group_.size()}, at::kLong);
  group_.all_gather(sizes, at::full({1}, static_cast<std::int64_t>(own.size()), at::kLong), label).wait();
  std::vector<at::Tensor> messages;
  for (int rank = 0; rank < group_.size(); ++rank)
    messages.push_back(at::empty({sizes.data_ptr<std::int64_t>()[rank]}, at::kByte));
  group_.all_gather_uneven(messages, tensor_of(own), label).wait();
  Bytes verdict;
  if (rank_ == 0) {
    std::vector<Bytes> results;
    for (const at::Tensor& message : messages) results.push_back(bytes_of(message));
    verdict = judge(std::move(results));
  }
  const at::Tensor size = at::full({1}, static_cast<std::int64_t>(verdict.size()), at::kLong);
  group_.broadcast(size, 0, label).wait();
  at::Tensor bytes = rank_ == 0 ? tensor_of(verdict) : at::empty({size.item<std::int64_t>()}, at::kByte);
  group_.broadcast(bytes, 0, label).wait();
  return bytes_of(bytes);
}

WorldStatusBoard::WorldStatusBoard(const comm::World& world) : world_(world) {
  at::Tensor number = at::zeros({1}, at::kLong);
  if (world.rank() == 0) {
    std::random_device random;
    number.fill_(static_cast<std::int64_t>((std::uint64_t{random()} << 31) ^ random()));
  }
  if (world.size() > 1) world.group().broadcast(number, 0, {.label = "checkpoint writer"}).wait();
  key_ = fmt::format("checkpoint/{:x}", static_cast<std::uint64_t>(number.item<std::int64_t>()));
}

}  // namespace penstock::checkpoint
