#include "penstock/checkpoint/tensors/writer.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <fmt/format.h>

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/log.h"
#include "penstock/checkpoint/files/folder.h"
#include "penstock/checkpoint/tensors/world_agreement.h"
#include "penstock/checkpoint_types.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/streams.h"

namespace penstock::checkpoint {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

class CheckpointWriter::Impl {
 public:
  Impl(const comm::World& world, std::filesystem::path folder, WriterOptions options)
      : folder_(std::move(folder)), options_(std::move(options)), board_(world), agreement_(board_) {
    WorldAgreement(world).agree("open the folder", [&] {
      if (world.rank() != 0) return;
      lock_.emplace(folder_);
      for (const std::string& name : clean_leftovers(folder_))
        log().info("checkpoint: removed {}, left by a run that was interrupted", (folder_ / name).string());
    });
    thread_ = std::thread([this] { work(); });
  }

  ~Impl() {
    {
      std::lock_guard lock(mutex_);
      if (job_)
        log().error("checkpoint: step {} was not finished when its writer was destroyed; call wait() first",
                    job_->step);
      if (error_)
        log().error("checkpoint: a save failed and its error was not read: call wait() before the end");
      ending_ = true;
    }
    agreement_.give_up();
    changed_.notify_all();
    thread_.join();
  }

  SaveStall save(std::int64_t step, const CheckpointContents& contents) {
    SaveStall stall;
    auto begin = Clock::now();
    wait();
    stall.waiting = seconds_since(begin);

    // The background thread is idle, so its agreement object may be used here.
    begin = Clock::now();
    auto job = std::make_unique<Job>();
    job->step = step;
    job->state = contents.state_json;
    std::vector<AnnouncedTensor> announced;
    std::vector<at::Tensor> locals;
    agreement_.begin_round(Clock::now() + options_.timeout);
    job->plan = agree_on_plan(agreement_, step, [&] {
      step_folder_name(step);  // throws for an invalid step
      for (const auto& [section, parts] :
           {std::pair(Section::Model, &contents.model), std::pair(Section::Optimizer, &contents.optimizer)})
        for (const TensorPart& part : *parts) {
          const auto dtype = to_dtype(part.local.scalar_type());
          if (!dtype)
            throw ValueError(describe("part of a checkpoint: " + part.name,
                                      c10::toString(part.local.scalar_type()),
                                      "an element type that safetensors supports"));
          if (!part.slice.boxes.empty() && part.local.sizes() != at::IntArrayRef(part.slice.local_shape))
            throw ValueError(describe("part of a checkpoint: " + part.name,
                                      fmt::format("a local tensor of {} dims", part.local.dim()),
                                      "the local shape of its slice"));
          announced.push_back({section, part.name, *dtype, part.slice});
          locals.push_back(part.local);
        }
      return announced;
    });
    stall.planning = seconds_since(begin);

    begin = Clock::now();
    copy(*job, std::move(announced), locals);
    stall.copying = seconds_since(begin);
    {
      std::lock_guard lock(mutex_);
      job_ = std::move(job);
    }
    changed_.notify_all();
    return stall;
  }

  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !job_; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  std::vector<SaveOutcome> ended() {
    std::lock_guard lock(mutex_);
    return std::exchange(ended_, {});
  }

  const std::filesystem::path& folder() const { return folder_; }

 private:
  struct Job {
    std::int64_t step = 0;
    SavePlan plan;
    std::vector<HostPart> parts;
    std::vector<std::pair<std::size_t, at::Tensor>> on_device;  // parts still to be fetched
    std::optional<c10::Stream> stream;                          // for fetching; nullopt: the current one
    std::string state;
  };

  // Copies what this rank writes before training continues: from main memory into the buffers, on a device
  // into device memory, from where the thread fetches it. If the device has no room for that, training waits
  // until the data is in the buffers.
  void copy(Job& job, std::vector<AnnouncedTensor> announced, const std::vector<at::Tensor>& locals) {
    at::NoGradGuard no_grad;
    const auto& writes = job.plan.writes.at(static_cast<std::size_t>(board_.rank()));
    buffers_.resize(announced.size());
    for (std::size_t i = 0; i < announced.size(); ++i) {
      job.parts.push_back({std::move(announced[i]), nullptr});
      if (writes[i] == 0) {
        buffers_[i].reset();
      } else if (locals[i].is_cpu()) {
        buffer_like(i, locals[i], false).copy_(locals[i]);
        job.parts[i].bytes = static_cast<const std::uint8_t*>(buffers_[i].data_ptr());
      } else {
        job.on_device.push_back({i, locals[i]});
      }
    }
    if (job.on_device.empty()) return;
    try {
      for (auto& [i, tensor] : job.on_device) tensor = tensor.clone();
    } catch (const c10::Error& no_room) {
      log().debug("checkpoint: copying from the device while training waits: {}",
                  no_room.what_without_backtrace());
      for (auto& [i, tensor] : job.on_device) tensor = locals[i];
      fetch(job);
      return;
    }
    const at::Device device = job.on_device[0].second.device();
    job.stream = side_stream(device);
    order_after(*job.stream, current_stream(device));
  }

  // The buffers are reused from save to save as long as the model is the same.
  at::Tensor& buffer_like(std::size_t i, const at::Tensor& local, bool pinned) {
    at::Tensor& buffer = buffers_[i];
    if (!buffer.defined() || buffer.sizes() != local.sizes() || buffer.scalar_type() != local.scalar_type() ||
        buffer.is_pinned() != pinned)
      buffer = at::empty(local.sizes(), at::TensorOptions(local.scalar_type()).pinned_memory(pinned));
    return buffer;
  }

  // Copies from a device run one after the other, so waiting for the last one waits for all of them.
  void fetch(Job& job) {
    if (job.on_device.empty()) return;
    at::NoGradGuard no_grad;
    const c10::OptionalStreamGuard on(job.stream ? c10::optional<c10::Stream>(*job.stream) : c10::nullopt);
    for (const auto& [i, tensor] : job.on_device) {
      buffer_like(i, tensor, true).copy_(tensor, /*non_blocking=*/true);
      job.parts[i].bytes = static_cast<const std::uint8_t*>(buffers_[i].data_ptr());
    }
    buffers_[job.on_device.back().first].copy_(job.on_device.back().second);
    job.on_device.clear();
  }

  void work() {
    for (;;) {
      Job* job = nullptr;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return job_ || ending_; });
        if (!job_) return;
        job = job_.get();
      }
      std::exception_ptr error;
      SaveOutcome outcome{job->step, {}};
      try {
        fetch(*job);
        write_checkpoint(agreement_, folder_, job->step, job->plan, job->parts, job->state, options_.files);
      } catch (const std::exception& failure) {
        outcome.error = fmt::format("checkpoint of step {} was not saved: {}", job->step, failure.what());
        error = std::make_exception_ptr(CheckpointError(outcome.error));
      }
      {
        std::lock_guard lock(mutex_);
        error_ = error;
        ended_.push_back(std::move(outcome));
        job_.reset();
        if (ending_) return;
      }
      changed_.notify_all();
    }
  }

  const std::filesystem::path folder_;
  const WriterOptions options_;
  WorldStatusBoard board_;
  StatusBoardAgreement agreement_;  // used by the caller while job_ is empty, else by the thread
  std::optional<FolderLock> lock_;
  std::vector<at::Tensor> buffers_;

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::unique_ptr<Job> job_;
  std::exception_ptr error_;
  std::vector<SaveOutcome> ended_;
  bool ending_ = false;
  std::thread thread_;
};

CheckpointWriter::CheckpointWriter(const comm::World& world, std::filesystem::path folder,
                                   WriterOptions options)
    : impl_(std::make_unique<Impl>(world, std::move(folder), std::move(options))) {}

CheckpointWriter::~CheckpointWriter() = default;

SaveStall CheckpointWriter::save(std::int64_t step, const CheckpointContents& contents) {
  return impl_->save(step, contents);
}

void CheckpointWriter::wait() { impl_->wait(); }

std::vector<SaveOutcome> CheckpointWriter::ended() { return impl_->ended(); }

const std::filesystem::path& CheckpointWriter::folder() const { return impl_->folder(); }

}  // namespace penstock::checkpoint
