// The fault campaign: trains in small, injects faults, and judges how it ends. See docs/reliability.md.
//
//   penstock-chaos --seeds 300                         seeds 1 to 300, each with the next kind of fault
//   penstock-chaos --fault kill-rank --seed 12         one trial
//   penstock-chaos --trial kill-rank:3 --trial loss:7  some trials
//   penstock-chaos --results FILE --table              the table of earlier runs
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "penstock/base/describe.h"
#include "penstock/base/files.h"
#include "penstock/base/number.h"
#include "penstock/base/printable.h"
#include "penstock/base/quote.h"
#include "penstock/errors.h"
#include "tests/chaos/table.h"
#include "tests/chaos/trial.h"

namespace penstock::chaos {

namespace {

namespace fs = std::filesystem;

// The path of this program. Asked for before anything else: in another mount namespace it may look different.
const fs::path& own_path() {
  static const fs::path path = fs::read_symlink("/proc/self/exe");
  return path;
}

struct Options {
  std::string fault, seed, seeds, first = "1", limit_s;
  std::vector<std::string> trials;
  std::string results, markdown, work, penstock;
  bool table = false, list = false, dry_run = false, keep = false, gloo_by_hand = false;
};

using TrialName = std::pair<Fault, std::uint64_t>;

std::uint64_t read_seed(const std::string& what, const std::string& text) {
  return static_cast<std::uint64_t>(read_integer(what, text, 0, 1'000'000'000));
}

Fault read_fault(const std::string& what, const std::string& text) {
  if (const auto fault = fault_named(text)) return *fault;
  std::vector<std::string> names;
  for (const Fault fault : all_faults()) names.emplace_back(name_of(fault));
  throw ConfigError(describe(what, quote(text), fmt::format("one of {}", fmt::join(names, ", "))));
}

std::vector<TrialName> trials_of(const Options& options) {
  std::vector<TrialName> trials;
  for (const std::string& text : options.trials) {
    const auto colon = text.find(':');
    if (colon == std::string::npos) throw ConfigError(describe("--trial", quote(text), "FAULT:SEED"));
    trials.emplace_back(read_fault("--trial", text.substr(0, colon)),
                        read_seed("--trial", text.substr(colon + 1)));
  }
  if (!options.seed.empty()) {
    if (options.fault.empty()) throw ConfigError("--seed: one trial needs its fault, too; give --fault");
    trials.emplace_back(read_fault("--fault", options.fault), read_seed("--seed", options.seed));
  }
  if (!options.seeds.empty()) {
    const std::uint64_t first = read_seed("--first", options.first);
    const auto count = static_cast<std::uint64_t>(read_integer("--seeds", options.seeds, 1, 1'000'000));
    const auto& faults = all_faults();
    for (std::uint64_t seed = first; seed < first + count; ++seed)
      trials.emplace_back(
          options.fault.empty() ? faults[seed % faults.size()] : read_fault("--fault", options.fault), seed);
  }
  return trials;
}

const char* shown(TrialResult::Kind kind) {
  switch (kind) {
    case TrialResult::Kind::SameLosses:
      return "same losses";
    case TrialResult::Kind::NamedError:
      return "named error, then same losses";
    case TrialResult::Kind::Failed:
      return "FAILED";
    case TrialResult::Kind::Skipped:
      return "skipped";
  }
  return "";
}

class Campaign {
 public:
  Campaign(const Options& options, Settings settings) : options_(options), settings_(std::move(settings)) {}

  TrialResult run(const TrialName& name) {
    const Plan plan = plan_of(name.first, name.second);
    TrialResult result{.fault = name.first,
                       .seed = name.second,
                       .kind = TrialResult::Kind::Skipped,
                       .seconds = 0,
                       .notes = {}};
    const std::string why = why_skipped(plan, settings_);
    if (!why.empty()) {
      result.notes = {why};
      return result;
    }
    const fs::path folder = settings_.work / fmt::format("{}-{}", name_of(plan.fault), plan.seed);
    const auto begin = Clock::now();
    try {
      const Losses& reference = undisturbed(plan.layout);
      Expectation expected = expectation_of(plan);
      const Outcome outcome = run_trial(settings_, plan, folder, expected);
      Verdict verdict = judge(outcome, expected, reference, plan.steps);
      result.kind = verdict.end == End::SameLosses   ? TrialResult::Kind::SameLosses
                    : verdict.end == End::NamedError ? TrialResult::Kind::NamedError
                                                     : TrialResult::Kind::Failed;
      result.notes = std::move(verdict.problems);
    } catch (const std::exception& error) {
      result.kind = TrialResult::Kind::Failed;
      result.notes = {error.what()};
    }
    result.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (result.kind != TrialResult::Kind::Failed && !options_.keep) remove_tree(folder);
    return result;
  }

  void show(const TrialResult& result, std::size_t number, std::size_t all) const {
    fmt::print("[{:>3}/{}] {} ... {}, {:.1f} s\n", number, all, to_text(plan_of(result.fault, result.seed)),
               shown(result.kind), result.seconds);
    for (const std::string& note : result.notes) fmt::print("          {}\n", printable(note));
    if (result.kind == TrialResult::Kind::Failed)
      fmt::print("          its files: {}\n          repeat: {} --fault {} --seed {}\n",
                 (settings_.work / fmt::format("{}-{}", name_of(result.fault), result.seed)).string(),
                 own_path().string(), name_of(result.fault), result.seed);
    std::fflush(stdout);
  }

 private:
  const Losses& undisturbed(Layout layout) {
    auto& losses = undisturbed_[layout];
    if (losses.empty()) losses = undisturbed_losses(settings_, layout);
    return losses;
  }

  const Options& options_;
  const Settings settings_;
  std::map<Layout, Losses> undisturbed_;
};

Settings settings_of(const Options& options, const std::string& no_namespaces) {
  Settings settings;
  const fs::path here = own_path().parent_path();
  settings.no_namespaces = no_namespaces;
  settings.penstock =
      options.penstock.empty() ? here.parent_path() / "bin" / "penstock" : fs::absolute(options.penstock);
  if (!file_exists(settings.penstock))
    throw ConfigError(describe("--penstock", settings.penstock.string(), "the built command"));
#ifdef PENSTOCK_CHAOS_PRELOAD
  settings.preload = here / PENSTOCK_CHAOS_PRELOAD;
#endif
  settings.gloo_by_hand = options.gloo_by_hand;
  if (options.work.empty()) {
    std::string pattern = (fs::temp_directory_path() / "penstock-chaos-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr)
      throw ConfigError(describe("temporary folder", pattern, "a writable folder", "set TMPDIR"));
    settings.work = pattern;
  } else {
    fs::create_directories(options.work);
    settings.work = fs::canonical(options.work);
  }
  return settings;
}

void print_tables(const Options& options, const std::vector<TrialResult>& results) {
  fmt::print("\n{}", text_table(results));
  if (options.markdown.empty()) return;
  std::ofstream file(options.markdown);
  file << markdown_table(results);
  file.close();
  if (!file) throw ConfigError(describe("--markdown", options.markdown, "a file that can be written"));
}

int run(const Options& options) {
  std::vector<TrialResult> results;
  if (!options.results.empty()) results = read_results(options.results);
  if (options.list) {
    for (const Fault fault : all_faults()) fmt::print("{:<20} {}\n", name_of(fault), meaning_of(fault));
    return 0;
  }
  if (options.table) {
    print_tables(options, results);
    return 0;
  }
  std::vector<TrialName> trials = trials_of(options);
  if (trials.empty())
    throw ConfigError("nothing to do: give --seeds N, --trial FAULT:SEED, or --fault with --seed");
  if (options.dry_run) {
    for (const TrialName& name : trials) fmt::print("{}\n", to_text(plan_of(name.first, name.second)));
    return 0;
  }
  // A campaign in several parts continues where it was.
  for (const TrialResult& known : results) std::erase(trials, TrialName(known.fault, known.seed));
  std::optional<double> limit_s;
  if (!options.limit_s.empty()) limit_s = read_number("--limit", options.limit_s, {.low = 1});

  const std::string no_namespaces = enter_own_mounts();
  if (!no_namespaces.empty())
    fmt::print("no namespaces ({}): trials that need them are skipped\n", printable(no_namespaces));
  const Settings settings = settings_of(options, no_namespaces);
  Campaign campaign(options, settings);
  const auto begin = Clock::now();
  bool failed = false;
  std::size_t number = 0;
  for (const TrialName& name : trials) {
    if (limit_s && std::chrono::duration<double>(Clock::now() - begin).count() > *limit_s) {
      fmt::print("the time is up: {} of {} trials were made\n", number, trials.size());
      break;
    }
    const TrialResult result = campaign.run(name);
    campaign.show(result, ++number, trials.size());
    failed = failed || result.kind == TrialResult::Kind::Failed;
    if (!options.results.empty()) std::ofstream(options.results, std::ios::app) << to_line(result) << "\n";
    results.push_back(result);
  }
  print_tables(options, results);
  if (!failed && !options.keep && options.work.empty()) remove_tree(settings.work);
  return failed ? 1 : 0;
}

}  // namespace

}  // namespace penstock::chaos

int main(int argc, char** argv) {
  using namespace penstock;
  chaos::own_path();
  chaos::Options options;
  CLI::App app("Trains under injected faults and judges how each trial ends");
  app.add_option("--seeds", options.seeds, "Number of trials; the kinds of faults take turns");
  app.add_option("--first", options.first, "The first of these seeds (default 1)");
  app.add_option("--fault", options.fault, "Only this kind of fault");
  app.add_option("--seed", options.seed, "One trial of --fault");
  app.add_option("--trial", options.trials, "FAULT:SEED; may be repeated");
  app.add_option("--results", options.results,
                 "Append a line for each trial to this file, and skip those in it");
  app.add_option("--markdown", options.markdown, "Write the table to this file");
  app.add_option("--limit", options.limit_s, "Begin no trial after this many seconds");
  app.add_option("--work", options.work, "Folder for the files of trials; those of failed ones stay");
  app.add_option("--penstock", options.penstock, "The command under test (default: of this build)");
  app.add_flag("--table", options.table, "Print the table of --results only");
  app.add_flag("--list", options.list, "List the kinds of faults");
  app.add_flag("--dry-run", options.dry_run, "Print what the trials would do");
  app.add_flag("--keep", options.keep, "Keep the files of all trials");
  app.add_flag("--gloo-by-hand", options.gloo_by_hand,
               "Choose Gloo and its interface between hosts, for versions that do not do it themselves");
  CLI11_PARSE(app, argc, argv);
  try {
    return chaos::run(options);
  } catch (const std::exception& error) {
    std::fflush(stdout);
    fmt::print(stderr, "penstock-chaos: {}\n", printable(error.what()));
    return 2;
  }
}
