#include "tests/cli/bad_inputs.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "penstock/base/printable.h"
#include "penstock/base/text.h"

namespace penstock::test {

namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

std::string shell_word(const std::string& word) {
  std::string out = "'";
  for (const char c : word) {
    if (c == '\'') {
      out += "'\\''";
    } else {
      out += c;
    }
  }
  return out + "'";
}

std::string read_all(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_all(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

template <class Items>
const typename Items::value_type& one_of(const Items& items, std::mt19937_64& chance) {
  return items[std::uniform_int_distribution<std::size_t>(0, items.size() - 1)(chance)];
}

bool likely(double probability, std::mt19937_64& chance) {
  return std::bernoulli_distribution(probability)(chance);
}

// The entries of a section of a help page: the lines indented below its title, without continuation lines.
// CLI11 2.3 writes "Options:" and indents by two columns, 2.5 writes "OPTIONS:" and has a separate column for
// short names.
Words section(const std::string& help, const std::string& title) {
  constexpr std::size_t kDeepest = 10;
  Words lines;
  std::istringstream text(help);
  bool inside = false;
  for (std::string line; std::getline(text, line);) {
    if (!line.empty() && line[0] != ' ') inside = to_lower(line) == to_lower(title) + ":";
    const std::size_t begin = line.find_first_not_of(' ');
    if (inside && begin != std::string::npos && begin > 0 && begin <= kDeepest)
      lines.push_back(line.substr(begin));
  }
  return lines;
}

CommandOption option_of(const std::string& entry) {
  const std::string line = std::regex_replace(entry, std::regex("^(-[A-Za-z]), +--"), "$1,--");
  std::istringstream text(line);
  std::string names, next;
  text >> names;
  const std::size_t at = names.find("--");
  const std::size_t type = names.size();
  // "--steps INT" has one space before its type, "--all    Show" several before its description; a long first
  // column is on its own line.
  const bool typed = line.size() > type + 1 && line[type] == ' ' && line[type + 1] != ' ';
  return {at == std::string::npos ? names.substr(0, names.find(',')) : names.substr(at), typed};
}

void add_commands(const std::string& program, const std::string& name, std::vector<CommandHelp>& all) {
  const Ended help =
      run_command(shell_word(program) + " " + name + " --help </dev/null", std::chrono::seconds(60));
  if (help.exit_code != 0)
    throw std::runtime_error("penstock " + name + " --help ended with " + std::to_string(help.exit_code) +
                             ": " + help.output);
  const Words subcommands = section(help.output, "Subcommands");
  for (const std::string& line : subcommands)
    add_commands(program, (name.empty() ? "" : name + " ") + line.substr(0, line.find(' ')), all);
  if (!subcommands.empty()) return;
  CommandHelp command{name, {}};
  for (const std::string& line : section(help.output, "Options")) command.options.push_back(option_of(line));
  std::erase_if(command.options, [](const CommandOption& option) { return option.flag == "--help"; });
  all.push_back(std::move(command));
}

// ---- a good command line for each command ----

enum class Input { None, File, Folder };

struct GoodLine {
  std::function<Words(const GoodFiles&)>
      words;                  // after the command name; CASE/ stands for the folder of the case
  Input input = Input::None;  // kind of `words()[0]`
  Words outputs;              // flags of its output files
  bool configured = false;    // accepts configuration keys
  bool extremes = true;       // very large valid values cost no time
};

const std::map<std::string, GoodLine>& good_lines() {
  static const std::map<std::string, GoodLine> lines = {
      {"doctor",
       {[](const GoodFiles&) {
          return Words{"--timeout", "20"};
        },
        Input::None,
        {},
        false,
        false}},
      {"launch",
       {[](const GoodFiles&) {
          return Words{"-n", "1", "--", "true"};
        },
        Input::None,
        {"--log-dir"},
        false,
        false}},
      {"schedule",
       {[](const GoodFiles&) { return Words{"--kind", "1F1B", "--ranks", "2", "--microbatches", "4"}; },
        Input::None,
        {"--output"}}},
      {"check", {[](const GoodFiles& good) { return Words{good.schedule.string()}; }, Input::File, {}}},
      {"simulate", {[](const GoodFiles& good) { return Words{good.schedule.string()}; }, Input::File, {}}},
      {"compare",
       {[](const GoodFiles&) {
          return Words{"--ranks", "2", "--microbatches", "4"};
        },
        Input::None,
        {}}},
      {"trace", {[](const GoodFiles& good) { return Words{good.trace.string()}; }, Input::File, {}}},
      {"data make",
       {[](const GoodFiles& good) {
          return Words{"--out", "CASE/made", "--source", good.text.string()};
        },
        Input::None,
        {"--out"}}},
      {"data show", {[](const GoodFiles& good) { return Words{good.shards.string()}; }, Input::Folder, {}}},
      {"train",
       {[](const GoodFiles& good) {
          return Words{good.config.string(), "--run_folder", "CASE/run", "--dry-run"};
        },
        Input::File,
        {},
        true}},
      {"resume",
       {[](const GoodFiles& good) {
          return Words{good.run.string(), "--steps", "3"};
        },
        Input::Folder,
        {},
        true,
        false}},
      {"generate",
       {[](const GoodFiles& good) {
          return Words{good.run.string(), "--tokens", "2"};
        },
        Input::Folder,
        {}}},
      {"report",
       {[](const GoodFiles& good) {
          return Words{good.run.string(), "--out", "CASE/page.html"};
        },
        Input::Folder,
        {"--out"}}},
      {"parity",
       {[](const GoodFiles& good) {
          return Words{good.config.string(), "--steps", "1"};
        },
        Input::File,
        {"--keep"},
        true,
        false}},
      {"compile",
       {[](const GoodFiles& good) {
          return Words{good.config.string(), "--output", "CASE/compiled"};
        },
        Input::File,
        {"--output"},
        true,
        false}},
      {"inspect memory",
       {[](const GoodFiles& good) {
          return Words{good.config.string(), "--predict-only"};
        },
        Input::File,
        {},
        true}},
      {"inspect costs",
       {[](const GoodFiles& good) { return Words{good.config.string()}; }, Input::File, {"--output"}, true}},
      {"partition",
       {[](const GoodFiles& good) { return Words{good.config.string()}; }, Input::File, {"--output"}, true}},
      {"inspect graph",
       {[](const GoodFiles& good) {
          return Words{good.graph.string(), "--nodes", "2"};
        },
        Input::File,
        {"--svg", "--dot", "--save"}}},
  };
  return lines;
}

// ---- corrupting ----

// Not a number, or a number that no field allows; text that is hard to print.
const Words& wrong_values() {
  static const Words values = {"",
                               " ",
                               "-1",
                               "-0.5",
                               "99999999999999999999999",
                               "9223372036854775808",
                               "-9223372036854775809",
                               "18446744073709551616",
                               "1e400",
                               "nan",
                               "-nan",
                               "NaN",
                               "inf",
                               "-inf",
                               "infinity",
                               "0x10",
                               "1,2",
                               "1:2:3",
                               "3..0",
                               "1e",
                               "true",
                               "none",
                               "auto",
                               "\xff\xfe\x80",
                               "\x1b[31mred\x1b[0m",
                               "a\nb",
                               "\t",
                               "\r\x07",
                               "%s%n%x",
                               "{}",
                               "{0}",
                               "$(true)",
                               "\xc3\xa9",
                               "\xed\xa0\x80",
                               "--",
                               "-",
                               "/",
                               ".",
                               "..",
                               "=",
                               "F=nan",
                               "F=1e308,I=1e308,W=1e308,send=1e308",
                               "F=-1",
                               "params=99999999999T",
                               "a=b=c",
                               "[",
                               "[1,",
                               "\"",
                               "'",
                               std::string(5000, '9'),
                               std::string(100000, 'x')};
  return values;
}

// Some of these are valid for some options.
const Words& extreme_values() {
  static const Words values = {
      "0",          "1",          "1048576",       "16777216",         "536870912",           "2147483647",
      "2147483648", "4294967296", "1099511627776", "1000000000000000", "9223372036854775807", "1e300",
      "1e-300"};
  return values;
}

std::string spoiled(std::string bytes, std::mt19937_64& chance) {
  const auto below = [&](std::size_t end) {
    return std::uniform_int_distribution<std::size_t>(0, end - 1)(chance);
  };
  if (bytes.empty() || likely(0.05, chance)) return std::string(below(64), static_cast<char>(below(256)));
  switch (below(5)) {
    case 0:
      bytes.resize(below(bytes.size()));
      break;
    case 1:
      for (std::size_t flips = 1 + below(8); flips > 0; --flips)
        bytes[below(bytes.size())] ^= static_cast<char>(1U << below(8));
      break;
    case 2: {  // a range of noise
      const std::size_t begin = below(bytes.size()), end = std::min(bytes.size(), begin + 1 + below(64));
      for (std::size_t i = begin; i < end; ++i) bytes[i] = static_cast<char>(below(256));
      break;
    }
    case 3: {  // changed numbers
      static const std::regex number("[0-9]+");
      Words::value_type value = one_of(extreme_values(), chance);
      std::vector<std::pair<std::size_t, std::size_t>> places;
      for (auto it = std::sregex_iterator(bytes.begin(), bytes.end(), number);
           it != std::sregex_iterator() && places.size() < 2000; ++it)
        places.emplace_back(static_cast<std::size_t>(it->position()), static_cast<std::size_t>(it->length()));
      if (!places.empty()) {
        const auto [at, length] = one_of(places, chance);
        bytes.replace(at, length, value);
      }
      break;
    }
    default:
      bytes.insert(below(bytes.size()), bytes.substr(below(bytes.size()), 1 + below(200)));
  }
  return bytes;
}

// A copy of the good input with one file corrupted or removed.
std::string spoiled_copy(const fs::path& good, const fs::path& folder, std::mt19937_64& chance) {
  const fs::path copy = folder / ("spoiled" + good.extension().string());
  fs::copy(good, copy, fs::copy_options::recursive);
  std::vector<fs::path> files;
  if (fs::is_directory(copy)) {
    for (const auto& entry : fs::recursive_directory_iterator(copy))
      if (entry.is_regular_file()) files.push_back(entry.path());
    std::sort(files.begin(), files.end());
  } else {
    files.push_back(copy);
  }
  const fs::path& file = one_of(files, chance);
  if (files.size() > 1 && likely(0.15, chance)) {
    fs::remove(file);
  } else {
    write_all(file, spoiled(read_all(file), chance));
  }
  return copy.string();
}

// Something of another kind in place of a file or folder.
std::string wrong_input(const GoodFiles& good, const fs::path& folder, std::mt19937_64& chance) {
  const auto made = [&](const std::string& name, const std::string& bytes) {
    write_all(folder / name, bytes);
    return (folder / name).string();
  };
  switch (std::uniform_int_distribution<int>(0, 15)(chance)) {
    case 0:
      return folder.string();
    case 1:
      return (folder / "missing").string();
    case 2:
      return (folder / "missing" / "deeper").string();
    case 3:
      return made("empty", "");
    case 4:
      return "/dev/null";
    case 5:
      return "/dev/zero";
    case 6:
      return "/proc/self/mem";
    case 7:
      return std::string(300, 'n');
    case 8:
      return "d/" + std::string(6000, 'n');
    case 9:
      return "\xff\xfe\x1b[2J";
    case 10: {
      fs::create_symlink(folder / "loop", folder / "loop");
      return (folder / "loop").string();
    }
    case 11: {  // unreadable, except for root
      const std::string path = made("secret", "secret");
      fs::permissions(path, fs::perms::none);
      return path;
    }
    case 12: {
      std::string noise(3000, ' ');
      for (char& c : noise) c = static_cast<char>(chance());
      return made("noise.bin", noise);
    }
    case 13:
      return good.text.string() + "/below-a-file";
    case 14:
      return made("zeros.bin", std::string(5000, '\0'));
    default: {
      const std::vector<fs::path> others{good.text, good.config, good.schedule, good.graph,
                                         good.run,  good.trace,  good.shards};
      return one_of(others, chance).string();
    }
  }
}

std::string wrong_output(const GoodFiles& good, const fs::path& folder, std::mt19937_64& chance) {
  const Words places{
      "/proc/no/such",       "/dev/full", "/dev/full/x",   folder.string(),   good.text.string() + "/x", "",
      std::string(300, 'n'), "/",         "\xff\x1b[2J/x", "missing/deeper/x"};
  return one_of(places, chance);
}

std::string with_value(const std::string& flag, const std::string& value, std::mt19937_64& chance) {
  return flag.starts_with("--") && likely(0.3, chance) ? shell_word(flag + "=" + value)
                                                       : shell_word(flag) + " " + shell_word(value);
}

}  // namespace

std::vector<CommandHelp> all_commands(const std::string& program) {
  std::vector<CommandHelp> all;
  add_commands(program, "", all);
  return all;
}

std::vector<std::string> own_variables(const std::string& program) {
  // The command and the program with the commands that need LibTorch.
  const std::string bytes = read_all(program) + read_all(program + "-tensor");
  std::set<std::string> names;
  const std::string prefix = "PENSTOCK_";
  for (std::size_t at = bytes.find(prefix); at != std::string::npos; at = bytes.find(prefix, at + 1)) {
    std::size_t end = at + prefix.size();
    while (end < bytes.size() &&
           (std::isupper(static_cast<unsigned char>(bytes[end])) != 0 ||
            std::isdigit(static_cast<unsigned char>(bytes[end])) != 0 || bytes[end] == '_'))
      ++end;
    if (end > at + prefix.size()) names.insert(bytes.substr(at, end - at));
  }
  return {names.begin(), names.end()};
}

bool has_good_line(const std::string& command) { return good_lines().contains(command); }

bool loads_libtorch(const std::string& command) {
  static const std::set<std::string> plain{"launch",    "schedule", "check",     "simulate",  "compare",
                                           "partition", "trace",    "data make", "data show", "report"};
  return !plain.contains(command);
}

GoodFiles make_good_files(const std::string& program, const fs::path& folder) {
  GoodFiles good;
  good.text = folder / "text.txt";
  good.config = folder / "good.toml";
  good.schedule = folder / "schedule.csv";
  good.graph = folder / "model.psgraph";
  good.run = folder / "run";
  good.shards = good.run / "data";
  fs::create_directories(folder / "text");
  for (int file = 0; file < 40; ++file)
    write_all(folder / "text" / (std::to_string(file) + ".txt"),
              "A text of its own, number " + std::to_string(file) + ".\n" +
                  std::string(300, static_cast<char>('a' + file % 26)) + "\n");
  write_all(good.text, "One text file for training, " + std::string(2000, 'x') + "\n");
  write_all(good.config,
            "[model]\npreset = \"tiny\"\nlayers = 2\nwidth = 16\nheads = 2\nkey_value_heads = 2\nfeed_width "
            "= 32\ncontext = 16\n"
            "[layout]\npp = 1\nmicrobatches = 2\nmicrobatch_size = 2\ndevice = \"cpu\"\n"
            "[training]\nsteps = 2\nwarmup_steps = 1\nvalidate_every = 0\n"
            "[output]\ntrace_steps = [1]\nsample_tokens = 0\n"
            "[data]\nvalidation_fraction = 0\nsources = [\"" +
                (folder / "text").string() + "\"]\n");
  const auto make = [&](const std::string& arguments) {
    const Ended ended = run_command(
        "cd " + shell_word(folder.string()) + " && " + shell_word(program) + " " + arguments + " </dev/null",
        std::chrono::seconds(120));
    if (ended.exit_code != 0)
      throw std::runtime_error("penstock " + arguments + " ended with " + std::to_string(ended.exit_code) +
                               ": " + ended.output);
  };
  make("train good.toml --run_folder run");
  make("schedule --kind 1F1B --ranks 2 --microbatches 4 -o schedule.csv");
  make("inspect graph good.toml --nodes 1 --layers 1 --save model.psgraph");
  for (const auto& entry : fs::recursive_directory_iterator(good.run / "traces")) good.trace = entry.path();
  // All keys with their sections, as written by the run.
  std::istringstream config(read_all(good.run / "config.toml"));
  std::string section;
  static const std::regex title("\\[([a-z_]+)\\].*"), key("([a-z_]+) *=.*");
  std::smatch found;
  for (std::string line; std::getline(config, line);) {
    if (std::regex_match(line, found, title))
      section = found[1].str() + ".";
    else if (std::regex_match(line, found, key))
      good.keys.push_back(section + found[1].str());
  }
  if (good.trace.empty() || good.keys.size() < 20)
    throw std::runtime_error("the run left no trace, or a configuration of " +
                             std::to_string(good.keys.size()) + " keys");
  return good;
}

BadInput make_bad_input(const std::string& program, const CommandHelp& command, const GoodFiles& good,
                        const std::vector<std::string>& variables, const fs::path& folder,
                        std::mt19937_64& chance) {
  const GoodLine& line = good_lines().at(command.name);
  Words words = line.words(good);
  for (std::string& word : words)
    if (word.starts_with("CASE/")) word = (folder / word.substr(5)).string();
  std::string kind, before, extra;
  std::vector<CommandOption> valued;
  for (const CommandOption& option : command.options)
    if (option.takes_value) valued.push_back(option);
  const auto value = [&] {
    return line.extremes && likely(0.4, chance) ? one_of(extreme_values(), chance)
                                                : one_of(wrong_values(), chance);
  };

  switch (std::uniform_int_distribution<int>(0, 9)(chance)) {
    case 0: {
      kind = "a flag that does not exist";
      const Words flags{"--no-such-flag",
                        "-Z",
                        "--" + one_of(wrong_values(), chance),
                        "---",
                        "--" + std::string(3000, 'f'),
                        "--no\x1b[2Jflag",
                        one_of(wrong_values(), chance)};
      extra = " " + shell_word(one_of(flags, chance));
      break;
    }
    case 1:
      if (!command.options.empty()) {
        kind = "a flag without value, or with one too many";
        const CommandOption& option = one_of(command.options, chance);
        extra = " " + shell_word(option.flag) + (option.takes_value ? "" : "=" + shell_word(value()));
        break;
      }
      [[fallthrough]];
    case 2:
    case 3:
      if (line.configured && likely(0.6, chance)) {
        kind = "a bad value of a key";
        const std::string& key = one_of(good.keys, chance);
        extra = " " + with_value("--" + (likely(0.5, chance) ? key : key.substr(key.find('.') + 1)), value(),
                                 chance);
        break;
      }
      if (!valued.empty()) {
        kind = "a bad value of a flag";
        const std::string& flag = one_of(valued, chance).flag;
        extra = " " + with_value(flag, value(), chance);
        // After "--" it would belong to the program; given twice it would be another mistake.
        const auto own = std::find(words.begin(), words.end(), flag);
        if (own != words.end() && own + 1 != words.end()) words.erase(own, own + 2);
        break;
      }
      [[fallthrough]];
    case 4:
    case 5:
      if (line.input != Input::None) {
        kind = "a damaged file";
        words[0] = spoiled_copy(words[0], folder, chance);
        break;
      }
      [[fallthrough]];
    case 6:
      if (line.input != Input::None) {
        kind = "something of another kind";
        words[0] = wrong_input(good, folder, chance);
        break;
      }
      [[fallthrough]];
    case 7:
      if (!line.outputs.empty()) {
        kind = "an output that cannot be written";
        const std::string flag = one_of(line.outputs, chance);
        const auto own = std::find(words.begin(), words.end(), flag);
        if (own != words.end() && own + 1 != words.end()) words.erase(own, own + 2);
        extra = " " + with_value(flag, wrong_output(good, folder, chance), chance);
        break;
      }
      [[fallthrough]];
    case 8:
      if (line.configured) {
        kind = "a path of a configuration";
        const Words keys{"--data.sources",      "--data.shards",       "--layout.schedule",
                         "--checkpoint.resume", "--checkpoint.folder", "--output.run_folder"};
        const std::string& key = one_of(keys, chance);
        extra = " " + with_value(key,
                                 key == "--output.run_folder" ? wrong_output(good, folder, chance)
                                 : key == "--layout.schedule" ? wrong_input(good, folder, chance) + ".csv"
                                                              : wrong_input(good, folder, chance),
                                 chance);
        // Only real training checks some of them; a good run of two steps takes no time.
        if (command.name == "train" && likely(0.5, chance)) std::erase(words, "--dry-run");
        break;
      }
      [[fallthrough]];
    default: {
      kind = "a variable of the environment";
      Words names = variables;
      names.insert(names.end(),
                   {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TMPDIR"});
      std::string set = one_of(wrong_values(), chance);
      if (set.size() > 5000) set.resize(5000);
      before = one_of(names, chance) + "=" + shell_word(set) + " ";
    }
  }
  BadInput bad;
  bad.kind = kind;
  bad.command =
      "cd " + shell_word(folder.string()) + " && " + before + shell_word(program) + " " + command.name;
  // The corrupted argument comes first if the rest belongs to another program.
  const auto end = std::find(words.begin(), words.end(), "--");
  for (auto word = words.begin(); word != end; ++word) bad.command += " " + shell_word(*word);
  bad.command += extra;
  for (auto word = end; word != words.end(); ++word) bad.command += " " + shell_word(*word);
  bad.command += " </dev/null";
  return bad;
}

std::string objection(const std::string& command, const Ended& ended) {
  const bool launches = command == "launch";
  if (ended.exit_code == Ended::kTimedOut) return "did not end within the deadline";
  if (ended.exit_code == 70) return "an unexplained error (exit code 70)";
  // 3: the last checkpoint could not be written. launch also returns the codes of programs that cannot be
  // started.
  const std::set<int> allowed = launches                                    ? std::set<int>{0, 1, 2, 126, 127}
                                : command == "train" || command == "resume" ? std::set<int>{0, 1, 2, 3}
                                                                            : std::set<int>{0, 1, 2};
  if (!allowed.contains(ended.exit_code)) return "exit code " + std::to_string(ended.exit_code);
  const std::string& output = ended.output;
  for (const char* forbidden : {"terminate called",
                                "c10::",
                                "at::",
                                "frame #",
                                "std::",
                                "what():",
                                "Exception raised from",
                                "json.exception",
                                "filesystem error",
                                "basic_",
                                "_M_",
                                "vector::",
                                "stoi",
                                "bad_alloc",
                                "internal error",
                                "defect of Penstock",
                                "Segmentation fault",
                                "core dumped",
                                "Sanitizer",
                                "enforce fail",
                                "INTERNAL ASSERT",
                                "CLI::"})
    if (output.find(forbidden) != std::string::npos)
      return "\"" + std::string(forbidden) + "\" in its output";
  if (printable(output) != output) return "bytes in its output that are not text";
  if (ended.exit_code != 0) {
    static const std::regex ours("(^|\n)(penstock: |\\[launch\\] |skipped )");
    if (output.empty()) return "no message";
    if (ended.exit_code == 2 && !std::regex_search(output, ours))
      return "a message that does not begin with \"penstock: \"";
    if (output.size() > 20000) return "a message of " + std::to_string(output.size()) + " bytes";
  } else if (command != "generate") {
    static const std::regex no_number("(^|[^A-Za-z_=-])-?(nan|inf)($|[^A-Za-z_])");
    // Large outputs were requested; their beginning is sufficient, and the search is recursive.
    std::istringstream lines(output.substr(0, 100000));
    for (std::string text; std::getline(lines, text);) {
      // Names of files that may be called inf or -nan, and constants of graphs, are no results.
      if (text.starts_with("wrote ") || text.starts_with("report: ") ||
          text.find(" = aten::") != std::string::npos)
        continue;
      if (const auto colon = text.find(": "); colon < text.find(' ')) text.erase(0, colon);
      if (text.size() < 2000 && std::regex_search(text, no_number)) return "success with nan or inf: " + text;
    }
  }
  return "";
}

}  // namespace penstock::test
