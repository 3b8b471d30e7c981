// c10d's ProcessGroupGloo as programs use it without Penstock, for comparison. The ranks are processes of one
// machine, which find each other through a temporary file.
#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <random>
#include <string>

#include "penstock/world.h"

namespace penstock::bench {

class DirectGloo {
 public:
  // [collective] A group of all ranks. `address`: on which this rank listens.
  DirectGloo(const comm::World& world, const std::string& address) {
    at::Tensor number = at::zeros({1}, at::kLong);
    if (world.rank() == 0) number.fill_(static_cast<std::int64_t>(std::random_device()()));
    world.group().broadcast(number, 0).wait();
    const auto path = std::filesystem::temp_directory_path() /
                      fmt::format("penstock_direct_gloo_{:08x}", number.item<std::int64_t>());
    auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(60));
    options->threads = 1;
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
    group_ = c10::make_intrusive<c10d::ProcessGroupGloo>(
        c10::make_intrusive<c10d::FileStore>(path.string(), world.size()), world.rank(), world.size(),
        options);
  }

  c10d::ProcessGroupGloo* operator->() const { return group_.get(); }

 private:
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;
};

}  // namespace penstock::bench
