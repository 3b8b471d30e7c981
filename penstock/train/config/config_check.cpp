// Derives values from other fields and checks that all fields are consistent.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/files.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"
#include "penstock/generators.h"
#include "penstock/graph/names/pass_names.h"
#include "penstock/graph/saving/activation_budget.h"
#include "penstock/graph/saving/activation_policy.h"
#include "penstock/schedule.h"
#include "penstock/train/config/config_fields.h"
#include "penstock/train/data/cpp_lexer.h"
#include "penstock/train/data/cpp_structure.h"
#include "penstock/validate.h"

namespace penstock::train {

namespace {

class Completion {
 public:
  explicit Completion(ResolvedConfig& resolved) : resolved_(resolved), config_(resolved.config) {}

  void run() {
    pattern();
    model();
    ranks();
    schedule();
    stages();
    tensor_parallel();
    sequence_parallel();
    batch();
    training();
    compile();
    data();
    structure();
    without_effect();
    if (problems_.empty()) return;
    if (problems_.size() == 1) throw ConfigError(problems_.front());
    throw ConfigError(fmt::format("{} problems in the configuration:\n  {}", problems_.size(),
                                  fmt::join(problems_, "\n  ")));
  }

 private:
  // "layout.pp = 4 (train.toml:7)"
  std::string setting_text(std::string_view name) const {
    const ConfigField& field = find_field(name, "configuration");
    const auto origin = resolved_.origins.find(field.name());
    return fmt::format("{} = {} ({})", name, to_toml(field.get(config_)),
                       origin == resolved_.origins.end() ? "default" : origin->second);
  }
  bool given(const std::string& name) const {
    const auto origin = resolved_.origins.find(name);
    return origin != resolved_.origins.end() && !origin->second.starts_with("preset ");
  }
  template <class T>
  void derive(const std::string& name, T& place, T value) {
    if (place == value) return;
    place = std::move(value);
    resolved_.origins[name] = "derived";
  }
  void problem(std::string text) { problems_.push_back(std::move(text)); }

  void pattern() {
    ModelConfig& model = config_.model;
    if (model.pattern.empty()) return;
    std::int64_t blocks = 0;
    bool block_before = false;
    for (const char c : model.pattern) {
      if (c == '|') {
        if (!block_before)
          return problem(describe(setting_text("model.pattern"), "a stage without blocks",
                                  "at least one block between two |"));
        block_before = false;
        continue;
      }
      if (std::string_view("AMEF").find(c) == std::string_view::npos)
        return problem(describe(setting_text("model.pattern"), fmt::format("'{}'", c),
                                "A (attention), M (state space), E (experts), F (feed-forward), or | for "
                                "the end of a stage"));
      ++blocks;
      block_before = true;
    }
    if (!block_before)
      return problem(describe(setting_text("model.pattern"), "a stage without blocks",
                              "at least one block after the last |"));
    // The pattern of a preset is a period: it is repeated, or cut, for another number of layers.
    if (given("model.layers") && !given("model.pattern")) {
      std::string letters = model.pattern;
      std::erase(letters, '|');
      std::string repeated;
      for (std::int64_t i = 0; i < model.layers; ++i)
        repeated += letters[static_cast<std::size_t>(i) % letters.size()];
      return derive("model.pattern", model.pattern, repeated);
    }
    if (given("model.layers") && model.layers != blocks)
      return problem(fmt::format("{} has {}, but {}; leave out one of the two", setting_text("model.pattern"),
                                 count_of(blocks, "block"), setting_text("model.layers")));
    derive("model.layers", model.layers, blocks);
  }

  void model() {
    ModelConfig& model = config_.model;
    if (model.key_value_heads == 0) derive("model.key_value_heads", model.key_value_heads, model.heads);
    if (model.feed_width == 0) derive("model.feed_width", model.feed_width, (model.width * 8 + 95) / 96 * 32);
    if (model.width % model.heads != 0) {
      problem(fmt::format("{} is not a multiple of {}; set model.width to {}", setting_text("model.width"),
                          setting_text("model.heads"), (model.width / model.heads + 1) * model.heads));
    } else if (model.width / model.heads % 2 != 0) {
      problem(
          fmt::format("{} divided by {} makes heads of width {}, but rotary positions need an even width; "
                      "set model.width to {}",
                      setting_text("model.width"), setting_text("model.heads"), model.width / model.heads,
                      model.width + model.heads));
    }
    if (model.heads % model.key_value_heads != 0)
      problem(
          fmt::format("{} is not a multiple of {}; each key/value head is shared by a whole number of heads",
                      setting_text("model.heads"), setting_text("model.key_value_heads")));
  }

  void ranks() {
    LayoutConfig& layout = config_.layout;
    if (layout.dp % layout.shard != 0)
      problem(
          fmt::format("{} is not a multiple of {}; parameters are sharded over groups of layout.shard "
                      "data-parallel ranks: set layout.dp to {}, or layout.shard to {}",
                      setting_text("layout.dp"), setting_text("layout.shard"),
                      (layout.dp / layout.shard + 1) * layout.shard,
                      layout.dp == 1 ? std::string("1") : fmt::format("1 or {}", layout.dp)));
    expert_parallel();
    const std::int64_t product = layout.pp * layout.dp * layout.tp;
    if (product > 65536)
      return problem(fmt::format("{}, {}, {} make {} ranks; at most 65536 are supported",
                                 setting_text("layout.pp"), setting_text("layout.dp"),
                                 setting_text("layout.tp"), product));
    if (layout.ranks == 0) return derive("layout.ranks", layout.ranks, product);
    if (layout.ranks == product) return;
    // The most likely remedy is another value of dp.
    const std::int64_t rest = layout.pp * layout.tp;
    problem(
        fmt::format("{} is not pp * dp * tp = {} * {} * {} = {}; {}", setting_text("layout.ranks"), layout.pp,
                    layout.dp, layout.tp, product,
                    layout.ranks % rest == 0
                        ? fmt::format("set layout.dp to {}, or leave layout.ranks out", layout.ranks / rest)
                        : fmt::format("set layout.ranks to {} or leave it out", product)));
  }

  // Whether a block of the pattern or of multi-token prediction has the letter. Without a letter of their own
  // the latter are like the last of the pattern.
  bool has_block(char letter) const {
    const ModelConfig& model = config_.model;
    if (model.multi_token_depth > 0 && model.multi_token_block == std::string(1, letter)) return true;
    return model.pattern.empty() ? letter == 'A' : model.pattern.find(letter) != std::string::npos;
  }

  void expert_parallel() {
    const LayoutConfig& layout = config_.layout;
    if (layout.ep == 1) return;
    if (layout.dp % layout.ep != 0)
      problem(fmt::format(
          "{} is not a multiple of {}; experts are divided over groups of layout.ep data-parallel ranks: set "
          "layout.dp to {}, or layout.ep to a divisor of {}",
          setting_text("layout.dp"), setting_text("layout.ep"), (layout.dp / layout.ep + 1) * layout.ep,
          layout.dp));
    if (layout.shard > 1 && layout.shard % layout.ep != 0)
      problem(fmt::format(
          "{} is not a multiple of {}; the ranks that share the experts must be among those that shard the "
          "other parameters: set layout.shard to 1 or {}",
          setting_text("layout.shard"), setting_text("layout.ep"),
          (layout.shard / layout.ep + 1) * layout.ep));
    // A registered model checks this itself.
    const ModelConfig& model = config_.model;
    if (model.type != "auto" && model.type != "hybrid" && model.type != "transformer") return;
    if (!has_block('E'))
      problem(fmt::format("{} divides experts, but {} has no E blocks{}; set layout.ep to 1",
                          setting_text("layout.ep"), setting_text("model.pattern"),
                          model.multi_token_depth > 0 ? ", and multi-token prediction has none" : ""));
    else if (model.experts % layout.ep != 0)
      problem(fmt::format(
          "{} is not a multiple of {}; each expert-parallel rank holds the same number of experts: "
          "set model.experts to {}, or layout.ep to a divisor of {}",
          setting_text("model.experts"), setting_text("layout.ep"),
          (model.experts / layout.ep + 1) * layout.ep, model.experts));
  }

  void schedule() {
    LayoutConfig& layout = config_.layout;
    const bool file =
        layout.schedule.find('/') != std::string::npos || to_lower(layout.schedule).ends_with(".csv");
    try {
      if (file) {
        from_file();
      } else {
        from_kind();
      }
    } catch (const ValueError& error) {
      problem(fmt::format("{}: {}", setting_text("layout.schedule"), error.what()));
    }
  }

  // The schedule with the smallest bubble that fits: one that splits the backward and needs no more memory
  // than 1F1B, with two stages per rank.
  schedule::ScheduleKind automatic_kind() const {
    const LayoutConfig& layout = config_.layout;
    constexpr auto kBest = schedule::ScheduleKind::ZBVZeroBubble;
    const std::int64_t parts = 2 * layout.pp;
    const auto cuts = std::count(config_.model.pattern.begin(), config_.model.pattern.end(), '|');
    const bool fits = layout.pp > 1 && layout.virtual_stages % 2 == 0 && layout.virtual_stages <= 2 &&
                      parts <= config_.model.layers && (cuts == 0 || cuts + 1 == parts);
    try {
      schedule::PipelineShape shape;
      shape.ranks = static_cast<int>(layout.pp);
      shape.stages_per_rank = 2;
      shape.microbatches = static_cast<int>(layout.microbatches);
      check_shape(kBest, shape);
      if (fits) return kBest;
    } catch (const ValueError&) {
      // Too few microbatches.
    }
    return layout.virtual_stages > 1 ? schedule::ScheduleKind::Interleaved1F1B
                                     : schedule::ScheduleKind::OneFOneB;
  }

  void from_kind() {
    LayoutConfig& layout = config_.layout;
    if (to_lower(layout.schedule) == "auto")
      derive("layout.schedule", layout.schedule, std::string(to_text(automatic_kind())));
    const schedule::ScheduleKind kind = schedule::schedule_kind(layout.schedule);
    layout.schedule = std::string(to_text(kind));
    const std::optional<int> required = required_stages_per_rank(kind);
    fixed_stages_ = required.has_value();
    never_pairs_ = kind != schedule::ScheduleKind::DualPipe && kind != schedule::ScheduleKind::DualPipeV;
    if (layout.virtual_stages == 0)
      derive<std::int64_t>("layout.virtual_stages", layout.virtual_stages, default_stages_per_rank(kind));
    if (required && layout.virtual_stages != *required)
      return problem(
          fmt::format("{} needs {} on each rank, but {}; set layout.virtual_stages to {} or leave it out",
                      setting_text("layout.schedule"), count_of(*required, "stage"),
                      setting_text("layout.virtual_stages"), *required));
    schedule::PipelineShape shape;
    shape.ranks = static_cast<int>(layout.pp);
    shape.stages_per_rank = static_cast<int>(layout.virtual_stages);
    shape.microbatches = static_cast<int>(layout.microbatches);
    try {
      check_shape(kind, shape);
    } catch (const ValueError& error) {
      problem(fmt::format("{} with {}, {}, {}: {}", setting_text("layout.schedule"),
                          setting_text("layout.pp"), setting_text("layout.virtual_stages"),
                          setting_text("layout.microbatches"), error.what()));
    }
    // Two copies of the model run in opposite directions: each rank has two stages, of a model that is cut
    // into half as many parts.
    if (placement_of(kind) == schedule::StagePlacement::Bidirectional) copies_ = 2;
  }

  void from_file() {
    LayoutConfig& layout = config_.layout;
    const std::string text =
        penstock::read_file(layout.schedule, "schedule",
                            "set the name of a schedule kind, or a path relative to the working folder");
    const schedule::Schedule schedule = schedule::parse_schedule(text);
    schedule::ValidateOptions options;
    options.sends = schedule::SendModel::Posted;
    schedule::validate(schedule, options);
    const int stages = schedule.stages().stages();
    if (schedule.ranks() != layout.pp)
      problem(fmt::format("{} has {}, but {}; set layout.pp to {}", setting_text("layout.schedule"),
                          count_of(schedule.ranks(), "rank"), setting_text("layout.pp"), schedule.ranks()));
    if (schedule.microbatches() != layout.microbatches)
      problem(fmt::format("{} has {}, but {}; set layout.microbatches to {}", setting_text("layout.schedule"),
                          count_of(schedule.microbatches(), "microbatch", "microbatches"),
                          setting_text("layout.microbatches"), schedule.microbatches()));
    if (stages % schedule.ranks() != 0)
      return problem(fmt::format("{} has {} stages on {} ranks; each rank must have the same number",
                                 setting_text("layout.schedule"), stages, schedule.ranks()));
    const std::int64_t per_rank = stages / schedule.ranks();
    if (layout.virtual_stages == 0) return derive("layout.virtual_stages", layout.virtual_stages, per_rank);
    if (layout.virtual_stages != per_rank)
      problem(fmt::format("{} has {} on each rank, but {}; set layout.virtual_stages to {} or leave it out",
                          setting_text("layout.schedule"), count_of(per_rank, "stage"),
                          setting_text("layout.virtual_stages"), per_rank));
  }

  void stages() {
    const std::int64_t parts =
        config_.layout.pp * std::max<std::int64_t>(config_.layout.virtual_stages, 1) / copies_;
    if (parts > config_.model.layers)
      problem(fmt::format(
          "{} and {} make {} model stages, but {}: each stage needs at least one block; raise model.layers "
          "or lower layout.pp{}",
          setting_text("layout.pp"), setting_text("layout.virtual_stages"), parts,
          setting_text("model.layers"),
          config_.layout.virtual_stages > 1 && !fixed_stages_ ? " or layout.virtual_stages" : ""));
    const auto cuts = std::count(config_.model.pattern.begin(), config_.model.pattern.end(), '|');
    if (cuts > 0 && cuts + 1 != parts)
      problem(fmt::format("{} has {}, but {} and {} make {}; write {} (|) or none",
                          setting_text("model.pattern"), count_of(cuts + 1, "stage"),
                          setting_text("layout.pp"), setting_text("layout.virtual_stages"), parts,
                          count_of(parts - 1, "cut")));
  }

  void tensor_parallel() {
    const std::int64_t tp = config_.layout.tp;
    if (tp == 1) return;
    const auto divides = [&](const char* name, std::int64_t value) {
      if (value % tp != 0)
        problem(fmt::format(
            "{} is not a multiple of {}: heads and layers must divide evenly over the tensor-parallel ranks",
            setting_text(name), setting_text("layout.tp")));
    };
    const ModelConfig& model = config_.model;
    const bool attention = has_block('A');
    if (attention) {
      divides("model.heads", model.heads);
      divides("model.key_value_heads", model.key_value_heads);
    }
    if ((attention && model.attention_feed) || has_block('F')) divides("model.feed_width", model.feed_width);
    if (!has_block('E')) return;
    if (model.expert_width == 0) divides("model.feed_width", model.feed_width);
    divides("model.expert_width", model.expert_width);
    divides("model.shared_expert_width", model.shared_expert_width);
  }

  void sequence_parallel() {
    if (!config_.layout.sequence_parallel) return;
    const std::string setting = setting_text("layout.sequence_parallel"), tp = setting_text("layout.tp");
    if (config_.layout.tp == 1)
      return problem(fmt::format(
          "{} divides tokens over tensor-parallel ranks, but {}; set layout.tp to 2 or more, or leave "
          "layout.sequence_parallel out",
          setting, tp));
    if (config_.model.context % config_.layout.tp != 0)
      problem(fmt::format(
          "{} is not a multiple of {}, over whose ranks {} divides the tokens of every row; change "
          "model.context or layout.tp, or set layout.sequence_parallel to false",
          setting_text("model.context"), tp, setting));
  }

  void batch() {
    const LayoutConfig& layout = config_.layout;
    TrainingConfig& training = config_.training;
    const std::int64_t round = layout.dp * layout.microbatches * layout.microbatch_size;
    constexpr std::int64_t kMostSamples = std::int64_t{1}
                                          << 40;  // the product of individually valid values could overflow
    if (round > kMostSamples / std::max<std::int64_t>(training.accumulation, 1))
      return problem(
          fmt::format("{}, {}, {} and {} make too many samples per step; at most 2^40 are supported",
                      setting_text("layout.dp"), setting_text("layout.microbatches"),
                      setting_text("layout.microbatch_size"), setting_text("training.accumulation")));
    if (training.global_batch == 0) {
      if (training.accumulation == 0) derive<std::int64_t>("training.accumulation", training.accumulation, 1);
      return derive("training.global_batch", training.global_batch, round * training.accumulation);
    }
    const std::string one = fmt::format(
        "one run of the schedule takes dp * microbatches * microbatch_size = {} * {} * {} = {} samples",
        layout.dp, layout.microbatches, layout.microbatch_size, round);
    if (training.global_batch % round != 0) {
      const std::int64_t below = training.global_batch / round * round;
      return problem(fmt::format(
          "{} is not a multiple of {}: {}; set training.global_batch to {}, or change layout.microbatches or "
          "layout.microbatch_size",
          setting_text("training.global_batch"), round, one,
          below == 0 ? fmt::format("{}", round) : fmt::format("{} or {}", below, below + round)));
    }
    const std::int64_t runs = training.global_batch / round;
    if (training.accumulation == 0) return derive("training.accumulation", training.accumulation, runs);
    if (training.accumulation != runs)
      problem(fmt::format("{} needs {} of the schedule, but {} ({}); leave one of the two out",
                          setting_text("training.global_batch"), count_of(runs, "run"),
                          setting_text("training.accumulation"), one));
  }

  void training() {
    const TrainingConfig& training = config_.training;
    // A decaying learning rate needs at least one step after the warm-up.
    if (training.warmup_steps > training.steps ||
        (training.warmup_steps == training.steps && training.decay != "constant")) {
      // Shorten a preset's warm-up for a short run; never change one that the user set.
      if (given("training.warmup_steps")) {
        problem(fmt::format("{} leaves no steps after the warm-up, with {}; lower training.warmup_steps",
                            setting_text("training.warmup_steps"), setting_text("training.steps")));
      } else {
        derive("training.warmup_steps", config_.training.warmup_steps, training.steps / 10);
      }
    }
    if (training.precision != "fp16" && training.loss_scale != 0)
      problem(
          fmt::format("{} has no effect with {}; set training.precision to \"fp16\" or leave loss_scale out",
                      setting_text("training.loss_scale"), setting_text("training.precision")));
    if (config_.layout.transport == "nccl" && config_.layout.device == "cpu")
      problem(fmt::format("{} supports CUDA tensors only, but {}; set layout.transport to \"auto\"",
                          setting_text("layout.transport"), setting_text("layout.device")));
  }

  void compile() {
    const TrainingConfig& training = config_.training;
    if (training.compile == "off" && !training.artifact.empty())
      problem(
          fmt::format("{} has graphs, and {} runs none; set training.compile to \"graph\", or leave "
                      "training.artifact out",
                      setting_text("training.artifact"), setting_text("training.compile")));
    if (training.compile == "off" && !training.disable_passes.empty())
      problem(
          fmt::format("{} is about graphs, and {} runs none; set training.compile to \"graph\", or leave "
                      "training.disable_passes out",
                      setting_text("training.disable_passes"), setting_text("training.compile")));
    for (const char* name : {"training.compile_exact", "training.compile_check"})
      if (training.compile != "fused" &&
          find_field(name, "").get(config_) != find_field(name, "").get(TrainConfig{}))
        problem(
            fmt::format("{} is about generated code, and {} generates none; set training.compile to "
                        "\"fused\", or leave {} out",
                        setting_text(name), setting_text("training.compile"), name));
    activations();
    if (const std::string unknown =
            graph::unknown_pass(training.disable_passes, setting_text("training.disable_passes"));
        !unknown.empty())
      problem(unknown);
    if (training.compile == "off" || !problems_.empty()) return;
    const std::string setting = setting_text("training.compile");
    if (training.recompute != "none")
      problem(
          fmt::format("{} captures the activations that backward uses, and {} would have no effect; use "
                      "training.activation_budget in place of training.recompute, or set training.compile to "
                      "\"off\"",
                      setting, setting_text("training.recompute")));
    if (config_.layout.ep > 1)
      problem(fmt::format(
          "{} needs sizes that do not depend on data, but with {} ranks exchange as many rows as the "
          "router chooses; set layout.ep to 1, or training.compile to \"off\"",
          setting, setting_text("layout.ep")));
  }

  // What graphs keep for their backward.
  void activations() {
    const TrainingConfig& training = config_.training;
    try {
      graph::parse_activation_budget(training.activation_budget, setting_text("training.activation_budget"));
      graph::parse_activation_policy(training.activation_policy, setting_text("training.activation_policy"));
    } catch (const ConfigError& error) {
      return problem(error.what());
    }
    if (training.compile != "off") return;
    for (const char* name : {"training.activation_budget", "training.activation_policy"}) {
      if (find_field(name, "").get(config_) == find_field(name, "").get(TrainConfig{})) continue;
      if (training.recompute != "none")
        problem(
            fmt::format("{} chooses single tensors in captured graphs, {} whole blocks that run operator by "
                        "operator; use "
                        "one of the two: training.activation_budget with training.compile = \"graph\", or "
                        "training.recompute without it",
                        setting_text(name), setting_text("training.recompute")));
      else
        problem(
            fmt::format("{} is about graphs, and {} runs none; set training.compile to \"graph\", or leave "
                        "{} out",
                        setting_text(name), setting_text("training.compile"), name));
    }
  }

  void data() {
    const DataConfig& data = config_.data;
    if (!data.shards.empty() && !data.sources.empty())
      problem(fmt::format("{} and {} exclude each other; leave one of them out", setting_text("data.sources"),
                          setting_text("data.shards")));
    if (!data.shards.empty() && !data.extensions.empty())
      problem(fmt::format("{} selects files of data.sources, but {}; leave data.extensions out",
                          setting_text("data.extensions"), setting_text("data.shards")));
    if (!data.shards.empty() && (data.format != "auto" || data.end_of_document >= 0))
      problem(fmt::format("{} applies to data.sources, but {}; leave {} out",
                          setting_text(data.format != "auto" ? "data.format" : "data.end_of_document"),
                          setting_text("data.shards"),
                          data.format != "auto" ? "data.format" : "data.end_of_document"));
    if (data.sources.empty() && data.format == "uint16")
      problem(fmt::format("{} needs files; set data.sources (--data)", setting_text("data.format")));
    // The default cap is for this machine's headers; sources that the user names are used completely.
    if (!data.sources.empty() && !given("data.cap_bytes"))
      derive<std::int64_t>("data.cap_bytes", config_.data.cap_bytes, 0);
    if (data.validation_fraction == 0 && config_.training.validate_every > 0)
      problem(fmt::format(
          "{} leaves no data for {}; set training.validate_every to 0 or raise data.validation_fraction",
          setting_text("data.validation_fraction"), setting_text("training.validate_every")));
    if (config_.output.sample_prompt.empty() && config_.output.sample_tokens > 0)
      problem(fmt::format(
          "{} is empty, but {}; set a prompt of at least one byte, or set output.sample_tokens to 0",
          setting_text("output.sample_prompt"), setting_text("output.sample_tokens")));
    if (config_.checkpoint.resume.empty())
      problem(describe(setting_text("checkpoint.resume"), "", "auto, never or the path of a checkpoint"));
  }

  void structure() {
    DataConfig& data = config_.data;
    const ModelConfig& model = config_.model;
    const bool used = model.structure_embedding || model.tree_feed || model.relations > 0;
    if (data.structure == "auto") {
      const bool own_model = model.type != "auto" && model.type != "hybrid";
      const bool headers = data.sources.empty() && data.shards.empty();
      derive<std::string>("data.structure", data.structure, used && headers && !own_model ? "cpp" : "none");
    }
    if (data.structure != "cpp") return;
    if (data.format == "uint16")
      problem(fmt::format("{} needs text, but {}; set data.structure to \"none\"",
                          setting_text("data.structure"), setting_text("data.format")));
    const auto needs = [&](const char* key, std::int64_t entries, int ids) {
      if (model.structure_embedding && entries < ids)
        problem(fmt::format("{} is less than the {} ids of {}; set {} to at least {}", setting_text(key), ids,
                            setting_text("data.structure"), key, ids));
    };
    needs("model.structure_kinds", model.structure_kinds, kCppKinds);
    needs("model.node_types", model.node_types, kCppTokens);
  }

  // Rejects keys given on the command line that have no effect because of other keys. Files may have them:
  // the config.toml of a run has all keys. Keys of a feature that is switched off (validate_batches with
  // validate_every = 0) are accepted.
  void without_effect() {
    const auto idle = [&](bool is_idle, const char* name, const std::string& why) {
      const auto origin = resolved_.origins.find(name);
      if (is_idle && origin != resolved_.origins.end() && origin->second.starts_with("--"))
        problem(fmt::format("{} has no effect with {}; leave it out", setting_text(name), why));
    };
    const TrainingConfig& training = config_.training;
    idle(training.optimizer != "sgd", "training.momentum", setting_text("training.optimizer"));
    idle(training.optimizer != "adamw", "training.betas", setting_text("training.optimizer"));
    idle(training.optimizer != "adamw", "training.epsilon", setting_text("training.optimizer"));
    idle(training.decay == "constant", "training.min_lr_ratio", setting_text("training.decay"));
    for (const char* name : {"training.recompute_stages", "training.recompute_microbatches"})
      idle(training.recompute == "none", name, setting_text("training.recompute"));
    idle(!config_.data.shards.empty(), "data.cap_bytes", setting_text("data.shards"));
    idle(!config_.data.shards.empty(), "data.skip_bad_files", setting_text("data.shards"));
    idle(config_.model.pattern.find('|') != std::string::npos, "layout.partition",
         setting_text("model.pattern"));
    idle(config_.layout.pp == 1, "layout.border_dtype",
         setting_text("layout.pp") + ", because nothing is sent between stages");
    idle(config_.layout.ep == 1, "layout.overlap_experts",
         setting_text("layout.ep") + ", because no rows of experts are exchanged");
    idle(config_.layout.ep > 1 && never_pairs_, "layout.overlap_experts",
         setting_text("layout.schedule") + ", which pairs no forward with a backward");
    const std::string& type = config_.model.type;  // a registered model may use it for anything
    const bool is_known = type == "auto" || type == "transformer" || type == "hybrid";
    idle(config_.data.structure == "cpp" && is_known && !config_.model.structure_embedding &&
             !config_.model.tree_feed && config_.model.relations == 0,
         "data.structure", "a model without structure_embedding, tree_feed and relations");
    idle(config_.layout.pp == 1 && config_.layout.transport == "ucx", "layout.transport",
         setting_text("layout.pp") + ", because ucx is used for transfers between stages only");
  }

  ResolvedConfig& resolved_;
  TrainConfig& config_;
  std::int64_t copies_ = 1;
  bool fixed_stages_ = true;  // the schedule requires a fixed number of stages per rank
  bool never_pairs_ = false;  // a kind of schedule in which no forward is paired with a backward
  std::vector<std::string> problems_;
};

}  // namespace

void complete_config(ResolvedConfig& resolved) { Completion(resolved).run(); }

}  // namespace penstock::train
