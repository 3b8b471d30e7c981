// Walks all commands and all of their options in one process: every number is parsed by the common parser.
#include <gtest/gtest.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "penstock/cli/common/commands.h"
#include "penstock/errors.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::test {
namespace commands_test {

struct Accepted {};

// The leaves of the command tree, with the words that lead to them. All callbacks are replaced and only throw
// Accepted.
class AllCommands {
 public:
  AllCommands() {
    cli::add_all_commands(app_, outcome_);
    collect(app_, {});
  }

  struct Leaf {
    std::vector<std::string> words;
    CLI::App* command;
  };
  const std::vector<Leaf>& leaves() const { return leaves_; }

  // Returns the parse error, or an empty string if the arguments were accepted.
  std::string error_of(std::vector<std::string> arguments) {
    std::reverse(arguments.begin(), arguments.end());  // the order that CLI11 expects
    try {
      app_.parse(std::move(arguments));
    } catch (const CLI::ParseError& error) {
      return error.what();
    } catch (const ConfigError& error) {
      return error.what();
    } catch (const Accepted&) {
      return "";
    }
    return "";
  }

 private:
  void collect(CLI::App& app, const std::vector<std::string>& words) {
    const std::vector<CLI::App*> inner = app.get_subcommands([](CLI::App*) { return true; });
    if (inner.empty()) {
      app.parse_complete_callback([] { throw Accepted{}; });  // before the callback that runs the command
      app.preparse_callback({});                              // launch's callback adds an option per word
      leaves_.push_back({words, &app});
    }
    for (CLI::App* each : inner) {
      std::vector<std::string> more = words;
      more.push_back(each->get_name());
      collect(*each, more);
    }
  }

  CLI::App app_{"penstock"};
  cli::CommandOutcome outcome_;
  std::vector<Leaf> leaves_;
};

// Options that take text. Every other option with a value is a number; an option in neither category fails
// here.
const std::set<std::string> kTexts = {
    "--kind",      "--cost",         "--memory",      "--communication", "--max-activations",
    "--max-bytes", "--format",       "--output",      "--placement",     "--sends",
    "--log-dir",   "--out",          "--source",      "--extensions",    "--prompt",
    "--device",    "--keep",         "--svg",         "--dot",           "--html",
    "--save",      "--worker",       "--handed",      "--side",          "--probe",
    "--report",    "--help",         "--by",          "--cuts",          "--minimize",
    "--costs",     "--memory-limit", "--activations", "--rdzv_endpoint", "--hosts",
    "--ssh",       "--job-name",     "--sbatch"};

TEST(Commands, EveryNumberRefusesMalformedAndNonFiniteValues) {
  AllCommands all;
  std::size_t numbers = 0;
  for (const AllCommands::Leaf& leaf : all.leaves()) {
    std::vector<std::string> required = leaf.words;  // so that nothing else is missing
    for (const CLI::Option* option : leaf.command->get_options())
      if (option->get_required() && option->get_positional())
        required.push_back("something");
      else if (option->get_required())
        required.insert(required.end(), {option->get_name(), "something"});
    for (const CLI::Option* option : leaf.command->get_options()) {
      if (option->get_positional() || option->get_items_expected_max() == 0 || option->get_lnames().empty())
        continue;
      const std::string name = "--" + option->get_lnames().back();
      if (kTexts.contains(name)) continue;
      ++numbers;
      for (const char* bad : {"nan", "-nan", "inf", "-inf", "infinity", "1e999", "-1e999", "", " ", "3x", "x",
                              "0x10", "+1", "1 2"}) {
        std::vector<std::string> arguments = required;
        if (*bad == '\0')
          arguments.insert(arguments.end(), {name, bad});
        else
          arguments.push_back(name + "=" + bad);
        const std::string error = all.error_of(arguments);
        EXPECT_TRUE(has_text(error, name)) << leaf.command->get_name() << " " << name << "=" << bad;
        EXPECT_TRUE(has_text(error, "expected")) << leaf.command->get_name() << " " << name << "=" << bad;
      }
      std::vector<std::string> apart = required;
      apart.insert(apart.end(), {name, "-inf"});
      EXPECT_TRUE(has_text(all.error_of(apart), name)) << leaf.command->get_name() << " " << name << " -inf";
      // A number below every range: no option accepts negative numbers.
      std::vector<std::string> negative = required;
      negative.insert(negative.end(), {name, "-1"});
      EXPECT_TRUE(has_text(all.error_of(negative), name)) << leaf.command->get_name() << " " << name << " -1";
      // Valid numbers are accepted.
      std::vector<std::string> good = required;
      good.insert(good.end(), {name, "1"});
      EXPECT_EQ(all.error_of(good), "") << leaf.command->get_name() << " " << name;
    }
  }
  EXPECT_GE(numbers, 25u) << "fewer numbers than there were: does the walk still find them?";
}

TEST(Commands, EveryCommandHasHelpWithAnExample) {
  AllCommands all;
  EXPECT_GE(all.leaves().size(), 14u);
  for (const AllCommands::Leaf& leaf : all.leaves()) {
    std::string name = "penstock";
    for (const std::string& word : leaf.words) name += " " + word;
    EXPECT_TRUE(has_text(leaf.command->help(), "Example")) << name;
    EXPECT_TRUE(has_text(leaf.command->help(), name)) << name;
  }
}

TEST(Commands, HelpOfTrainListsAllKeysWithDefaults) {
  AllCommands all;
  for (const AllCommands::Leaf& leaf : all.leaves()) {
    if (leaf.words != std::vector<std::string>{"train"}) continue;
    const std::string help = leaf.command->help();
    for (const std::string& key : train::config_keys()) {
      EXPECT_TRUE(has_text(help, "--" + key.substr(key.find('.') + 1) + " "));
      EXPECT_TRUE(has_text(help, "[" + key.substr(0, key.find('.')) + "]"));
    }
    EXPECT_TRUE(has_text(help, "--lr 0.002\n"));
    EXPECT_TRUE(has_text(help, "--microbatches 8\n"));
    return;
  }
  ADD_FAILURE() << "there is no train";
}

// Sets a variable for a scope.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

TEST(Environment, MalformedVariablesAreRefusedByName) {
  EXPECT_NO_THROW(cli::check_environment());
  for (const char* name : {"PENSTOCK_TIMEOUT_S", "PENSTOCK_DEBUG", "PENSTOCK_LOG", "PENSTOCK_P2P",
                           "PENSTOCK_TRACE_TRANSFERS", "PENSTOCK_RECORDER_SIZE", "PENSTOCK_UCX_SPIN_US",
                           "PENSTOCK_PROGRESS_TTY", "PENSTOCK_RESTART_COUNT", "PENSTOCK_RENDEZVOUS"})
    for (const char* value : {"garbage", "nan", "inf", "-1", "1e999", "5x", "\x1b[31m"}) {
      const Variable variable(name, value);
      const std::string error = message_of<ConfigError>([] { cli::check_environment(); });
      EXPECT_TRUE(has_text(error, name)) << value;
      EXPECT_EQ(error.find('\x1b'), std::string::npos) << "an escape sequence reaches the terminal";
    }
}

TEST(Environment, PathsThatNoFileCanHaveAreRefusedWithoutTheirBytes) {
  for (const char* name : {"PENSTOCK_RECORDER_DIR", "PENSTOCK_STALL_DIR", "PENSTOCK_LOG_DIR"}) {
    const Variable variable(name, std::string(5000, '9').c_str());
    const std::string error = message_of<ConfigError>([] { cli::check_environment(); });
    EXPECT_TRUE(
        has_text(error, std::string(name) + ": got a path of 5000 bytes, expected at most 4095 bytes"));
    EXPECT_LT(error.size(), 200u);
  }
}

TEST(Environment, MisspelledNamesAreWarnedAbout) {
  const auto warning = [] {
    ::testing::internal::CaptureStderr();
    cli::check_environment();
    return ::testing::internal::GetCapturedStderr();
  };
  {
    const Variable variable("PENSTOCK_TIMEOUT", "5");
    EXPECT_TRUE(has_text(warning(), "PENSTOCK_TIMEOUT is not read; did you mean PENSTOCK_TIMEOUT_S?"));
  }
  {
    const Variable variable("PENSTOCK_LOGG", "info");
    EXPECT_TRUE(has_text(warning(), "did you mean PENSTOCK_LOG?"));
  }
  const Variable theirs("PENSTOCK_SOMETHING_ELSE", "5"), ours("PENSTOCK_LOG_DIR", "/tmp");
  EXPECT_EQ(warning(), "");
}

// A variable that the library reads but the check does not know would be checked too late.
TEST(Environment, EveryVariableOfTheLibraryIsKnownToTheCheck) {
  const std::filesystem::path source = std::filesystem::path(std::getenv("PENSTOCK_SOURCE")) / "penstock";
  const auto text_of = [](const std::filesystem::path& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string known = text_of(source / "cli" / "common" / "environment.cpp");
  const std::regex reads("\"(PENSTOCK_[A-Z0-9_]+)\"");
  std::size_t found = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(source)) {
    if (entry.path().extension() != ".cpp") continue;
    const std::string text = text_of(entry.path());
    for (std::sregex_iterator match(text.begin(), text.end(), reads), end; match != end; ++match) {
      if ((*match)[1].str().starts_with("PENSTOCK_RANDOM_"))
        continue;  // macros of a kernel compiled at run time
      ++found;
      EXPECT_TRUE(known.find("\"" + (*match)[1].str() + "\"") != std::string::npos)
          << (*match)[1] << " in " << entry.path();
    }
  }
  EXPECT_GE(found, 10u);
}

}  // namespace commands_test
}  // namespace penstock::test
