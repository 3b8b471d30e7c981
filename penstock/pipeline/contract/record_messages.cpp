#include "penstock/pipeline/contract/record_messages.h"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "penstock/base/describe.h"
#include "penstock/torch/compat/dtype.h"
#include "penstock/torch/compat/version.h"

namespace penstock::comm {

namespace {

// Numbers used in messages. Add at the end, never change one; docs/messages.md lists them.
enum class PlacementNumber : std::uint8_t { Replicate = 1, Shard = 2, StridedShard = 3, Partial = 4 };
enum class MetaNumber : std::uint8_t { Plain = 1, Distributed = 2 };

std::uint8_t partial_number(PartialOp op) {
  switch (op) {
    case PartialOp::Sum:
      return 1;
    case PartialOp::Avg:
      return 2;
    case PartialOp::Min:
      return 3;
    case PartialOp::Max:
      return 4;
    case PartialOp::Product:
      return 5;
  }
  invariant_failed("op", __FILE__, __LINE__, "a reduction without a number");
}

PartialOp read_partial_op(MessageReader& reader) {
  const std::size_t at = reader.offset();
  const auto number = reader.read<std::uint8_t>();
  for (const PartialOp op :
       {PartialOp::Sum, PartialOp::Avg, PartialOp::Min, PartialOp::Max, PartialOp::Product})
    if (partial_number(op) == number) return op;
  reader.refuse(at, "the reduction of a partial placement is unknown", fmt::format("number {}", number),
                "1 to 5");
}

// Builds a value whose type validates itself, and converts its error into an error about the message.
template <class Build>
auto build(MessageReader& reader, std::size_t at, Build make) {
  try {
    return make();
  } catch (const ValueError& error) {
    reader.refuse(at, error.what(), {}, {});
  }
}

}  // namespace

void encode(MessageWriter& writer, at::ScalarType dtype) {
  const auto number = dtype_number(dtype);
  if (!number)
    throw PipeliningMetadataError(describe("writing an element type", dtype_name(dtype),
                                           "one with a number in docs/messages.md",
                                           "convert the tensor with to(dtype)"));
  writer.write(*number);
}

void decode(MessageReader& reader, at::ScalarType& dtype) {
  const std::size_t at = reader.offset();
  const auto number = reader.read<std::uint8_t>();
  const DtypeEntry* entry = find_dtype(number);
  if (!entry)
    reader.refuse(at, "the element type is unknown to this build", fmt::format("number {}", number),
                  fmt::format("1 to {}", dtype_table().size()));
  if (!entry->here)
    reader.refuse(at, "this LibTorch does not have the element type",
                  fmt::format("{} with LibTorch {}", entry->name, torch_version()),
                  fmt::format("LibTorch {} or newer", entry->since),
                  "use the same LibTorch on all ranks, or convert the tensor before it is sent");
  dtype = *entry->here;
}

void encode(MessageWriter& writer, const Placement& placement) {
  const auto number = [&](PlacementNumber value) -> MessageWriter& {
    return writer.write(static_cast<std::uint8_t>(value));
  };
  if (placement.is_replicate()) {
    number(PlacementNumber::Replicate);
  } else if (placement.is_shard()) {
    number(PlacementNumber::Shard).write(placement.dim());
  } else if (placement.is_strided_shard()) {
    number(PlacementNumber::StridedShard).write(placement.dim()).write(placement.split_factor());
  } else {
    number(PlacementNumber::Partial).write(partial_number(placement.partial_op()));
  }
}

void decode(MessageReader& reader, Placement& placement) {
  const std::size_t at = reader.offset();
  const auto number = reader.read<std::uint8_t>();
  switch (static_cast<PlacementNumber>(number)) {
    case PlacementNumber::Replicate:
      placement = Replicate{};
      return;
    case PlacementNumber::Shard:
      placement = Shard{reader.read<std::int64_t>()};
      return;
    case PlacementNumber::StridedShard: {
      const auto dim = reader.read<std::int64_t>();
      placement = StridedShard{dim, reader.read<std::int64_t>()};
      return;
    }
    case PlacementNumber::Partial:
      placement = Partial{read_partial_op(reader)};
      return;
  }
  reader.refuse(at, "the placement is unknown to this build", fmt::format("number {}", number), "1 to 4");
}

void encode(MessageWriter& writer, const MeshLayout& layout) {
  std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>> axes;
  for (const AxisLayout& axis : layout.axes()) {
    axes.emplace_back();
    for (const auto& mode : axis.modes()) axes.back().emplace_back(mode.size, mode.stride);
  }
  writer.write(axes);
}

void decode(MessageReader& reader, MeshLayout& layout) {
  const std::size_t at = reader.offset();
  const auto axes = reader.read<std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>>>();
  layout = build(reader, at, [&] {
    std::vector<AxisLayout> built;
    for (const auto& axis : axes) {
      std::vector<AxisLayout::Mode> modes;
      for (const auto& [size, stride] : axis) modes.push_back({size, stride});
      built.emplace_back(modes);
      // Each layout has one encoding; an alternative spelling would break the comparison of bytes.
      if (built.back().modes() != modes)
        reader.refuse(at, "an axis of a mesh layout is not in its shortest form",
                      fmt::format("{} modes", modes.size()),
                      fmt::format("{} modes", built.back().modes().size()));
    }
    return MeshLayout::from_axes(std::move(built));
  });
}

void encode(MessageWriter& writer, const MeshKey& key) { writer.write(key.names).write(key.layout); }
void decode(MessageReader& reader, MeshKey& key) { reader.read(key.names).read(key.layout); }

void encode(MessageWriter& writer, const TensorRecord& record) {
  writer.write(record.shape()).write(record.stride()).write(record.dtype()).write(record.requires_grad());
}

void decode(MessageReader& reader, TensorRecord& record) {
  const std::size_t at = reader.offset();
  auto shape = reader.read<std::vector<std::int64_t>>();
  auto stride = reader.read<std::vector<std::int64_t>>();
  const auto dtype = reader.read<at::ScalarType>();
  const bool requires_grad = reader.read<bool>();
  record = build(reader, at,
                 [&] { return TensorRecord(std::move(shape), std::move(stride), dtype, requires_grad); });
}

void encode(MessageWriter& writer, const DistributedRecord& record) {
  writer.write(record.local()).write(record.global_shape()).write(record.global_stride());
  writer.write(record.placements()).write(record.mesh_key());
}

void decode(MessageReader& reader, DistributedRecord& record) {
  const std::size_t at = reader.offset();
  auto local = reader.read<TensorRecord>();
  auto global_shape = reader.read<std::vector<std::int64_t>>();
  auto global_stride = reader.read<std::vector<std::int64_t>>();
  auto placements = reader.read<Placements>();
  auto mesh_key = reader.read<MeshKey>();
  record = build(reader, at, [&] {
    return DistributedRecord(std::move(local), std::move(global_shape), std::move(global_stride),
                             std::move(placements), std::move(mesh_key));
  });
}

void encode(MessageWriter& writer, const TensorMeta& meta) {
  if (const auto* distributed = std::get_if<DistributedRecord>(&meta)) {
    writer.write(static_cast<std::uint8_t>(MetaNumber::Distributed)).write(*distributed);
  } else {
    writer.write(static_cast<std::uint8_t>(MetaNumber::Plain)).write(std::get<TensorRecord>(meta));
  }
}

void decode(MessageReader& reader, TensorMeta& meta) {
  const std::size_t at = reader.offset();
  const auto number = reader.read<std::uint8_t>();
  switch (static_cast<MetaNumber>(number)) {
    case MetaNumber::Plain:
      meta = reader.read<TensorRecord>();
      return;
    case MetaNumber::Distributed:
      meta = reader.read<DistributedRecord>();
      return;
  }
  reader.refuse(at, "the kind of record is unknown to this build", fmt::format("number {}", number),
                "1 or 2");
}

void encode(MessageWriter& writer, const StageMeta& meta) {
  writer.write(meta.inputs).write(meta.outputs).write(meta.input_grads).write(meta.output_grads);
}
void decode(MessageReader& reader, StageMeta& meta) {
  reader.read(meta.inputs).read(meta.outputs).read(meta.input_grads).read(meta.output_grads);
}

void encode(MessageWriter& writer, const StageForwardMeta& meta) { writer.write(meta.outputs()); }
void decode(MessageReader& reader, StageForwardMeta& meta) {
  meta = StageForwardMeta(reader.read<TensorMetas>());
}

void encode(MessageWriter& writer, const StageBackwardMeta& meta) { writer.write(meta.input_grads()); }
void decode(MessageReader& reader, StageBackwardMeta& meta) {
  meta = StageBackwardMeta(reader.read<OptionalTensorMetas>());
}

}  // namespace penstock::comm
