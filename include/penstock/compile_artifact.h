// Artifacts: folders of calls that were compiled beforehand, so that a later run compiles nothing.
//
//   using namespace penstock::graph;
//   torch::nn::Linear net(4, 8);
//   const std::vector<ArtifactField> configuration{{"model.width", "4"}, {"layout.stages", "1"}};
//   // beforehand: every call of a module with this option is captured, compiled and written
//   auto written = Artifact::create("compiled", configuration, {.device = "cpu"});
//   compile(net, {.cache = {.name = "stage 0", .artifact = written}})->forward(torch::randn({2, 4}));
//   written->finish();
//   // later, in another run of the same program: nothing is captured
//   auto loaded = Artifact::open("compiled", configuration, {.device = "cpu"});
//   compile(net, {.cache = {.name = "stage 0", .artifact = loaded}})->forward(torch::randn({2, 4}));
//
// An artifact is valid for one program, configuration, LibTorch, device and compiler. Its manifest,
// manifest.json, lists them; open() refuses an artifact that was written under any other with a ConfigError
// that names the field and both values. A call that is not in the artifact is a StateError that says how it
// differs from those that are; nothing is compiled instead.
//
// The configuration must decide what the modules do (CacheOptions::identity). Names tell modules apart; two
// modules with the same name, inputs and options are taken for one.
// Thread safety: any thread. Several processes may open an artifact; one writes it.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace penstock::graph {

// A setting under its name, as the user knows it.
struct ArtifactField {
  std::string name;   // "model.layers"
  std::string value;  // "12"

  // Whether both members are equal.
  bool operator==(const ArtifactField&) const = default;
};

// What the calls of an artifact are compiled for.
struct ArtifactTarget {
  std::string device = "cpu";  // where the calls run, with an index for GPUs; its model is found by Penstock
  std::string compiler = "executor";  // the name of the graph compiler
};

// A folder of compiled calls.
class Artifact {
 public:
  // Starts an artifact in a folder, which is created, or replaces the artifact that is there. Throws
  // ConfigError if the folder cannot be written, or contains files that are no artifact.
  static std::shared_ptr<Artifact> create(const std::filesystem::path& folder,
                                          std::vector<ArtifactField> configuration,
                                          const ArtifactTarget& target = {});
  // Opens a finished artifact. Throws ConfigError if there is none, if it is damaged, or if a field differs.
  static std::shared_ptr<Artifact> open(const std::filesystem::path& folder,
                                        std::vector<ArtifactField> configuration,
                                        const ArtifactTarget& target = {});
  ~Artifact();
  Artifact(const Artifact&) = delete;
  Artifact& operator=(const Artifact&) = delete;

  // Writes the manifest: until then the folder cannot be opened. Throws ConfigError if it cannot be written,
  // StateError if the artifact was opened.
  void finish();

  // Reads the calls of a module, to find damage before they are needed. Throws ConfigError if there are none,
  // or if one is missing or damaged.
  void verify(const std::string& module) const;

  // Whether calls are added to it.
  bool is_writable() const;
  // Its folder.
  const std::filesystem::path& folder() const;
  // The configuration, and what Penstock adds: "program", "penstock", "format", "libtorch", "device",
  // "compiler".
  const std::vector<ArtifactField>& fields() const;
  // The name of the module of each call, in the order in which they were written.
  std::vector<std::string> calls() const;

 private:
  friend struct ArtifactAccess;
  struct Impl;
  explicit Artifact(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock::graph
