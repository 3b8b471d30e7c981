#include "penstock/compile_artifact.h"

#include <fmt/format.h>

#include <utility>

#include "penstock/errors.h"
#include "penstock/graph/cache/program_id.h"
#include "penstock/graph/run/call_store.h"

namespace penstock::graph {
namespace {

ArtifactFolder::Fields fields_of_target(const std::vector<ArtifactField>& configuration,
                                        const ArtifactTarget& target) {
  ArtifactFolder::Fields fields;
  for (const ArtifactField& field : configuration) fields.emplace_back(field.name, field.value);
  for (auto& field : environment_fields({at::Device(target.device)}, *graph_compiler(target.compiler)))
    fields.push_back(std::move(field));
  fields.emplace_back("program", program_id());
  return fields;
}

}  // namespace

struct Artifact::Impl {
  explicit Impl(ArtifactFolder&& opened) : folder(std::move(opened)) {
    for (const auto& [name, value] : folder.fields()) fields.push_back({name, value});
  }
  ArtifactFolder folder;
  std::vector<ArtifactField> fields;
};

Artifact::Artifact(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Artifact::~Artifact() = default;

std::shared_ptr<Artifact> Artifact::create(const std::filesystem::path& folder,
                                           std::vector<ArtifactField> configuration,
                                           const ArtifactTarget& target) {
  return std::shared_ptr<Artifact>(new Artifact(
      std::make_unique<Impl>(ArtifactFolder::create(folder, fields_of_target(configuration, target)))));
}

std::shared_ptr<Artifact> Artifact::open(const std::filesystem::path& folder,
                                         std::vector<ArtifactField> configuration,
                                         const ArtifactTarget& target) {
  return std::shared_ptr<Artifact>(new Artifact(
      std::make_unique<Impl>(ArtifactFolder::open(folder, fields_of_target(configuration, target)))));
}

void Artifact::finish() { impl_->folder.finish(); }
void Artifact::verify(const std::string& module) const {
  bool any = false;
  for (const ArtifactFolder::Entry& entry : impl_->folder.entries())
    if (entry.module == module) {
      impl_->folder.read(entry);
      any = true;
    }
  if (!any)
    throw ConfigError(
        fmt::format("artifact {}: it has no call of {}; write the artifact again, with penstock compile",
                    impl_->folder.folder().string(), module));
}

bool Artifact::is_writable() const { return impl_->folder.is_writable(); }
const std::filesystem::path& Artifact::folder() const { return impl_->folder.folder(); }
const std::vector<ArtifactField>& Artifact::fields() const { return impl_->fields; }

std::vector<std::string> Artifact::calls() const {
  std::vector<std::string> modules;
  for (const ArtifactFolder::Entry& entry : impl_->folder.entries()) modules.push_back(entry.module);
  return modules;
}

ArtifactFolder& ArtifactAccess::folder_of(Artifact& artifact) { return artifact.impl_->folder; }

}  // namespace penstock::graph
