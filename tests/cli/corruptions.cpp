#include "tests/cli/corruptions.h"

namespace penstock::test::configurations {

namespace {

namespace fs = std::filesystem;
using Keys = std::set<std::string>;
using Named = std::optional<Words>;

// ---- what a layout has ----

std::int64_t number_in(const Settings& settings, const std::string& key, std::int64_t otherwise) {
  const auto found = settings.find(key);
  return found == settings.end() ? otherwise : std::stoll(found->second);
}
std::string text_in(const Settings& settings, const std::string& key) {
  const auto found = settings.find(key);
  return found == settings.end() ? std::string() : found->second;
}
std::string letters_of(const Settings& settings) {
  std::string letters = text_in(settings, "model.pattern");
  std::erase(letters, '|');
  return letters;
}
std::int64_t blocks_of(const Settings& settings) {
  return static_cast<std::int64_t>(letters_of(settings).size());
}

bool has_two_stages_per_rank(const std::string& schedule) {
  return schedule == "Interleaved1F1B" || schedule == "ZBVZeroBubble" || schedule == "VHalf" ||
         schedule == "DualPipeV" || schedule == "DualPipe";
}
// Stages of the model; DualPipe has each of them twice.
std::int64_t stages_of(const Settings& settings) {
  const std::string schedule = text_in(settings, "layout.schedule");
  return number_in(settings, "layout.pp", 1) *
         (has_two_stages_per_rank(schedule) && schedule != "DualPipe" ? 2 : 1);
}

// ---- rows of the table ----

Keys with(Keys keys, const Keys& more) {
  keys.insert(more.begin(), more.end());
  return keys;
}

const Keys kStages = {"layout.pp", "layout.virtual_stages", "layout.schedule", "model.pattern",
                      "layout.microbatches"};
const Keys kReplicas = {"layout.dp", "layout.shard", "layout.ep", "model.experts"};
const Keys kBatch = {"training.global_batch", "training.accumulation", "layout.microbatches",
                     "layout.microbatch_size", "layout.dp"};

// Sets a key to one of several values that no layout can have.
Corruption wrong_value(const std::string& key, const Words& values, const Keys& relies = {}) {
  return {"a wrong value of " + key, with(relies, {key}),
          [key, values](Settings& settings, Chance& chance) -> Named {
            settings[key] = any_of(values, chance);
            return Words{key};
          }};
}

// Sets a list to one with a number that is too large.
Corruption number_beyond(const std::string& key, const Keys& relies,
                         const std::function<std::int64_t(const Settings&)>& count) {
  return {"a number beyond the last in " + key, with(relies, {key}),
          [key, count](Settings& settings, Chance& chance) -> Named {
            settings[key] = (between(0, 1, chance) == 0 ? "0," : "") +
                            std::to_string(count(settings) + between(0, 3, chance));
            return Words{key};
          }};
}

std::string with_cuts(std::string pattern, std::int64_t cuts, Chance& chance) {
  while (cuts > 0) {
    const auto place =
        static_cast<std::size_t>(between(1, static_cast<std::int64_t>(pattern.size()) - 1, chance));
    if (pattern[place] == '|' || pattern[place - 1] == '|') continue;
    pattern.insert(place, "|");
    --cuts;
  }
  return pattern;
}

std::vector<Corruption> of_patterns() {
  return {
      {"an unknown letter", kStages,
       [](Settings& settings, Chance& chance) -> Named {
         std::string& pattern = settings["model.pattern"];
         pattern.insert(
             static_cast<std::size_t>(between(0, static_cast<std::int64_t>(pattern.size()), chance)),
             any_of(Words{"X", "a", "?", "1", "\xc3\xa9", " "}, chance));
         return Words{"model.pattern"};
       }},
      {"a stage without blocks", kStages,
       [](Settings& settings, Chance& chance) -> Named {
         std::string& pattern = settings["model.pattern"];
         pattern = any_of(Words{"|" + pattern, pattern + "|", "A||" + pattern}, chance);
         return Words{"model.pattern"};
       }},
      {"cuts for another number of stages", kStages,
       [](Settings& settings, Chance& chance) -> Named {
         settings["model.pattern"] = with_cuts(letters_of(settings), stages_of(settings), chance);
         return Words{"model.pattern"};
       }},
      {"layers that the pattern has not",
       {"model.pattern", "model.layers"},
       [](Settings& settings, Chance& chance) -> Named {
         settings["model.layers"] =
             std::to_string(blocks_of(settings) + any_of(std::vector<int>{-3, -1, 1, 5}, chance));
         return Words{"model.layers"};
       }},
      {"more stages than blocks", kStages,
       [](Settings& settings, Chance& chance) -> Named {
         if (text_in(settings, "layout.schedule").ends_with(".csv")) return std::nullopt;
         settings["layout.pp"] = any_of(Words{"10", "12", "16"}, chance);
         settings["layout.microbatches"] = "32";
         return Words{"layout.pp"};
       }},
      {"a block of multi-token prediction of no kind",
       {"model.multi_token_block", "model.multi_token_depth"},
       [](Settings& settings, Chance& chance) -> Named {
         settings["model.multi_token_depth"] = "1";
         settings["model.multi_token_block"] = any_of(Words{"AE", "X", "|"}, chance);
         return Words{"model.multi_token_block"};
       }},
      wrong_value("model.multi_token_depth", {"16", "20", "64", "65", "-1"}, {"model.context"}),
      number_beyond("model.depth_layers", {"model.pattern"}, blocks_of),
      number_beyond("model.nope_layers", {"model.pattern"}, blocks_of),
      wrong_value("model.windows", {"-1", "4,-2", "4,x", "1.5", "99999999999"}),
      {"tree feed without a feed-forward part",
       {"model.pattern", "model.tree_feed"},
       [](Settings& settings, Chance&) -> Named {
         settings["model.tree_feed"] = "true";
         return Words{"model.tree_feed"};
       }},
      {"relations without attention", with(kStages, {"model.relations", "model.heads", "training.recompute"}),
       [](Settings& settings, Chance&) -> Named {
         std::string& pattern = settings["model.pattern"];
         std::replace(pattern.begin(), pattern.end(), 'A', 'M');
         settings["model.relations"] = "3";
         return Words{"model.relations"};
       }},
  };
}

std::vector<Corruption> of_schedules(const fs::path& files) {
  // A layout that a file fits, except for what is changed.
  const auto take_file = [files](Settings& settings, const std::string& name) {
    settings["layout.pp"] = "2";
    settings["layout.microbatches"] = "4";
    settings.erase("layout.virtual_stages");
    settings["model.pattern"] = letters_of(settings);
    settings["layout.schedule"] = (files / name).string();
  };
  return {
      wrong_value(
          "layout.schedule",
          {"2F2B", "ZeroBubbel", "dualpipe2", "none", "-", "missing.csv", "./nothing/", "no/schedule.csv"},
          kStages),
      {"a schedule file that cannot be run", kStages,
       [take_file](Settings& settings, Chance& chance) -> Named {
         take_file(
             settings,
             any_of(Words{"one_rank.csv", "missing.csv", "twice.csv", "garbage.csv", "empty.csv"}, chance));
         return Words{"layout.schedule"};
       }},
      {"another number of microbatches than the schedule file has", kStages,
       [take_file](Settings& settings, Chance& chance) -> Named {
         take_file(settings, "good.csv");
         settings["layout.microbatches"] = any_of(Words{"1", "2", "3", "5", "8"}, chance);
         return Words{"layout.microbatches"};
       }},
      {"virtual stages that the schedule has not", kStages,
       [](Settings& settings, Chance& chance) -> Named {
         const std::string schedule = text_in(settings, "layout.schedule");
         settings["layout.virtual_stages"] = any_of(schedule == "Interleaved1F1B" ? Words{"-1", "5", "8"}
                                                    : has_two_stages_per_rank(schedule) ? Words{"1", "3", "4"}
                                                                                        : Words{"2", "3"},
                                                    chance);
         return Words{"layout.virtual_stages"};
       }},
      {"DualPipe on an odd number of ranks", kStages,
       [](Settings& settings, Chance& chance) -> Named {
         settings["layout.schedule"] = "DualPipe";
         settings["layout.pp"] = any_of(Words{"1", "3", "5"}, chance);
         settings["layout.microbatches"] = "20";
         settings.erase("layout.virtual_stages");
         settings["model.pattern"] = letters_of(settings);
         return Words{"layout.pp"};
       }},
      {"microbatches that the schedule cannot have", kStages,
       [](Settings& settings, Chance& chance) -> Named {
         const std::string schedule = text_in(settings, "layout.schedule");
         if (schedule != "DualPipe" && schedule != "DualPipeV" && schedule != "Interleaved1F1B")
           return std::nullopt;
         settings["layout.microbatches"] = any_of(schedule == "Interleaved1F1B" ? Words{"1", "3", "5"}
                                                  : schedule == "DualPipeV"     ? Words{"1", "2", "3"}
                                                                                : Words{"2", "3", "5"},
                                                  chance);
         return Words{"layout.microbatches"};
       }},
      wrong_value("layout.partition", {"even", "3,5", "costs", ""}),
      number_beyond("training.recompute_stages", with(kStages, {"training.recompute"}), stages_of),
      number_beyond("training.recompute_microbatches", with(kStages, {"training.recompute"}),
                    [](const Settings& settings) { return number_in(settings, "layout.microbatches", 1); }),
      {"a recompute pattern of another length",
       {"model.pattern", "training.recompute"},
       [](Settings& settings, Chance& chance) -> Named {
         std::string marks;
         const std::int64_t length = (blocks_of(settings) + between(1, 2 * blocks_of(settings), chance)) %
                                     (2 * blocks_of(settings) + 1);
         for (std::int64_t i = 0; i < length; ++i) marks += between(0, 1, chance) == 0 ? '.' : 'R';
         settings["training.recompute"] = "pattern:" + marks;
         return Words{"training.recompute"};
       }},
      wrong_value("training.recompute",
                  {"letters:F", "letters:", "letters:Z", "pattern:FFFFFFFF", "all", "blocks", ""},
                  {"model.pattern"}),
      {"a border without another rank", with(kStages, {"layout.border_dtype"}),
       [](Settings& settings, Chance& chance) -> Named {
         if (number_in(settings, "layout.pp", 1) > 1) return std::nullopt;
         settings["layout.border_dtype"] = any_of(Words{"bf16", "fp8"}, chance);
         return Words{"layout.border_dtype"};
       }},
  };
}

std::vector<Corruption> of_layouts() {
  return {
      {"ranks that are not the product",
       {"layout.ranks", "layout.pp", "layout.dp", "layout.tp"},
       [](Settings& settings, Chance& chance) -> Named {
         settings["layout.ranks"] =
             std::to_string(number_in(settings, "layout.pp", 1) * number_in(settings, "layout.dp", 1) *
                                number_in(settings, "layout.tp", 1) +
                            between(1, 7, chance));
         return Words{"layout.ranks"};
       }},
      {"shards that do not divide the replicas",
       {"layout.shard", "layout.dp"},
       [](Settings& settings, Chance& chance) -> Named {
         settings["layout.shard"] =
             std::to_string(number_in(settings, "layout.dp", 1) + between(1, 5, chance));
         return Words{"layout.shard"};
       }},
      {"experts over ranks that are not replicas", kReplicas,
       [](Settings& settings, Chance& chance) -> Named {
         settings["layout.ep"] = std::to_string(number_in(settings, "layout.dp", 1) + between(1, 5, chance));
         return Words{"layout.ep"};
       }},
      {"experts that do not divide", kReplicas,
       [](Settings& settings, Chance& chance) -> Named {
         settings["layout.dp"] = settings["layout.ep"] = "2";
         settings["model.experts"] = any_of(Words{"3", "5", "7"}, chance);
         return Words{"model.experts"};
       }},
      {"experts over ranks without experts",
       with(with(kStages, kReplicas), {"training.recompute", "model.multi_token_block"}),
       [](Settings& settings, Chance&) -> Named {
         if (settings.contains("model.multi_token_block")) return std::nullopt;
         std::string& pattern = settings["model.pattern"];
         std::replace(pattern.begin(), pattern.end(), 'E', 'F');
         settings["layout.dp"] = settings["layout.ep"] = "2";
         return Words{"layout.ep"};
       }},
      wrong_value("layout.tp", {"3", "4", "5"}, {"model.heads", "model.key_value_heads"}),
      {"more ranks than a host starts",
       {"layout.dp", "layout.shard", "layout.ep", "layout.ranks"},
       [](Settings& settings, Chance& chance) -> Named {
         settings["layout.dp"] = any_of(Words{"2048", "65536", "40000"}, chance);
         settings["layout.shard"] = settings["layout.ep"] = "1";
         return Words{"layout.ranks", "layout.dp"};
       }},
      {"a batch that the layout cannot make", kBatch,
       [](Settings& settings, Chance& chance) -> Named {
         settings["training.global_batch"] = std::to_string(
             number_in(settings, "layout.dp", 1) * 8 * between(1, 3, chance) + between(1, 7, chance));
         return Words{"training.global_batch"};
       }},
      {"a batch and runs that contradict each other", kBatch,
       [](Settings& settings, Chance& chance) -> Named {
         settings["training.global_batch"] = std::to_string(
             number_in(settings, "layout.dp", 1) * number_in(settings, "layout.microbatches", 1) * 2);
         settings["training.accumulation"] = std::to_string(between(2, 9, chance));
         return Words{"training.accumulation"};
       }},
      wrong_value("layout.border_dtype", {"fp16", "bfloat16", "fp4", "8"}),
      wrong_value("layout.device", {"gpu", "cuda:0", "tpu"}),
      wrong_value("layout.transport", {"nccl", "mpi", "tcp"}, {"layout.device"}),
      wrong_value("layout.pp", {"0", "-2", "two", "1.5", "99999999999999999999"}, kStages),
      wrong_value("layout.microbatches", {"0", "-4", "nan", ""}, kStages),
      wrong_value("layout.microbatch_size", {"0", "-1", "2097152", "x"}),
  };
}

std::vector<Corruption> of_models() {
  return {
      {"a width that the heads do not divide",
       {"model.width", "model.heads", "model.key_value_heads", "layout.tp"},
       [](Settings& settings, Chance& chance) -> Named {
         settings["model.heads"] = settings["model.key_value_heads"] =
             any_of(Words{"3", "5", "6", "16"}, chance);
         return Words{"model.heads"};
       }},
      wrong_value("model.key_value_heads", {"3", "4", "8"}, {"model.heads", "layout.tp"}),
      wrong_value("model.top_k", {"5", "6", "8", "0"}, {"model.experts"}),
      wrong_value("model.state_head_width", {"3", "5", "7", "64"},
                  {"model.width", "layout.tp", "model.state_groups"}),
      wrong_value("model.state_groups", {"3", "5"}, {"model.width", "layout.tp", "model.state_head_width"}),
      wrong_value("model.type", {"hybrids", "gpt", "mamba", "Transformer", "transformer"}, {"model.pattern"}),
      wrong_value("model.preset", {"hybrid-small", "huge", ""}),
      wrong_value("model.norm", {"layer_norm", "rms", ""}),
      wrong_value("model.router_scores", {"relu", "softmin"}),
      wrong_value("model.balance_scope", {"rank", "all"}),
      wrong_value("model.depth_kind", {"delta", "none"}),
      wrong_value("model.depth_capacity", {"0", "1.5", "-0.1", "nan"}),
      wrong_value("model.ngram_orders", {"1", "2,17", "0", "2,2"}),
      wrong_value("model.dropout", {"1", "-0.1", "nan", "inf"}),
      wrong_value("model.capacity_factor", {"-1", "nan"}),
      wrong_value("model.tie_head", {"maybe", "2"}),
      wrong_value("model.context", {"0", "-16", "16777217", "4096"},
                  {"model.multi_token_depth"}),              // or too long
      wrong_value("model.vocabulary", {"2", "100", "256"}),  // fewer than there are bytes
  };
}

std::vector<Corruption> of_training(const fs::path& run) {
  return {
      {"a key that does not exist",
       {"unknown"},
       [](Settings& settings, Chance& chance) -> Named {
         const std::string key = any_of(Words{"model.widht", "layout.pipeline", "layout.vritual_stages",
                                              "training.recompute_block", "data.structures", "modle.width"},
                                        chance);
         settings[key] = "2";
         return Words{key};
       }},
      {"a loss scale without fp16",
       {"training.loss_scale", "training.precision"},
       [](Settings& settings, Chance& chance) -> Named {
         settings["training.loss_scale"] = any_of(Words{"1", "1024"}, chance);
         settings["training.precision"] = any_of(Words{"fp32", "bf16"}, chance);
         return Words{"training.loss_scale"};
       }},
      wrong_value("training.precision", {"fp8", "float32", "bf-16", "half"}),
      wrong_value("training.optimizer", {"adam", "lion", ""}),
      wrong_value("training.decay", {"exponential", "none"}),
      wrong_value("training.lr", {"0", "-1", "nan", "fast"}),
      wrong_value("training.betas", {"0.9", "0.9,1.5", "0.9,0.95,0.99", "a,b"}),
      wrong_value("training.momentum", {"0.5", "0.8"}, {"training.optimizer"}),  // AdamW has none
      wrong_value("training.warmup_steps", {"2", "3", "100"}, {"training.steps"}),
      wrong_value("training.validate_every", {"1", "2"}, {"data.validation_fraction"}),  // without data
      {"a checkpoint of another model",
       {"checkpoint.resume", "model.width", "model.pattern"},
       [run](Settings& settings, Chance& chance) -> Named {
         settings["checkpoint.resume"] =
             (run / any_of(Words{"checkpoints/step-00000002", "checkpoints"}, chance)).string();
         return Words{"embed.weight", "checkpoint.resume", "model.width"};
       }},
      {"a checkpoint that is not there",
       {"checkpoint.resume"},
       [run](Settings& settings, Chance& chance) -> Named {
         const std::string path =
             any_of(Words{(run / "config.toml").string(), "nowhere", "/dev/null", ""}, chance);
         settings["checkpoint.resume"] = path;
         return path.empty() ? Words{"checkpoint.resume"} : Words{"checkpoint.resume", path};
       }},
  };
}

std::vector<Corruption> of_data(const ConfigurationFiles& files) {
  const std::string shards = (files.run / "data").string(), none = (files.text / "*.py").string();
  return {
      wrong_value("data.shards", {shards}, {"data.sources"}),  // both
      {"sources that are not there",
       {"data.sources", "data.shards"},
       [none](Settings& settings, Chance& chance) -> Named {
         const std::string source = any_of(Words{"nowhere", none, "/proc/self/mem", "/dev/zero"}, chance);
         settings["data.sources"] = source;
         return Words{"data.sources", source};
       }},
      {"structure of tokens that are not text",
       {"data.structure", "data.format", "model.structure_embedding"},
       [](Settings& settings, Chance&) -> Named {
         settings["data.structure"] = "cpp";
         settings["data.format"] = "uint16";
         settings["model.structure_embedding"] = "true";
         return Words{"data.structure"};
       }},
      {"structure that the model does not use",
       {"data.structure", "model.structure_embedding", "model.relations", "model.tree_feed"},
       [](Settings& settings, Chance&) -> Named {
         if (settings.contains("model.relations")) return std::nullopt;
         settings["data.structure"] = "cpp";
         return Words{"data.structure"};
       }},
      {"tables that are too small for the structure",
       {"data.structure", "model.structure_embedding", "model.structure_kinds", "model.node_types"},
       [](Settings& settings, Chance& chance) -> Named {
         settings["data.structure"] = "cpp";
         settings["model.structure_embedding"] = "true";
         const std::string key = any_of(Words{"model.structure_kinds", "model.node_types"}, chance);
         settings[key] = any_of(Words{"1", "2", "3"}, chance);
         return Words{key};
       }},
      wrong_value("data.structure", {"python", "c++", "true"}, {"model.structure_embedding", "data.format"}),
      wrong_value("data.validation_fraction", {"0.95", "-0.1", "all"}, {"training.validate_every"}),
  };
}

// Models of a program's own: ranks find what is wrong with them. `named`: the parameter or the metadata.
Corruption own_model(const std::string& type, const std::string& named) {
  return {"a model that cannot be trained: " + type,
          with(kStages, {"model.type", "model.relations", "data.structure", "layout.dp", "layout.tp",
                         "layout.shard", "layout.ep", "training.recompute", "checkpoint.resume"}),
          [type, named](Settings& settings, Chance& chance) -> Named {
            settings["model.type"] = type;
            settings["model.relations"] = "2";
            settings["model.pattern"] = letters_of(settings);
            settings["layout.pp"] = "2";
            settings["layout.schedule"] = any_of(Words{"1F1B", "ZBVZeroBubble"}, chance);
            settings["layout.microbatches"] = "4";
            settings.erase("layout.virtual_stages");
            return Words{named};
          },
          true};
}

std::vector<Corruption> of_own_models() {
  return {own_model("tie-of-two-shapes", "relations.weight"),
          own_model("tie-of-a-frozen-copy", "relations.weight"),
          own_model("unknown-tie", "embed.wieght"),
          own_model("metadata-of-another-batch", "relations"),
          own_model("metadata-of-another-length", "relations"),
          own_model("metadata-of-another-dtype", "relations"),
          own_model("refused-by-one-stage", "model.width")};
}

}  // namespace

std::vector<Corruption> all_corruptions(const ConfigurationFiles& files) {
  std::vector<Corruption> all;
  for (const std::vector<Corruption>& some :
       {of_patterns(), of_schedules(files.schedules), of_layouts(), of_models(), of_training(files.run),
        of_data(files), of_own_models()})
    all.insert(all.end(), some.begin(), some.end());
  return all;
}

}  // namespace penstock::test::configurations
