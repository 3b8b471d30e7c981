#include "penstock/checkpoint/writer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "penstock/base/errors.h"
#include "penstock/base/log.h"
#include "penstock/checkpoint/checkpoint_error.h"
#include "penstock/checkpoint/folder.h"
#include "penstock/checkpoint/world_meeting.h"

namespace penstock::checkpoint {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

}  // namespace

class CheckpointWriter::Impl {
 public:
  Impl(const comm::World& world, std::filesystem::path folder, WriterOptions options)
      : folder_(std::move(folder)), options_(std::move(options)), board_(world), meeting_(board_) {
    WorldMeeting(world).agree("open the folder", [&] {
      if (world.rank() != 0) return;
      lock_.emplace(folder_);
      for (const std::string& name : clean_leftovers(folder_)) log().info("checkpoint: cleaned up {}, left by a run that ended early", (folder_ / name).string());
    });
    thread_ = std::thread([this] { work(); });
  }

  ~Impl() {
    {
      std::lock_guard lock(mutex_);
      if (job_) log().error("checkpoint: step {} was not finished when its writer ended; call wait() before", job_->step);
      if (error_) log().error("checkpoint: a save failed and nobody asked: call wait() before the end");
      ending_ = true;
    }
    meeting_.give_up();
    changed_.notify_all();
    thread_.join();
  }

  SaveStall save(std::int64_t step, const CheckpointContents& contents) {
    SaveStall stall;
    auto begin = Clock::now();
    wait();
    stall.waiting = seconds_since(begin);

    // The background rests, so that its meeting may be used from here.
    begin = Clock::now();
    auto job = std::make_unique<Job>();
    job->step = step;
    job->state = contents.state_json;
    std::vector<AnnouncedTensor> announced;
    std::vector<at::Tensor> locals;
    meeting_.begin_round(Clock::now() + options_.timeout);
    job->plan = agree_on_plan(meeting_, step, [&] {
      step_folder_name(step);  // refuses what is no step
      for (const auto& [section, parts] : {std::pair(Section::Model, &contents.model), std::pair(Section::Optimizer, &contents.optimizer)})
        for (const TensorPart& part : *parts) {
          const auto dtype = to_dtype(part.local.scalar_type());
          if (!dtype) throw ValueError(describe("part of a checkpoint: " + part.name, c10::toString(part.local.scalar_type()), "an element type that safetensors has"));
          if (!part.slice.boxes.empty() && part.local.sizes() != at::IntArrayRef(part.slice.local_shape))
            throw ValueError(describe("part of a checkpoint: " + part.name, fmt::format("a local tensor of {} dims", part.local.dim()), "the local shape of its slice"));
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

  const std::filesystem::path& folder() const { return folder_; }

 private:
  struct Job {
    std::int64_t step = 0;
    SavePlan plan;
    std::vector<HostPart> parts;
    std::string state;
  };

  // One buffer per part that this rank writes; from save to save they are the same as long as the model is.
  void copy(Job& job, std::vector<AnnouncedTensor> announced, const std::vector<at::Tensor>& locals) {
    at::NoGradGuard no_grad;
    const auto& writes = job.plan.writes.at(static_cast<std::size_t>(board_.rank()));
    buffers_.resize(announced.size());
    bool devices = false;
    for (std::size_t i = 0; i < announced.size(); ++i) {
      HostPart part{std::move(announced[i]), nullptr};
      if (writes[i] == 0) {
        buffers_[i].reset();
      } else {
        const at::Tensor& local = locals[i];
        const bool device = !local.is_cpu();
        at::Tensor& buffer = buffers_[i];
        if (!buffer.defined() || buffer.sizes() != local.sizes() || buffer.scalar_type() != local.scalar_type() || buffer.is_pinned() != device)
          buffer = at::empty(local.sizes(), at::TensorOptions(local.scalar_type()).pinned_memory(device));
        buffer.copy_(local, /*non_blocking=*/device);
        devices = devices || device;
        part.bytes = static_cast<const std::uint8_t*>(buffer.data_ptr());
      }
      job.parts.push_back(std::move(part));
    }
    // Copies from a device run one behind the other: a last one that blocks waits for all of them.
    if (devices)
      for (std::size_t i = announced.size(); i-- > 0;)
        if (writes[i] != 0 && !locals[i].is_cpu()) {
          buffers_[i].copy_(locals[i]);
          break;
        }
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
      try {
        write_checkpoint(meeting_, folder_, job->step, job->plan, job->parts, job->state, options_.files);
      } catch (const std::exception& failure) {
        error = std::make_exception_ptr(CheckpointError(fmt::format("checkpoint of step {} was not saved: {}", job->step, failure.what())));
      }
      {
        std::lock_guard lock(mutex_);
        error_ = error;
        job_.reset();
        if (ending_) return;
      }
      changed_.notify_all();
    }
  }

  const std::filesystem::path folder_;
  const WriterOptions options_;
  WorldBoard board_;
  BoardMeeting meeting_;  // of the caller while job_ is empty, else of the thread
  std::optional<FolderLock> lock_;
  std::vector<at::Tensor> buffers_;

  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::unique_ptr<Job> job_;
  std::exception_ptr error_;
  bool ending_ = false;
  std::thread thread_;
};

CheckpointWriter::CheckpointWriter(const comm::World& world, std::filesystem::path folder, WriterOptions options)
    : impl_(std::make_unique<Impl>(world, std::move(folder), std::move(options))) {}

CheckpointWriter::~CheckpointWriter() = default;

SaveStall CheckpointWriter::save(std::int64_t step, const CheckpointContents& contents) { return impl_->save(step, contents); }

void CheckpointWriter::wait() { impl_->wait(); }

const std::filesystem::path& CheckpointWriter::folder() const { return impl_->folder(); }

}  // namespace penstock::checkpoint
