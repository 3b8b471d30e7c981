#include "penstock/train/config/config_fields.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <type_traits>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/base/number.h"
#include "penstock/base/quote.h"
#include "penstock/base/text.h"

namespace penstock::train {

namespace {

constexpr double kMany = 1e15;  // exact in a double, and far beyond any count
constexpr double kHuge = 1e30;

// &TrainConfig::model, &ModelConfig::width -> where it lies in a config
template <class Section, class Value>
std::function<FieldPlace(TrainConfig&)> at(Section TrainConfig::* section, Value Section::* value) {
  return [=](TrainConfig& config) -> FieldPlace { return &(config.*section.*value); };
}

std::vector<ConfigField> make_fields() {
  using T = TrainConfig;
  using M = ModelConfig;
  using L = LayoutConfig;
  using R = TrainingConfig;
  using D = DataConfig;
  using C = CheckpointConfig;
  using O = OutputConfig;
  using U = LaunchConfig;
  return {
      {"model", "preset", "Name of a set of values that everything else is laid over", at(&T::model, &M::preset), 0, 0, false, {}},
      {"model", "vocabulary", "Tokens that the model knows; bytes need 257", at(&T::model, &M::vocabulary), 2, 4294967296.0},
      {"model", "width", "Width of the residual stream; a multiple of heads", at(&T::model, &M::width), 1, 1 << 20},
      {"model", "layers", "Blocks of the whole model", at(&T::model, &M::layers), 1, 1 << 16},
      {"model", "heads", "Heads of attention", at(&T::model, &M::heads), 1, 1 << 16},
      {"model", "key_value_heads", "Heads of keys and values, each shared by heads / key_value_heads queries; 0: as many as heads", at(&T::model, &M::key_value_heads), 0, 1 << 16},
      {"model", "feed_width", "Inner width of the feed-forward layers; 0: 8/3 of the width, rounded up to a multiple of 32", at(&T::model, &M::feed_width), 0, 1 << 22},
      {"model", "context", "Tokens of a sample", at(&T::model, &M::context), 1, 1 << 24},
      {"model", "rope_theta", "Base of the rotary position angles", at(&T::model, &M::rope_theta), 1, 1e12},
      {"model", "norm_epsilon", "Added under the root of the normalizations", at(&T::model, &M::norm_epsilon), 0, 1, true},
      {"model", "tie_head", "Use the embedding as the output layer too", at(&T::model, &M::tie_head)},
      {"model", "dropout", "Share of activations that is set to zero in training", at(&T::model, &M::dropout), 0, 0.99},
      {"model", "pattern", "One letter a block (A: attention), | where a pipeline stage ends; empty: A for each layer", at(&T::model, &M::pattern)},

      {"layout", "ranks", "Processes; 0: pp * dp * tp", at(&T::layout, &L::ranks), 0, 65536},
      {"layout", "pp", "Ranks of the pipeline", at(&T::layout, &L::pp), 1, 65536},
      {"layout", "virtual_stages", "Stages on each rank of the pipeline; 0: what the schedule demands, 2 for interleaved ones", at(&T::layout, &L::virtual_stages), 0, 65536},
      {"layout", "dp", "Data-parallel ranks: each takes its share of every microbatch", at(&T::layout, &L::dp), 1, 65536},
      {"layout", "shard", "Data-parallel ranks among which parameters, gradients and optimizer state are spread (fully_shard); 1: each has all of them, dp: each a part, between: replicas of groups that share", at(&T::layout, &L::shard), 1, 65536},
      {"layout", "tp", "Ranks that share each layer (tensor parallel)", at(&T::layout, &L::tp), 1, 65536},
      {"layout", "schedule", "Kind of pipeline schedule (penstock schedule --help lists them), or the path of a CSV file; auto: ZBVZeroBubble where there are blocks for two stages a rank, else 1F1B or Interleaved1F1B", at(&T::layout, &L::schedule)},
      {"layout", "microbatches", "Microbatches of one run of the schedule", at(&T::layout, &L::microbatches), 1, 1 << 20},
      {"layout", "microbatch_size", "Samples of a microbatch", at(&T::layout, &L::microbatch_size), 1, 1 << 20},
      {"layout", "partition", "How blocks are spread over stages: by their number or by their cost", at(&T::layout, &L::partition), 0, 0, false, {"count", "cost"}},
      {"layout", "transport", "What carries tensors between stages; auto: nccl for cuda, ucx within one machine if there, else gloo. nccl is for cuda only, gloo and ucx for the CPU", at(&T::layout, &L::transport), 0, 0, false, {"auto", "gloo", "ucx", "nccl"}},
      {"layout", "device", "Where the model runs; auto: cuda if there is a GPU for each rank, else cpu", at(&T::layout, &L::device), 0, 0, false, {"auto", "cpu", "cuda"}},

      {"training", "steps", "Optimizer steps of the whole run", at(&T::training, &R::steps), 1, kMany},
      {"training", "global_batch", "Samples of a step over all ranks; 0: dp * microbatches * microbatch_size * accumulation", at(&T::training, &R::global_batch), 0, kMany},
      {"training", "accumulation", "Runs of the schedule whose gradients are added up for a step; 0: what global_batch needs, else 1", at(&T::training, &R::accumulation), 0, 1 << 20},
      {"training", "optimizer", "Optimizer", at(&T::training, &R::optimizer), 0, 0, false, {"adamw", "sgd"}},
      {"training", "lr", "Greatest learning rate", at(&T::training, &R::lr), 0, 1e3, true},
      {"training", "warmup_steps", "Steps over which the learning rate rises from 0", at(&T::training, &R::warmup_steps), 0, kMany},
      {"training", "decay", "How the learning rate falls after the warm-up", at(&T::training, &R::decay), 0, 0, false, {"cosine", "linear", "constant"}},
      {"training", "min_lr_ratio", "Last learning rate as a share of lr", at(&T::training, &R::min_lr_ratio), 0, 1},
      {"training", "weight_decay", "Decoupled weight decay", at(&T::training, &R::weight_decay), 0, 1e3},
      {"training", "betas", "Decay of AdamW's averages of gradients and of their squares", at(&T::training, &R::betas), 0, 0.999999999, false, {}, 2},
      {"training", "epsilon", "Added to AdamW's denominator", at(&T::training, &R::epsilon), 0, 1, true},
      {"training", "momentum", "Momentum of SGD", at(&T::training, &R::momentum), 0, 0.999999999},
      {"training", "clip_norm", "Greatest norm of all gradients together; 0: no clipping", at(&T::training, &R::clip_norm), 0, kHuge},
      {"training", "precision", "Type that layers compute in; parameters stay fp32", at(&T::training, &R::precision), 0, 0, false, {"fp32", "bf16", "fp16"}},
      {"training", "loss_scale", "Factor of the loss under fp16; 0: found and adapted while training", at(&T::training, &R::loss_scale), 0, kHuge},
      {"training", "seed", "Of parameters, dropout and the order of the data", at(&T::training, &R::seed), 0, kMany},
      {"training", "validate_every", "Steps between validations; 0: none", at(&T::training, &R::validate_every), 0, kMany},
      {"training", "validate_batches", "Batches of a validation", at(&T::training, &R::validate_batches), 1, kMany},
      {"training", "time_limit_s", "Seconds after which the run saves and ends; 0: none", at(&T::training, &R::time_limit_s), 0, kHuge},

      {"data", "sources", "Files, folders and patterns (*.txt): text, or token files; empty, without shards: the C++ headers of this machine", at(&T::data, &D::sources)},
      {"data", "shards", "Folder of token shards (penstock data make) instead of sources", at(&T::data, &D::shards)},
      {"data", "format", "What sources are; auto: token files where they begin with a header of llm.c, else text; uint16: files of 16-bit tokens without a header (nanoGPT)", at(&T::data, &D::format), 0, 0, false, {"auto", "text", "uint16"}},
      {"data", "end_of_document", "Token that ends a document in token files; -1: GPT-2's 50256 or Llama 3's 128000 after a header of llm.c, none without a header", at(&T::data, &D::end_of_document), -1, 4294967295.0},
      {"data", "extensions", "Only files with these; empty: all of the given sources, those of C++ for the default ones", at(&T::data, &D::extensions)},
      {"data", "validation_fraction", "Share of the text that is kept for validation: whole files, or with few files the end of each", at(&T::data, &D::validation_fraction), 0, 0.9},
      {"data", "cap_bytes", "Bytes of text at most; 0: no cap, which is the default for sources that are named", at(&T::data, &D::cap_bytes), 0, kMany},
      {"data", "document_mask", "Tokens see only their own document; without, what stands before it in the sample, too, which is faster on GPUs", at(&T::data, &D::document_mask)},
      {"data", "skip_bad_files", "Go on without unreadable, empty and binary files", at(&T::data, &D::skip_bad_files)},

      {"checkpoint", "folder", "Folder of the checkpoints; empty: checkpoints/ in the run folder", at(&T::checkpoint, &C::folder)},
      {"checkpoint", "every", "Steps between checkpoints; 0: only at the end", at(&T::checkpoint, &C::every), 0, kMany},
      {"checkpoint", "keep", "Checkpoints that are kept", at(&T::checkpoint, &C::keep), 1, kMany},
      {"checkpoint", "resume", "What a new run starts from; auto: the newest checkpoint of its folder if there is one; never; or the path of a checkpoint. A run that has checkpoints continues from its own newest one", at(&T::checkpoint, &C::resume)},
      {"checkpoint", "fallback", "Take the one before when the newest is damaged", at(&T::checkpoint, &C::fallback)},
      {"checkpoint", "on_failure", "When a checkpoint cannot be written; auto: train on and try again if there is an older one, else stop", at(&T::checkpoint, &C::on_failure), 0, 0, false, {"auto", "continue", "stop"}},

      {"output", "run_folder", "Folder of everything that the run writes; empty: a new one under runs/", at(&T::output, &O::run_folder)},
      {"output", "metrics_every", "Steps between lines of metrics.jsonl", at(&T::output, &O::metrics_every), 1, kMany},
      {"output", "trace_steps", "Steps whose timeline is recorded", at(&T::output, &O::trace_steps), 0, kMany},
      {"output", "progress", "What is shown while training; auto: a bar on a terminal, else lines", at(&T::output, &O::progress), 0, 0, false, {"auto", "bar", "lines", "none"}},
      {"output", "sample_prompt", "Text that the sample at the end continues; at least one byte", at(&T::output, &O::sample_prompt)},
      {"output", "sample_tokens", "Tokens of the sample; 0: none", at(&T::output, &O::sample_tokens), 0, 1 << 24},

      {"launch", "grace_s", "Seconds that the other ranks have to end on their own after one has failed; then they are ended", at(&T::launch, &U::grace_s), 0, 86400},
      {"launch", "stop_grace_s", "Seconds that all ranks have after SIGTERM or Ctrl-C for their step and a checkpoint; then they are killed", at(&T::launch, &U::stop_grace_s), 0, 86400},
      {"launch", "timeout_s", "Seconds that a rank waits for the others, in rendezvous and in every operation, before it fails; 0: PENSTOCK_TIMEOUT_S, else 300", at(&T::launch, &U::timeout_s), 0, 1e6},
  };
}

[[noreturn]] void refuse(const ConfigField& field, const std::string& origin, const std::string& actual) {
  const std::string range = field.range_text();
  const std::string expected = range.empty() ? field.type_text() : fmt::format("{} {}", field.type_text(), range);
  throw ConfigError(describe(fmt::format("{}: {}", origin, field.name()), actual, expected,
                             fmt::format("it means: {}", field.help)));
}

std::string toml_quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\u{:04X}", byte);
    } else {
      out += c;
    }
  }
  return out + '"';
}

struct TomlText {
  std::string operator()(std::int64_t number) const { return fmt::format("{}", number); }
  std::string operator()(double number) const {
    std::string text = fmt::format("{}", number);
    if (text.find_first_of(".en") == std::string::npos) text += ".0";  // else it would be a whole number; nan and inf stay
    return text;
  }
  std::string operator()(bool flag) const { return flag ? "true" : "false"; }
  std::string operator()(const std::string& text) const { return toml_quoted(text); }
  template <class T>
  std::string operator()(const std::vector<T>& list) const {
    std::vector<std::string> items;
    for (const T& item : list) items.push_back((*this)(item));
    return fmt::format("[{}]", fmt::join(items, ", "));
  }
};

}  // namespace

const std::vector<ConfigField>& config_fields() {
  static const std::vector<ConfigField> kFields = make_fields();
  return kFields;
}

const std::vector<ConfigSection>& config_sections() {
  static const std::vector<ConfigSection> kSections = {
      {"model", "The transformer"},
      {"layout", "How the model and the batch are divided over ranks"},
      {"training", "Steps, optimizer, precision, validation"},
      {"data", "What is trained on"},
      {"checkpoint", "What is saved, and what a run starts from"},
      {"output", "What a run writes and shows"},
      {"launch", "The ranks that penstock train starts: how long they wait for each other"},
  };
  return kSections;
}

FieldData ConfigField::get(const TrainConfig& config) const {
  // The place is only read from.
  return std::visit([](auto* value) -> FieldData { return *value; }, place(const_cast<TrainConfig&>(config)));
}

void ConfigField::set(TrainConfig& config, const FieldData& value) const {
  std::visit(
      [&](auto* to) {
        using Value = std::remove_pointer_t<decltype(to)>;
        PENSTOCK_INVARIANT(std::holds_alternative<Value>(value), "the value has the type of its field");
        *to = std::get<Value>(value);
      },
      place(config));
}

bool ConfigField::is_list() const {
  const FieldData value = get(TrainConfig{});
  return std::holds_alternative<std::vector<std::string>>(value) ||
         std::holds_alternative<std::vector<std::int64_t>>(value) || std::holds_alternative<std::vector<double>>(value);
}

bool ConfigField::is_flag() const {
  return std::holds_alternative<bool>(get(TrainConfig{}));
}

std::string ConfigField::type_text() const {
  struct Visitor {
    std::string operator()(std::int64_t) const { return "a whole number"; }
    std::string operator()(double) const { return "a number"; }
    std::string operator()(bool) const { return "true or false"; }
    std::string operator()(const std::string&) const { return "a text"; }
    std::string operator()(const std::vector<std::string>&) const { return "a list of texts"; }
    std::string operator()(const std::vector<std::int64_t>&) const { return "a list of whole numbers"; }
    std::string operator()(const std::vector<double>&) const { return "a list of numbers"; }
  };
  std::string text = std::visit(Visitor{}, get(TrainConfig{}));
  if (count > 0) text = fmt::format("a list of {} numbers", count);
  return text;
}

std::string ConfigField::range_text() const {
  if (!choices.empty()) return fmt::format("out of {}", fmt::join(choices, ", "));
  if (low == 0 && high == 0) return "";
  return NumberRange{low, high, above_low}.text();
}

const ConfigField& find_field(std::string_view name, std::string_view where, std::span<const ConfigField> fields) {
  const bool full = name.find('.') != std::string_view::npos;
  std::vector<const ConfigField*> found;
  std::vector<std::string> names;  // to guess from
  for (const ConfigField& field : fields) {
    if (full ? field.name() == name : field.key == name) found.push_back(&field);
    names.push_back(full ? field.name() : std::string(field.key));
  }
  if (found.size() == 1) return *found.front();
  if (found.size() > 1) {
    std::vector<std::string> full_names;
    for (const ConfigField* field : found) full_names.push_back(field->name());
    throw ConfigError(describe(fmt::format("{}: key", where), fmt::format("{}, which several sections have", quote(name)),
                               fmt::format("one of {}", fmt::join(full_names, ", "))));
  }
  std::string meant;
  if (full) {  // the right key in the wrong section is a better guess than a similar name
    const std::string_view key = name.substr(name.rfind('.') + 1);
    for (const ConfigField& field : fields) {
      if (field.key == key) meant = field.name();
    }
  }
  if (meant.empty()) meant = key_known_as(full ? name.substr(name.rfind('.') + 1) : name);
  if (meant.empty()) meant = nearest_name(name, names);
  throw ConfigError(describe(fmt::format("{}: unknown key", where), quote(name), "",
                             meant.empty() ? "penstock train --help lists all keys" : fmt::format("did you mean {}?", meant)));
}

ConfigSetting parse_setting(const ConfigField& field, const std::vector<std::string>& words, const std::string& origin) {
  std::vector<std::string> items;
  if (field.is_list()) {
    for (const std::string& word : words) {
      for (std::size_t begin = 0; begin <= word.size();) {
        const std::size_t end = std::min(word.find(',', begin), word.size());
        if (end > begin) items.push_back(word.substr(begin, end - begin));
        begin = end + 1;
      }
    }
  } else if (words.size() != 1) {
    refuse(field, origin, words.empty() ? "nothing" : count_of(words.size(), "value"));
  }
  const auto number = [&]<class T>(const std::string& text, T) {
    std::optional<T> value;
    if constexpr (std::is_same_v<T, double>) value = parse_number(text);
    else value = parse_whole(text);
    if (!value) refuse(field, origin, quote(text));
    return *value;
  };
  FieldData value = field.get(TrainConfig{});
  std::visit(
      [&](auto& to) {
        using Value = std::remove_reference_t<decltype(to)>;
        if constexpr (std::is_same_v<Value, bool>) {
          const std::string word = to_lower(words.front());
          if (word != "true" && word != "false") refuse(field, origin, quote(words.front()));
          to = word == "true";
        } else if constexpr (std::is_arithmetic_v<Value>) {
          to = number(words.front(), Value{});
        } else if constexpr (std::is_same_v<Value, std::string>) {
          to = words.front();
        } else if constexpr (std::is_same_v<Value, std::vector<std::string>>) {
          to = items;
        } else {
          to.clear();
          for (const std::string& item : items) to.push_back(number(item, typename Value::value_type{}));
        }
      },
      value);
  ConfigSetting setting{&field, std::move(value), origin};
  check_setting(setting);
  return setting;
}

void check_setting(ConfigSetting& setting) {
  const ConfigField& field = *setting.field;
  const auto check_number = [&](auto value) {
    const auto number = static_cast<double>(value);
    const bool fits = NumberRange{field.low, field.high, field.above_low}.contains(number);  // false for NaN
    if (!fits) refuse(field, setting.origin, to_toml(FieldData(value)));
  };
  std::visit(
      [&](auto& value) {
        using Value = std::remove_reference_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, std::string>) {
          if (field.choices.empty()) return;
          const std::string lower = to_lower(value);
          if (std::find(field.choices.begin(), field.choices.end(), lower) == field.choices.end()) {
            const std::string nearest = nearest_name(lower, field.choices);
            throw ConfigError(describe(fmt::format("{}: {}", setting.origin, field.name()), quote(value),
                                       fmt::format("one of {}", fmt::join(field.choices, ", ")),
                                       nearest.empty() ? "" : fmt::format("did you mean {}?", nearest)));
          }
          value = lower;
        } else if constexpr (std::is_same_v<Value, std::int64_t> || std::is_same_v<Value, double>) {
          check_number(value);
        } else if constexpr (std::is_same_v<Value, std::vector<std::int64_t>> || std::is_same_v<Value, std::vector<double>>) {
          if (field.count > 0 && value.size() != field.count)
            refuse(field, setting.origin, count_of(value.size(), "value"));
          for (const auto item : value) check_number(item);
        }
      },
      setting.value);
}

std::string to_toml(const FieldData& value) {
  return std::visit(TomlText{}, value);
}

}  // namespace penstock::train
