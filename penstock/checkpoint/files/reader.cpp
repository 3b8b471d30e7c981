#include "penstock/checkpoint/files/reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <set>
#include <string>
#include <system_error>
#include <utility>

#include "penstock/base/checksum.h"
#include "penstock/base/describe.h"
#include "penstock/base/log.h"
#include "penstock/checkpoint/files/blocks.h"
#include "penstock/checkpoint/files/output_file.h"
#include "penstock/checkpoint_types.h"
#include "penstock/comm/message/message.h"
#include "penstock/errors.h"

namespace penstock::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr comm::MessageKind kDamages{"CKPD"};
constexpr comm::MessageKind kFound{"CKPF"};
constexpr std::size_t kDamagesShown = 8;

Index read_index(const fs::path& path) {
  const MappedFile file = map_checkpoint_file(path / "index.json");
  return parse_index({reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()},
                     (path / "index.json").string());
}

std::string summary(const std::vector<Damage>& damages) {
  std::string text;
  for (std::size_t i = 0; i < std::min(damages.size(), kDamagesShown); ++i)
    text += "\n  " + to_text(damages[i]);
  if (damages.size() > kDamagesShown) text += fmt::format("\n  and {} more", damages.size() - kDamagesShown);
  return text;
}

// Returns the damage in one rank's share of the blocks.
std::vector<Damage> own_damage(const fs::path& path, bool blocks, int rank, int size) {
  std::error_code error;
  if (!fs::is_directory(path, error))
    throw CheckpointError(
        fmt::format("{} does not exist; all ranks must see the same folder: use one on a shared file system",
                    path.string()));
  Index index;
  try {
    index = read_index(path);
  } catch (const CheckpointFormatError&) {
    throw;
  } catch (const CheckpointError& failure) {
    return {{"index.json", 0, 0, failure.what()}};
  }
  std::vector<Damage> damages;
  std::vector<SizedFile> sized;
  std::set<std::string> unreadable;  // reported as a whole
  for (const IndexedFile& file : index.files) {
    sized.push_back({file.name, file.bytes});
    const std::uint64_t bytes = fs::file_size(path / file.name, error);
    if (error) {
      unreadable.insert(file.name);
      damages.push_back({file.name, 0, 0, fmt::format("cannot be read: {}", error.message())});
    } else if (bytes < file.bytes) {
      damages.push_back({file.name, bytes, file.bytes,
                         fmt::format("missing: the file has {} of {} bytes", bytes, file.bytes)});
    } else if (bytes > file.bytes) {
      damages.push_back(
          {file.name, file.bytes, bytes,
           fmt::format("too large: the file has {} bytes, it was written with {}", bytes, file.bytes)});
    }
  }
  if (blocks)
    read_blocks(path, sized, index.block_bytes, rank, size, [&](const BlockRead& read) {
      const IndexedFile& file = index.files[read.file];
      if (unreadable.contains(file.name)) return;
      if (!read.error.empty()) {
        unreadable.insert(file.name);
        damages.push_back({file.name, read.begin, read.end, fmt::format("cannot be read: {}", read.error)});
      } else if (read.bytes.size() == read.end - read.begin &&
                 xxh3_checksum64(read.bytes, "checkpoints") !=
                     file.checksums.at(read.begin / index.block_bytes)) {
        damages.push_back({file.name, read.begin, read.end,
                           "the checksum differs: these bytes are not the ones that were written"});
      }
    });
  if (damages.empty()) {
    try {
      const Checkpoint whole(path);
    } catch (const CheckpointFormatError&) {
      throw;
    } catch (const CheckpointError& failure) {
      damages.push_back({"", 0, 0, failure.what()});
    }
  }
  return damages;
}

}  // namespace

static void encode(comm::MessageWriter& writer, const Damage& damage) {
  writer.write(damage.file).write(damage.begin).write(damage.end).write(damage.what);
}
static void decode(comm::MessageReader& reader, Damage& damage) {
  reader.read(damage.file).read(damage.begin).read(damage.end).read(damage.what);
}

std::string to_text(const Damage& damage) {
  if (damage.begin == 0 && damage.end == 0)
    return damage.file.empty() ? damage.what : fmt::format("{}: {}", damage.file, damage.what);
  return fmt::format("{} bytes {}-{}: {}", damage.file, damage.begin, damage.end, damage.what);
}

Checkpoint::Checkpoint(const fs::path& path) : path_(path), index_(read_index(path)) {
  for (const IndexedFile& file : index_.files) {
    const fs::path place = path / file.name;
    std::error_code error;
    const std::uint64_t bytes = fs::file_size(place, error);
    if (error) throw_file_error("read", place, error.value());
    if (bytes != file.bytes)
      throw CheckpointError(fmt::format("{}: {} bytes, but the index says {}; it is truncated or damaged",
                                        place.string(), bytes, file.bytes));
    if (file.section == "state") {
      const MappedFile state = map_checkpoint_file(place);
      state_.assign(state.bytes().begin(), state.bytes().end());
    } else if (file.section == "model" || file.section == "optimizer") {
      files_.push_back(std::make_unique<SafetensorsFile>(place));
      Table& table = file.section == "model" ? model_ : optimizer_;
      for (const TensorEntry& entry : files_.back()->header().entries)
        if (!table.emplace(entry.name, Place{files_.back().get(), &entry}).second)
          throw CheckpointError(
              fmt::format("{}: tensor \"{}\" is also in another file of the checkpoint; it is damaged",
                          place.string(), entry.name));
    } else {
      throw CheckpointFormatError(
          fmt::format("{}: section \"{}\" is unknown to this build; it was written by a newer version of "
                      "Penstock: use that version, or another checkpoint",
                      place.string(), file.section));
    }
  }
}

void Checkpoint::read(Section section, std::string_view name, const Slice& slice,
                      std::span<std::uint8_t> local) const {
  const auto found = tensors(section).find(name);
  if (found == tensors(section).end())
    throw CheckpointError(
        fmt::format("{}: no tensor \"{}\" in section {}", path_.string(), name, to_text(section)));
  const TensorEntry& entry = *found->second.entry;
  if (entry.shape != slice.global_shape)
    throw CheckpointError(fmt::format("{}: \"{}\" is {}, not {}", path_.string(), name,
                                      tensor_text(entry.dtype, entry.shape),
                                      tensor_text(entry.dtype, slice.global_shape)));
  if (const std::string problem = validation_error(slice); !problem.empty())
    throw ValueError(fmt::format("slice of {}: {}", name, problem));
  const std::uint64_t item = item_bytes(entry.dtype);
  if (local.size() != static_cast<std::uint64_t>(slice.held()) * item)
    throw ValueError(describe(fmt::format("memory for {}", name), fmt::format("{} bytes", local.size()),
                              fmt::format("{}", static_cast<std::uint64_t>(slice.held()) * item)));
  const auto data = found->second.file->data(entry);
  for_each_run(slice, item, [&](ByteRun run) {
    std::memcpy(local.data() + run.local, data.data() + run.global, run.bytes);
  });
}

std::vector<Damage> find_damage(RankAgreement& agreement, const fs::path& path, bool blocks) {
  const auto read = [](const Bytes& bytes) {
    comm::MessageReader reader(bytes, kDamages, {1, 1}, kMaxMessageBytes);
    auto damages = reader.read<std::vector<Damage>>();
    reader.expect_end();
    return damages;
  };
  const auto write = [](const std::vector<Damage>& damages) {
    return comm::MessageWriter(kDamages, 1, kMaxMessageBytes).write(damages).finish();
  };
  return read(agreement.agree(
      fmt::format("check {}", path.string()),
      [&] { return write(own_damage(path, blocks, agreement.rank(), agreement.size())); },
      [&](const std::vector<Bytes>& results) {
        std::vector<Damage> all;
        for (const Bytes& bytes : results)
          for (Damage& damage : read(bytes))
            if (std::find(all.begin(), all.end(), damage) == all.end()) all.push_back(std::move(damage));
        return write(all);
      }));
}

std::optional<OpenedCheckpoint> open_latest(RankAgreement& agreement, const fs::path& folder,
                                            const OpenPolicy& policy) {
  const Bytes verdict = agreement.agree(
      "find checkpoints",
      [&] {
        std::vector<std::int64_t> steps;
        if (agreement.rank() == 0)
          for (const FoundCheckpoint& found : find_checkpoints(folder)) steps.push_back(found.step);
        return comm::MessageWriter(kFound, 1, kMaxMessageBytes).write(steps).finish();
      },
      [](const std::vector<Bytes>& results) { return results.front(); });
  comm::MessageReader reader(verdict, kFound, {1, 1}, kMaxMessageBytes);
  const auto steps = reader.read<std::vector<std::int64_t>>();
  reader.expect_end();
  if (steps.empty()) return std::nullopt;

  std::vector<std::string> skipped;
  for (std::size_t i = steps.size(); i-- > 0;) {
    const fs::path path = folder / step_folder_name(steps[i]);
    const std::vector<Damage> damages = find_damage(agreement, path, policy.verify);
    if (damages.empty()) return OpenedCheckpoint{Checkpoint(path), std::move(skipped)};
    const std::string text = fmt::format("checkpoint {} is damaged:{}", path.string(), summary(damages));
    if (!policy.allow_fallback)
      throw CheckpointError(fmt::format(
          "{}\n{}", text,
          i > 0 ? fmt::format("allow the use of the previous one (step {}), or remove this one", steps[i - 1])
                : "there is no older one; remove it to start from the beginning"));
    log().warn("{}\n{}", text, i > 0 ? "trying the previous one" : "there is no older one");
    skipped.push_back(text);
  }
  std::string all;
  for (const std::string& text : skipped) all += "\n" + text;
  throw CheckpointError(fmt::format(
      "every checkpoint in {} is damaged; remove them to start from the beginning{}", folder.string(), all));
}

Checkpoint open_checkpoint(RankAgreement& agreement, const fs::path& path, const OpenPolicy& policy) {
  if (const auto damages = find_damage(agreement, path, policy.verify); !damages.empty())
    throw CheckpointError(
        fmt::format("checkpoint {} is damaged:{}\nuse another one", path.string(), summary(damages)));
  return Checkpoint(path);
}

}  // namespace penstock::checkpoint
