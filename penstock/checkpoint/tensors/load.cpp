#include "penstock/checkpoint/tensors/load.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/checkpoint_types.h"
#include "penstock/comm/message/message.h"
#include "penstock/errors.h"

namespace penstock::checkpoint {

namespace {

constexpr comm::MessageKind kTensorRequests{"CKPL"};
constexpr comm::MessageKind kReport{"CKPR"};
constexpr std::size_t kProblemsShown = 40;

std::vector<std::string> joined(const std::set<std::string>& names) { return {names.begin(), names.end()}; }

// The tensors that a rank requests, and what it cannot get.
struct TensorRequests {
  std::vector<std::string> names, missing, cast, problems;
};

TensorRequests requests_of(const Checkpoint& checkpoint, Section section,
                           const std::vector<TensorPart>& parts) {
  TensorRequests requests;
  const Checkpoint::Table& table = checkpoint.tensors(section);
  for (const TensorPart& part : parts) {
    requests.names.push_back(part.name);
    const auto found = table.find(part.name);
    if (found == table.end()) {
      requests.missing.push_back(part.name);
      continue;
    }
    const TensorEntry& entry = *found->second.entry;
    const auto dtype = to_dtype(part.local.scalar_type());
    if (entry.shape != part.slice.global_shape)
      requests.problems.push_back(
          fmt::format("{}: {} in the checkpoint, {} here", part.name, tensor_text(entry.dtype, entry.shape),
                      tensor_text(dtype.value_or(entry.dtype), part.slice.global_shape)));
    else if (!to_scalar_type(entry.dtype))
      requests.problems.push_back(
          fmt::format("{}: {} in the checkpoint, which this LibTorch does not support", part.name,
                      dtype_code(entry.dtype)));
    else if (dtype != entry.dtype)
      requests.cast.push_back(fmt::format("{}: {} in the checkpoint, {} here", part.name,
                                          dtype_code(entry.dtype),
                                          dtype ? dtype_code(*dtype) : "another type"));
  }
  return requests;
}

Bytes to_bytes(const TensorRequests& requests) {
  return comm::MessageWriter(kTensorRequests, 1, kMaxMessageBytes)
      .write(requests.names)
      .write(requests.missing)
      .write(requests.cast)
      .write(requests.problems)
      .finish();
}

LoadReport judge(const Checkpoint& checkpoint, Section section, const std::vector<Bytes>& results,
                 const LoadPolicy& options) {
  std::set<std::string> names, missing, cast, problems, extra;
  for (const Bytes& bytes : results) {
    comm::MessageReader reader(bytes, kTensorRequests, {1, 1}, kMaxMessageBytes);
    for (std::set<std::string>* all : {&names, &missing, &cast, &problems})
      for (std::string& text : reader.read<std::vector<std::string>>()) all->insert(std::move(text));
    reader.expect_end();
  }
  std::vector<std::string> unused;
  for (const auto& entry : checkpoint.tensors(section))
    if (!names.contains(entry.first)) {
      extra.insert(entry.first);
      unused.push_back(entry.first);
    }
  if (!options.allow_cast)
    for (const std::string& text : cast) problems.insert(text + " (conversion is not allowed)");
  if (!options.allow_missing)
    for (const std::string& name : missing) {
      const std::string near = nearest_name(name, unused);
      problems.insert(fmt::format("{}: not in the checkpoint{}", name,
                                  near.empty() ? "" : fmt::format("; it has {}", near)));
    }
  if (!options.allow_extra)
    for (const std::string& name : extra) problems.insert(name + ": in the checkpoint, but no rank has it");
  if (!problems.empty()) {
    std::string text =
        fmt::format("{} (section {}) does not match the {} tensors here:", checkpoint.path().string(),
                    to_text(section), names.size());
    std::size_t shown = 0;
    for (const std::string& problem : problems)
      if (shown++ < kProblemsShown) text += "\n  " + problem;
    if (problems.size() > kProblemsShown)
      text += fmt::format("\n  and {} more", problems.size() - kProblemsShown);
    throw CheckpointError(text + "\nuse the configuration that wrote it, or allow the differences");
  }
  return {joined(missing), joined(extra), joined(cast)};
}

void fill(const Checkpoint& checkpoint, Section section, const TensorPart& part) {
  const TensorEntry& entry = *checkpoint.tensors(section).find(part.name)->second.entry;
  const auto bytes_of = [&](const at::Tensor& tensor) {
    return std::span(static_cast<std::uint8_t*>(tensor.data_ptr()), tensor.nbytes());
  };
  if (part.slice.boxes.empty()) return;
  const auto dtype = *to_scalar_type(entry.dtype);
  if (part.local.is_cpu() && part.local.is_contiguous() && part.local.scalar_type() == dtype &&
      !part.local.is_conj() && !part.local.is_neg()) {
    checkpoint.read(section, part.name, part.slice, bytes_of(part.local));
    return;
  }
  const at::Tensor staging = at::empty(part.slice.local_shape, at::TensorOptions(dtype));
  checkpoint.read(section, part.name, part.slice, bytes_of(staging));
  part.local.copy_(staging);
}

}  // namespace

LoadReport load_into(RankAgreement& agreement, const Checkpoint& checkpoint, Section section,
                     const std::vector<TensorPart>& parts, const LoadPolicy& options) {
  const Bytes verdict = agreement.agree(
      "compare with the checkpoint", [&] { return to_bytes(requests_of(checkpoint, section, parts)); },
      [&](const std::vector<Bytes>& results) {
        const LoadReport report = judge(checkpoint, section, results, options);
        return comm::MessageWriter(kReport, 1, kMaxMessageBytes)
            .write(report.missing)
            .write(report.extra)
            .write(report.cast)
            .finish();
      });
  comm::MessageReader reader(verdict, kReport, {1, 1}, kMaxMessageBytes);
  LoadReport report;
  reader.read(report.missing).read(report.extra).read(report.cast);
  reader.expect_end();
  agreement.agree("load", [&] {
    at::NoGradGuard no_grad;
    for (const TensorPart& part : parts)
      if (checkpoint.tensors(section).contains(part.name)) fill(checkpoint, section, part);
  });
  return report;
}

}  // namespace penstock::checkpoint
