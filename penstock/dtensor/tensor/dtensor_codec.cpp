#include "penstock/dtensor/tensor/dtensor_codec.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/comm/message/message.h"
#include "penstock/context_codec.h"
#include "penstock/dtensor/tensor/dtensor_payload.h"
#include "penstock/errors.h"
#include "penstock/step_context.h"
#include "penstock/tensor_parallel.h"

namespace penstock::detail {
namespace {

using comm::MeshGroups;
using comm::MessageReader;
using comm::MessageWriter;
using CodecBytes = std::vector<std::uint8_t>;

constexpr comm::MessageKind kContextMessage("DTCX"), kAxisGroupMessage("DTAG");
constexpr std::uint16_t kCodecVersion = 1;

// A mesh without its ranks.
struct StoredMesh {
  std::string device_type;
  std::vector<std::string> names;
  std::vector<std::int64_t> shape, coordinate;

  static StoredMesh of(const MeshGroups& mesh) {
    return {mesh.mesh().device_type(), mesh.mesh().names(), mesh.shape(), mesh.coordinate()};
  }
  friend bool operator==(const StoredMesh&, const StoredMesh&) = default;

  void write(MessageWriter& writer) const {
    writer.write(device_type).write(names).write(shape).write(coordinate);
  }
  static StoredMesh read(MessageReader& reader) {
    StoredMesh mesh;
    reader.read(mesh.device_type).read(mesh.names).read(mesh.shape).read(mesh.coordinate);
    return mesh;
  }
  // "cpu, axes [dp, tp] of sizes [2, 4], this rank at [1, 0]"
  std::string to_string() const {
    return fmt::format("{}, axes [{}] of sizes [{}], this rank at [{}]", device_type, fmt::join(names, ", "),
                       fmt::join(shape, ", "), fmt::join(coordinate, ", "));
  }
  // What another mesh has instead.
  std::string difference(const StoredMesh& other) const {
    std::vector<std::string> parts;
    const auto compare = [&](const char* what, const auto& mine, const auto& theirs) {
      if (mine != theirs) parts.push_back(fmt::format("{} [{}]", what, fmt::join(theirs, ", ")));
    };
    if (device_type != other.device_type) parts.push_back("device type " + other.device_type);
    compare("axes", names, other.names);
    compare("sizes", shape, other.shape);
    compare("this rank at", coordinate, other.coordinate);
    return fmt::format("{}", fmt::join(parts, ", "));
  }
};

// The meshes of distributed tensors, also of those inside of other subclasses.
void collect_meshes(const at::Tensor& tensor, std::vector<MeshGroups>& meshes) {
  const Payload* payload = tensor.defined() ? payload_of(tensor) : nullptr;
  if (!payload) return;
  if (const DTensorPayload* distributed = dtensor_payload(tensor)) {
    if (std::find(meshes.begin(), meshes.end(), distributed->mesh) == meshes.end())
      meshes.push_back(distributed->mesh);
    return;
  }
  for (const auto& [name, inner] : payload->inner_tensors()) collect_meshes(inner, meshes);
}

std::optional<MeshGroups> fitting_mesh(const StoredMesh& wanted, const std::vector<MeshGroups>& among) {
  std::optional<MeshGroups> found;
  for (const MeshGroups& mesh : among) {
    if (!(StoredMesh::of(mesh) == wanted)) continue;
    if (found)
      throw StateError(fmt::format(
          "a stored distributed tensor is on a mesh of {}, which fits both {} and {}; give their axes "
          "different names",
          wanted.to_string(), found->mesh().to_string(), mesh.mesh().to_string()));
    found = mesh;
  }
  return found;
}

// The mesh of this process that fits. Throws StateError if none does, or several do.
MeshGroups find_mesh(const StoredMesh& wanted, const std::vector<at::Tensor>& samples) {
  std::vector<MeshGroups> meshes;
  for (const at::Tensor& sample : samples) collect_meshes(sample, meshes);
  if (const auto mesh = fitting_mesh(wanted, meshes)) return *mesh;
  // The function itself may place a tensor on a mesh of the world that its inputs are of.
  std::vector<MeshGroups> others = MeshGroups::all();
  std::erase_if(others, [&](const MeshGroups& mesh) {
    return !meshes.empty() && !mesh.world().is(meshes.front().world());
  });
  if (const auto mesh = fitting_mesh(wanted, others)) return *mesh;
  std::vector<std::string> differences;
  for (const MeshGroups& mesh : others)
    differences.push_back(
        fmt::format("{} with {}", mesh.mesh().to_string(), wanted.difference(StoredMesh::of(mesh))));
  throw StateError(fmt::format(
      "a stored distributed tensor is on a mesh that this process does not have: {}; it has {}; make that "
      "mesh before the call, or compile for the present one",
      wanted.to_string(),
      differences.empty() ? std::string("none") : fmt::format("{}", fmt::join(differences, "; "))));
}

std::optional<std::string> text_of(const std::optional<Placement>& placement) {
  return placement ? std::optional(placement->to_string()) : std::nullopt;
}

std::optional<Placement> read_placement(MessageReader& reader) {
  const auto text = reader.read<std::optional<std::string>>();
  return text ? std::optional(parse_placement(*text)) : std::nullopt;
}

const DTensorPayload& dtensor_in(const Payload& payload) {
  return dynamic_cast<const DTensorPayload&>(payload);
}

// Loading must find the same mesh again, also if the function uses several.
void write_mesh(MessageWriter& writer, const MeshGroups& mesh) {
  const StoredMesh stored = StoredMesh::of(mesh);
  for (const MeshGroups& other : MeshGroups::all())
    if (other.world().is(mesh.world()) && !(other == mesh) && StoredMesh::of(other) == stored)
      throw NotImplemented(
          fmt::format("a distributed tensor on {} cannot be stored, because another mesh has the same axes: "
                      "{}; give their axes different names",
                      mesh.mesh().to_string(), other.mesh().to_string()));
  stored.write(writer);
}

CodecBytes encode_context(const Payload& payload) {
  const DTensorPayload& dtensor = dtensor_in(payload);
  MessageWriter writer(kContextMessage, kCodecVersion);
  write_mesh(writer, dtensor.mesh);
  writer.write(to_string(dtensor.spec->placements())).write(dtensor.copied_view);
  writer.write(dtensor.boundary != nullptr);
  if (const ModuleBoundary* boundary = dtensor.boundary.get())
    writer.write(static_cast<std::int32_t>(boundary->axis))
        .write(text_of(boundary->plain_input))
        .write(text_of(boundary->desired_input))
        .write(text_of(boundary->output))
        .write(static_cast<std::uint8_t>(boundary->kind));
  return writer.finish();
}

ModuleBoundary read_boundary(MessageReader& reader, const MeshGroups& mesh) {
  ModuleBoundary boundary{mesh, reader.read<std::int32_t>(), {}, {}, {}, BoundaryOutput::AsInput};
  boundary.plain_input = read_placement(reader);
  boundary.desired_input = read_placement(reader);
  boundary.output = read_placement(reader);
  const std::size_t at = reader.offset();
  const auto kind = reader.read<std::uint8_t>();
  if (kind > static_cast<std::uint8_t>(BoundaryOutput::Distributed))
    reader.refuse(at, "what a parallelized module returns", fmt::format("number {}", kind), "0 to 2");
  boundary.kind = static_cast<BoundaryOutput>(kind);
  return boundary;
}

// The geometry of the whole tensor is that of the wrapper.
at::Tensor decode_context(const CodecBytes& context, const FlatWrapper& flat,
                          const std::vector<at::Tensor>& samples) {
  MessageReader reader(context, kContextMessage, {kCodecVersion, kCodecVersion});
  const MeshGroups mesh = find_mesh(StoredMesh::read(reader), samples);
  const Placements placements = parse_placements(reader.read<std::string>());
  const bool copied_view = reader.read<bool>();
  std::optional<ModuleBoundary> boundary;
  if (reader.read<bool>()) boundary = read_boundary(reader, mesh);
  reader.expect_end();
  if (flat.tensors.size() != 1)
    throw ValueError(fmt::format("a distributed tensor of {} local parts", flat.tensors.size()));
  const WrapperGeometry& whole = flat.geometry;
  GlobalGeometry geometry;
  geometry.shape.assign(whole.sizes.begin(), whole.sizes.end());
  geometry.stride.assign(whole.strides.begin(), whole.strides.end());
  geometry.dtype = whole.dtype;
  geometry.device = whole.device;
  const at::Tensor tensor = make_dtensor(flat.tensors[0].second, DTensorSpec::get(mesh, placements, geometry),
                                         mesh, nullptr, whole.storage_offset);
  if (boundary) set_boundary(tensor, std::move(*boundary));
  dtensor_payload(tensor)->copied_view = copied_view;
  return tensor;
}

std::optional<CodecBytes> encode_group(const Payload& payload, const std::string& argument,
                                       const std::string& name) {
  if (argument != "group_name") return std::nullopt;
  // The function itself may use groups of other meshes.
  std::vector<MeshGroups> meshes{dtensor_in(payload).mesh};
  for (const MeshGroups& other : MeshGroups::all())
    if (other.world().is(meshes[0].world())) meshes.push_back(other);
  // A trial run makes no groups, which would wait for other processes.
  StepContext trial;
  trial.trial = true;
  const StepGuard guard(trial);
  for (const MeshGroups& mesh : meshes)
    for (int axis = 0; axis < mesh.mesh().ndim() && !mesh.coordinate().empty(); ++axis) {
      if (mesh.group(axis).name() != name) continue;
      MessageWriter writer(kAxisGroupMessage, kCodecVersion);
      write_mesh(writer, mesh);
      writer.write(static_cast<std::int32_t>(axis));
      return writer.finish();
    }
  return std::nullopt;
}

std::string decode_group(const CodecBytes& bytes, const std::vector<at::Tensor>& samples) {
  MessageReader reader(bytes, kAxisGroupMessage, {kCodecVersion, kCodecVersion});
  const StoredMesh wanted = StoredMesh::read(reader);
  const auto axis = reader.read<std::int32_t>();
  reader.expect_end();
  if (axis < 0 || static_cast<std::size_t>(axis) >= wanted.shape.size())
    throw ValueError(fmt::format("axis {} of a mesh of {} axes", axis, wanted.shape.size()));
  return find_mesh(wanted, samples).group(axis).name();
}

}  // namespace

void register_dtensor_codec() {
  register_context_codec(std::string(DTensorPayload::kKind), {.encode = encode_context,
                                                              .decode = decode_context,
                                                              .encode_text = encode_group,
                                                              .decode_text = decode_group,
                                                              .capture_waits = true});
}

}  // namespace penstock::detail
