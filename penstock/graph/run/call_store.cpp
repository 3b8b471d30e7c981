#include "penstock/graph/run/call_store.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>

#include "penstock/base/env.h"
#include "penstock/base/warnings.h"
#include "penstock/context_codec.h"
#include "penstock/errors.h"
#include "penstock/graph/cache/program_id.h"
#include "penstock/graph/codec/graph_decoder.h"
#include "penstock/graph/codec/graph_encoder.h"
#include "penstock/graph/partition/activation_plan.h"
#include "penstock/graph/partition/backward_split.h"
#include "penstock/graph/run/capture_codec.h"
#include "penstock/graph/run/capture_fields.h"
#include "penstock/graph/run/graph_call.h"
#include "penstock/torch/compat/device_name.h"
#include "penstock/torch/compat/version.h"
#include "penstock/torch/dispatch/constant_tensor.h"
#include "penstock/value_wrapper.h"

namespace penstock::graph {
namespace {

std::vector<at::Device> devices_of(const CallGuard& guard) {
  std::vector<at::Device> devices;
  guard.for_each_geometry([&](std::size_t, const Geometry& geometry) {
    if (std::find(devices.begin(), devices.end(), geometry.device) == devices.end())
      devices.push_back(geometry.device);
  });
  return devices;
}

std::string call_text(const CallGuard& guard) {
  std::string text;
  std::size_t shown = 0, tensors = 0;
  guard.for_each_geometry([&](std::size_t, const Geometry&) { ++tensors; });
  // The last inputs are the arguments; the first are parameters.
  guard.for_each_geometry([&](std::size_t, const Geometry& geometry) {
    if (++shown + 4 > tensors) text += (text.empty() ? "" : ", ") + to_text(geometry);
  });
  return fmt::format("{} inputs{}{}", guard.size(), text.empty() ? "" : ", the last ", text);
}

// A tensor that the graph has found in the program, and that the program still holds: its values may change
// between calls and between runs, unlike those of a tensor that only the graph has.
std::optional<std::string> tensor_of_the_program(const FunctionCapture& capture) {
  const Graph& graph = capture.joint.graph;
  std::vector<at::Tensor> found;
  for (const ConstantTensor& constant : graph.constants) found.push_back(constant.tensor);
  if (graph.table)
    for (const SymbolicTensor& symbolic : graph.table->tensors) found.push_back(symbolic.example);
  for (const at::Tensor& tensor : found) {
    if (!tensor.defined() || is_constant_tensor(tensor)) continue;
    std::size_t handles = 0;                           // in the graph, and in the list
    std::vector<const c10::TensorImpl*> with_storage;  // different tensors over the same memory
    for (const at::Tensor& other : found) {
      if (!other.defined()) continue;
      handles += other.is_same(tensor) ? 2 : 0;
      const c10::TensorImpl* impl = other.unsafeGetTensorImpl();
      if (tensor.has_storage() && other.has_storage() && other.is_alias_of(tensor) &&
          std::find(with_storage.begin(), with_storage.end(), impl) == with_storage.end())
        with_storage.push_back(impl);
    }
    if (tensor.use_count() > handles ||
        (tensor.has_storage() && tensor.storage().use_count() > with_storage.size()))
      return fmt::format(
          "{} is a tensor that the function uses without it being an input, parameter or buffer",
          to_text(geometry_of(tensor)));
  }
  return std::nullopt;
}

// Whether capturing a call may wait for other processes.
bool may_wait_in_capture(const at::Tensor& tensor) {
  const Payload* payload = is_subclass(tensor) ? payload_of(tensor) : nullptr;
  if (!payload) return false;
  const ContextCodec* codec = find_context_codec(std::string(payload->kind()));
  if (codec && codec->capture_waits) return true;
  const auto inner = payload->inner_tensors();
  return std::any_of(inner.begin(), inner.end(),
                     [](const auto& each) { return may_wait_in_capture(each.second); });
}
bool may_wait_in_capture(const Values& inputs) {
  const std::vector<at::Tensor> tensors = tensors_among(inputs);
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return may_wait_in_capture(tensor); });
}

// Tensors with the contexts of a capture, for what refers to them.
std::vector<at::Tensor> samples_of(const SubclassLayout& layout) {
  std::vector<at::Tensor> samples;
  for (const auto* records :
       {&layout.inputs, &layout.forward_outputs, &layout.tangents, &layout.input_gradients})
    for (const FlattenRecord& record : *records)
      if (record.is_subclass()) samples.push_back(record.subclass().sample());
  return samples;
}

// The first lines in which two texts differ.
std::string text_difference(const std::string& now, const std::string& then) {
  std::istringstream a(now), b(then);
  std::string line_a, line_b;
  for (;;) {
    const bool more_a = static_cast<bool>(std::getline(a, line_a)),
               more_b = static_cast<bool>(std::getline(b, line_b));
    if (!more_a && !more_b) return {};
    if (!more_a) line_a = "nothing";
    if (!more_b) line_b = "nothing";
    if (line_a != line_b) return fmt::format("'{}' now, '{}' in the entry", line_a, line_b);
  }
}

// The options that change a capture or what is compiled of it. Not `recapture`, `log`, `verify_passes` and
// `compile_check`, which do not, and not those of the compilers, which are fields of their own. `passes`:
// names and versions of those that run, which disable_passes decides.
std::string option_fields(const CompileOptions& options, const std::string& passes) {
  ByteWriter out;
  const auto choice = [&](auto value) { out.number(static_cast<std::uint8_t>(value)); };
  choice(options.partitioner);
  out.number(std::int64_t{kActivationPlanVersion});
  out.text(options.activations.budget);
  out.count(options.activations.policy.size());
  for (const std::string& line : options.activations.policy) out.text(line);
  choice(options.second_derivatives);
  choice(options.compile_backward);
  out.number(std::int64_t{options.split_backward ? kBackwardSplitVersion : 0});
  out.flag(options.joint_checks);
  out.flag(options.keep_input_mutations);
  out.flag(options.explicit_random_states);
  out.flag(options.effect_tokens);
  out.flag(options.compile_exact);
  out.count(options.dynamic.dims.size());
  for (const DynamicDim& dim : options.dynamic.dims) {
    out.text(std::holds_alternative<std::size_t>(dim.input.get())
                 ? std::to_string(std::get<std::size_t>(dim.input.get()))
                 : std::get<std::string>(dim.input.get()));
    out.text(dim.symbol);
    for (const std::int64_t number : {dim.dim, dim.min, dim.max, dim.multiple_of}) out.number(number);
  }
  out.flag(options.dynamic.trust);
  out.flag(options.dynamic.specialize);
  out.count(options.argument_names.size());
  for (const std::string& name : options.argument_names) out.text(name);
  out.count(options.decompositions.size());
  for (const auto& [op, decomposition] : options.decompositions) out.text(op);
  out.count(options.wrappers.size());
  for (const auto& wrapper : options.wrappers) out.text(wrapper->name());
  out.text(passes);
  return {out.bytes.begin(), out.bytes.end()};
}

// Names the first piece of code among the options; empty if there is none.
std::string code_of_the_user(const CompileOptions& options) {
  if (!options.decompositions.empty())
    return fmt::format("the decomposition of {}", options.decompositions.begin()->first);
  if (!options.wrappers.empty()) return fmt::format("wrapper '{}'", options.wrappers[0]->name());
  return {};
}

}  // namespace

ArtifactFolder::Fields environment_fields(const std::vector<at::Device>& devices,
                                          const GraphCompiler& compiler) {
  std::vector<std::string> names;
  for (const at::Device& device : devices) names.push_back(device_name(device));
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  const std::string config = torch_build();
  return {{"penstock", PENSTOCK_VERSION},
          {"format", std::to_string(kCaptureVersion)},
          {"libtorch", fmt::format("{}, build {}", torch_version(),
                                   KeyBuilder().field("config", config).key().text().substr(0, 16))},
          {"device", fmt::format("{}", fmt::join(names, ", "))},
          {"compiler", fmt::format("{} {}", compiler.name(), compiler.version())}};
}

std::unique_ptr<CallStore> CallStore::open(const CompileOptions& options, FunctionIdentity function,
                                           CompilerChoice compilers, const std::string& passes) {
  std::unique_ptr<CallStore> store(new CallStore(options, std::move(function), std::move(compilers), passes));
  return store->cache_ || store->artifact_ ? std::move(store) : nullptr;
}

CallStore::CallStore(const CompileOptions& options, FunctionIdentity function, CompilerChoice compilers,
                     const std::string& passes)
    : options_(options.cache),
      fields_(option_fields(options, passes)),
      function_(std::move(function)),
      compilers_(std::move(compilers)),
      only_graphs_(code_of_the_user(options)) {
  if (options_.artifact) {
    if (!only_graphs_.empty())
      throw NotImplemented(fmt::format(
          "artifact {}: {} cannot be stored, and loaded calls would not notice another one; compile without "
          "it, or without the artifact",
          ArtifactAccess::folder_of(*options_.artifact).folder().string(), only_graphs_));
    artifact_ = &ArtifactAccess::folder_of(*options_.artifact);
    return;
  }
  if (options_.use == CacheOptions::Use::Off) return;
  const CacheEnvironment environment = cache_environment();
  if (environment.off) return;
  if (options_.use == CacheOptions::Use::Environment && !environment.asked_for) return;
  const std::filesystem::path folder =
      options_.folder.empty() ? environment.folder : std::filesystem::path(options_.folder);
  if (folder.empty()) {
    warn_once("cache",
              "compile cache: this user has no home folder; set PENSTOCK_CACHE to a folder, or to \"off\"");
    return;
  }
  // Ranks that wait for this one meanwhile must not run into their own deadline.
  const auto longest_wait = std::clamp<std::chrono::milliseconds>(
      options_.longest_wait, std::chrono::milliseconds(0), default_timeout() / 3);
  cache_.emplace(DirectoryCacheOptions{
      .folder = folder, .max_bytes = environment.max_bytes, .longest_wait = longest_wait});
}

CacheCounts CallStore::counts() const {
  CacheCounts counts = cache_ ? cache_->counts() : CacheCounts();
  counts.hits += artifact_hits_;
  counts.time_saved += artifact_time_saved_;
  return counts;
}

KeyBuilder CallStore::environment(const CallGuard& guard) const {
  KeyBuilder key;
  key.fields(environment_fields(devices_of(guard), *compilers_.forward)).field("options", fields_);
  for (const auto& [half, compiler] :
       {std::pair("backward", compilers_.backward.get()), std::pair("inference", compilers_.inference.get())})
    key.field(half, fmt::format("{} {}", compiler->name(), compiler->version()));
  return key;
}

CacheKey CallStore::call_key(const CallGuard& guard, Sizes sizes) const {
  KeyBuilder key = environment(guard);
  key.field("level", sizes == Sizes::Fixed ? "call" : "call for all sizes");
  key.field("program", program_id()).field("function", function_.text).field("name", options_.name);
  if (artifact_)
    key.fields(artifact_->fields());
  else
    key.field("identity", options_.identity);
  return key.field("guard", sizes == Sizes::Fixed ? encode_guard(guard) : encode_kind(guard)).key();
}

CacheLookup CallStore::look_up(const CacheKey& key, const std::string& what, bool may_wait) {
  CacheLookup lookup = cache_->find_or_reserve(
      key, what, may_wait && !timed_out_ ? DirectoryCache::Busy::Wait : DirectoryCache::Busy::GoOn);
  timed_out_ |= lookup.timed_out;
  return lookup;
}

CallStore::Place CallStore::find(const CallGuard& guard, Sizes sizes, const Values& inputs) {
  Place place;
  if (!artifact_ && options_.identity.empty()) return place;
  if (!only_graphs_.empty()) {
    cache_->refuse(only_graphs_ + " is code, which an identity does not name");
    return place;
  }
  try {
    place.key = call_key(guard, sizes);
  } catch (const NotImplemented& error) {
    if (artifact_) throw;
    cache_->refuse(error.what());
    return place;
  }
  std::optional<Bytes> bytes;
  std::chrono::microseconds made_in{0};
  if (artifact_) {
    if (artifact_->is_writable()) {
      place.keeps = true;
      return place;
    }
    bytes = artifact_->find(place.key, &made_in);
    if (!bytes) {
      // A call for all sizes may be in the artifact for these sizes alone.
      if (sizes == Sizes::Dynamic) return place;
      refuse_missing(guard, inputs);
    }
    ++artifact_hits_;
    artifact_time_saved_ += made_in;
  } else {
    CacheLookup lookup = look_up(place.key, name_or("a call"), !may_wait_in_capture(inputs));
    bytes = std::move(lookup.entry);
    made_in = lookup.made_in;
    place.reservation = std::move(lookup.reservation);
    place.keeps = static_cast<bool>(place.reservation);
  }
  if (!bytes) return place;
  try {
    place.call = decode(*bytes, inputs,
                        artifact_ ? fmt::format("artifact {}", artifact_->folder().string())
                                  : fmt::format("compile cache: {}", cache_->file_of(place.key).string()));
    place.call->made_in = made_in;
  } catch (const ValueError& error) {
    if (artifact_) throw ConfigError(error.what());
    cache_->discard(place.key, error.what());
    place.keeps = true;
  } catch (const StateError& error) {
    if (artifact_) throw;
    refuse(error.what());  // the entry is sound: another process may use it
  }
  return place;
}

void CallStore::refuse_missing(const CallGuard& guard, const Values& inputs) const {
  std::string known;
  std::size_t of_module = 0;
  for (const ArtifactFolder::Entry& entry : artifact_->entries())
    if (entry.module == options_.name) {
      ++of_module;
      try {
        const Bytes bytes = artifact_->read(entry);
        ByteReader in(bytes, "artifact");
        known = decode_guard_of_capture(in.take(in.count()), tensors_among(inputs), "artifact")
                    .difference(inputs);
      } catch (const Error& error) {
        known = error.what();
      }
    }
  throw StateError(fmt::format(
      "artifact {}: {} has no call like this one ({}); {}; compile the artifact with this call, too",
      artifact_->folder().string(), name_or("the module"), call_text(guard),
      of_module == 0 ? std::string("it has none of this module")
                     : fmt::format("of {} it has, the last differs: {}", of_module,
                                   known.empty() ? "in the types of the arguments or the options" : known)));
}

Bytes CallStore::encode(const CompiledCall& call) const {
  ByteWriter out;
  const auto section = [&](const Bytes& bytes) {
    out.count(bytes.size());
    out.raw(bytes);
  };
  section(encode_capture({call.capture(), call.halves()}));
  section(function_.save ? function_.save() : Bytes());
  GraphEncoder rest("compile cache");
  rest(call.code(), call.dynamic() ? call.dynamic()->checked_sizes() : std::vector<SymbolValues>());
  section(rest.finish());
  return std::move(out.bytes);
}

StoredCall CallStore::decode(std::span<const std::uint8_t> bytes, const Values& inputs,
                             const std::string& name) const {
  ByteReader in(bytes, name);
  const auto capture = in.take(in.count()), recorded = in.take(in.count()), others = in.take(in.count());
  StoredCall call{decode_capture(capture, default_call_wrappers(), tensors_among(inputs), name), {}, {}, {}};
  GraphDecoder rest(others, name, "");
  rest(call.code, call.checked_sizes);
  rest.expect_end();
  const std::size_t symbols = call.capture.capture.symbols.size();
  for (const SymbolValues& sizes : call.checked_sizes)
    if (sizes.size() != symbols) in.fail("sizes of another number of symbols");
  if (function_.restore && !function_.restore(recorded))
    in.fail("its results have other structures than those of earlier calls of this run");
  return call;
}

void CallStore::inspect(Place& place, const FunctionCapture& capture) const {
  if (!place.keeps) return;
  if (const auto why = tensor_of_the_program(capture))
    place.refused = *why + "; register it as a buffer, or pass it as an argument";
}

void CallStore::keep(Place& place, const CompiledCall& call, std::chrono::microseconds made_in) {
  if (!place.keeps) return;
  try {
    if (!place.refused.empty()) throw NotImplemented(place.refused);
    const Bytes bytes = encode(call);
    if (artifact_)
      artifact_->add(place.key, options_.name, call_text(call.capture().guard), bytes, made_in);
    else if (place.reservation)
      place.reservation.store(bytes, made_in);
    else
      cache_->replace(place.key, bytes, made_in);
  } catch (const NotImplemented& error) {
    if (artifact_)
      throw NotImplemented(
          fmt::format("artifact {}: {}: {}", artifact_->folder().string(), options_.name, error.what()));
    refuse(error.what());
  }
  place.reservation.release();
  place.keeps = false;
}

void CallStore::refuse(const std::string& why) const {
  cache_->refuse(why);
  warn_once("cache", fmt::format("compile cache: {} is compiled in every run: {}", name_or("a call"), why));
}

void CallStore::keep_again(const CacheKey& key, const CompiledCall& call, std::chrono::microseconds made_in) {
  Place place;
  place.key = key;
  place.keeps = artifact_ ? artifact_->is_writable() : !options_.identity.empty();
  keep(place, call, made_in);
}

CallStore::Halves CallStore::halves_of(FunctionCapture capture, const Split& split) {
  Halves halves;
  if (!cache_) {
    halves.capture = split(std::move(capture));
    return halves;
  }
  try {
    halves.key =
        environment(capture.guard).field("level", "graph").field("graph", encode_joint(capture)).key();
  } catch (const NotImplemented& error) {
    cache_->refuse(error.what());
    halves.capture = split(std::move(capture));
    return halves;
  }
  CacheLookup lookup = look_up(halves.key, name_or("a graph"), /*may_wait=*/true);
  if (lookup.entry) {
    try {
      const SubclassLayout* layout = capture.joint.subclasses.get();
      GraphDecoder decoder(*lookup.entry, cache_->file_of(halves.key).string(), "",
                           layout ? samples_of(*layout) : std::vector<at::Tensor>());
      Graph joint;
      Partition parts;
      std::size_t symbols = 0;
      decoder(joint, parts, halves.code, symbols);
      decoder.expect_end();
      // The halves use the tensors that this capture has found, which may change, not their values in the
      // entry.
      const Graph& now = capture.joint.graph;
      if (joint.constants.size() != now.constants.size()) decoder.fail("it has another number of constants");
      for (Graph* half : {&parts.forward, &parts.backward}) {
        half->table = half->table ? now.table : nullptr;
        for (ConstantTensor& constant : half->constants) {
          const auto same = std::find_if(
              joint.constants.begin(), joint.constants.end(),
              [&](const ConstantTensor& other) { return other.tensor.is_same(constant.tensor); });
          if (same == joint.constants.end()) decoder.fail("a constant that the joint graph does not have");
          constant.tensor = now.constants[static_cast<std::size_t>(same - joint.constants.begin())].tensor;
        }
      }
      for_each_meta(capture, [&](ViewAndMutationMeta& meta) { meta.symbols_for_backward = symbols; });
      halves.capture = {std::move(capture), std::move(parts)};
      check_capture(halves.capture, decoder);
      return halves;
    } catch (const ValueError& error) {
      cache_->discard(halves.key, error.what());
      // It may have been moved already.
      if (!halves.capture.capture.joint.graph.values.empty()) capture = std::move(halves.capture.capture);
    } catch (const StateError& error) {
      refuse(error.what());
    }
  }
  halves.code = {};
  halves.begin = std::chrono::steady_clock::now();
  halves.capture = split(std::move(capture));
  halves.reservation = std::move(lookup.reservation);
  return halves;
}

void CallStore::keep_halves(Halves& halves, const CompiledCall& call) {
  if (!halves.reservation) return;
  try {
    GraphEncoder encoder("compile cache");
    if (const SubclassLayout* layout = call.capture().joint.subclasses.get()) encoder.refer_to(*layout);
    encoder(call.capture().joint.graph, call.halves(), call.code(), call.capture().meta.symbols_for_backward);
    const auto made_in = std::chrono::duration_cast<std::chrono::microseconds>(
        std::chrono::steady_clock::now() - halves.begin);
    halves.reservation.store(encoder.finish(), made_in);
  } catch (const NotImplemented& error) {
    cache_->refuse(error.what());
  }
  halves.reservation.release();
}

void CallStore::verify(const PartitionedCapture& stored, const PartitionedCapture& now) const {
  if (encode_capture(stored) == encode_capture(now)) return;
  std::string what = text_difference(to_text(now.capture.joint.graph), to_text(stored.capture.joint.graph));
  if (what.empty() && !stored.capture.user_meta().same_in_every_field(now.capture.user_meta()))
    what = "what it does to its inputs, or how its results alias them";
  if (what.empty())
    what = text_difference(to_text(now.halves.forward) + to_text(now.halves.backward),
                           to_text(stored.halves.forward) + to_text(stored.halves.backward));
  if (what.empty() && now.halves.deferred != stored.halves.deferred)
    what = "which gradients of parameters backward computes later";
  if (what.empty()) what = "the values of tensors that it uses, or layouts of subclasses";
  throw StateError(fmt::format(
      "compile cache: the entry of {} is that of another function: {}; add to the identity what decides this",
      name_or("this call"), what));
}

}  // namespace penstock::graph
