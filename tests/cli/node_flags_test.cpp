// The options for several hosts, and the batch script for Slurm, executed with programs in the place of
// Slurm's.
#include "penstock/cli/common/node_flags.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "penstock/comm/launch/slurm_script.h"
#include "penstock/errors.h"
#include "tests/command.h"
#include "tests/has_text.h"
#include "tests/temporary_folder.h"

namespace penstock::cli {
namespace node_flags_test {

using penstock::test::has_text;
using Words = std::vector<std::string>;

// Parses a command line of a command that has only these options.
struct Parsed {
  std::optional<comm::NodeOptions> options;
  std::string error;
};
Parsed parse(Words words) {
  CLI::App app;
  NodeFlags flags;
  add_node_flags(app, flags);
  Parsed parsed;
  std::reverse(words.begin(), words.end());
  try {
    app.parse(words);
    parsed.options = node_options(app, flags, {"/bin/penstock", "launch", "-n", "2", "--", "prog"}, 2);
  } catch (const ConfigError& error) {
    parsed.error = error.what();
  } catch (const CLI::Error& error) {
    parsed.error = error.what();
  }
  return parsed;
}

TEST(NodeFlags, OneHostByDefault) {
  EXPECT_FALSE(parse({}).options);
  EXPECT_EQ(parse({}).error, "");
  EXPECT_FALSE(parse({"--nnodes", "1"}).options);
  EXPECT_TRUE(has_text(parse({"--rdzv", "a"}).error, "--rdzv has no effect on one host"));
  EXPECT_TRUE(
      has_text(parse({"--nnodes", "1", "--node-rank", "0"}).error, "--node-rank has no effect on one host"));
}

TEST(NodeFlags, NamesOfTorchrun) {
  for (const Words& words : {Words{"--nnodes", "2:4", "--node-rank", "1", "--rdzv", "node1:1234"},
                             Words{"--nnodes=2:4", "--node_rank=1", "--rdzv_endpoint=node1:1234"},
                             Words{"--nnodes=2:4", "--node-rank=1", "--rdzv-endpoint=node1:1234"}}) {
    const Parsed parsed = parse(words);
    ASSERT_TRUE(parsed.options) << parsed.error;
    EXPECT_EQ(parsed.options->least_nodes, 2);
    EXPECT_EQ(parsed.options->most_nodes, 4);
    EXPECT_EQ(parsed.options->node_rank, 1);
    EXPECT_EQ(parsed.options->rdzv_host, "node1");
    EXPECT_EQ(parsed.options->rdzv_port, 1234);
  }
  EXPECT_FALSE(parse({"--nnodes", "2", "--rdzv", "node1"}).options->node_rank);
  EXPECT_EQ(parse({"--nnodes", "2", "--rdzv", "node1"}).options->rdzv_port, 29400);
}

TEST(NodeFlags, Mistakes) {
  EXPECT_TRUE(has_text(parse({"--nnodes", "2"}).error, "--rdzv is missing"));
  EXPECT_TRUE(has_text(parse({"--nnodes", "4:2", "--rdzv", "a"}).error, "the smaller number first"));
  for (const char* text : {"0", "2:", ":2", "x", "2:4:6", "-1", "5000"})
    EXPECT_NE(parse({fmt::format("--nnodes={}", text), "--rdzv", "a"}).error, "") << text;
  EXPECT_TRUE(has_text(parse({"--nnodes", "2", "--rdzv", "a", "--last-call", "3"}).error,
                       "--last-call has no effect without a range"));
  EXPECT_TRUE(has_text(parse({"--nnodes", "2", "--rdzv", "a", "--ssh", "x"}).error, "--ssh has no effect"));
  EXPECT_TRUE(has_text(parse({"--hosts", "localhost,b", "--nnodes", "2"}).error,
                       "--nnodes has no effect with --hosts"));
  EXPECT_TRUE(has_text(parse({"--hosts", "localhost"}).error, "at least two hosts"));
  for (const char* text : {"a,", "a,a", "a,-oProxyCommand=x", ","})
    EXPECT_TRUE(has_text(parse({"--hosts", text}).error, "names separated by commas")) << text;
  EXPECT_TRUE(has_text(parse({"--hosts", "no-such-host.invalid,b"}).error,
                       "run the command on no-such-host.invalid"));
}

TEST(NodeFlags, PlacesWhereHostsMeet) {
  const auto place = [](const std::string& text) {
    const RdzvPlace parsed = parse_rdzv(text);
    return fmt::format("{} {}", parsed.host, parsed.port);
  };
  EXPECT_EQ(place("node1"), "node1 29400");
  EXPECT_EQ(place("10.0.0.1:7"), "10.0.0.1 7");
  EXPECT_EQ(place("[fd00::1]:7"), "fd00::1 7");
  EXPECT_EQ(place("[fd00::1]"), "fd00::1 29400");
  EXPECT_EQ(place("fd00::1"), "fd00::1 29400");
  for (const char* text : {"", ":7", "a:", "a:b", "a:70000", "[fd00::1", "[]:7", "a b", "[fd00::1]7"})
    EXPECT_THROW(parse_rdzv(text), ConfigError) << text;
}

TEST(NodeFlags, OtherHostsGetTheSameCommand) {
  const Parsed parsed = parse({"--hosts", "localhost,b", "--rdzv", "10.0.0.1:7", "--join-timeout", "20"});
  ASSERT_TRUE(parsed.options) << parsed.error;
  EXPECT_EQ(parsed.options->command_of_node(1),
            (Words{"/bin/penstock", "launch", "--nnodes", "2", "--node-rank", "1", "--rdzv", "10.0.0.1:7",
                   "--join-timeout", "20", "-n", "2", "--", "prog"}));
}

TEST(NodeFlags, OptionsAreRemovedFromACommandLine) {
  EXPECT_EQ(without_options({"p", "train", "--nnodes", "2", "--dp", "4", "--rdzv=a:1", "--", "--nnodes", "3"},
                            node_option_names(), {}),
            (Words{"p", "train", "--dp", "4", "--", "--nnodes", "3"}));
  EXPECT_EQ(without_options({"--x", "a", "--y", "b"}, {"--x"}, {"--y"}), (Words{"b"}));
  EXPECT_EQ(without_options({"--nnodesX", "2"}, node_option_names(), {}), (Words{"--nnodesX", "2"}));
  const Words own = own_command_line();
  ASSERT_FALSE(own.empty());
  EXPECT_TRUE(std::filesystem::exists(own.front()));
}

TEST(SlurmScript, StartsOneLauncherOnEachHost) {
  const test::TemporaryFolder folder;
  const auto write = [&](const std::string& name, const std::string& text) {
    const auto path = folder.path / name;
    std::ofstream(path) << "#!/bin/bash\n" << text;
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  };
  write("scontrol", "[ \"$1 $2 $3\" = 'show hostnames node[1-2]' ] && printf 'node1\\nnode2\\n'\n");
  // Runs the command once for each of two hosts, as srun does.
  write("srun",
        "while [ \"${1#-}\" != \"$1\" ]; do echo \"srun $1\"; shift; done\n"
        "for node in 0 1; do SLURM_NODEID=$node \"$@\" || exit; done\n");
  write("launcher",
        "echo \"secret ${#PENSTOCK_SECRET}\"; for word in \"$@\"; do printf '<%s>' \"$word\"; done; echo\n");
  comm::SlurmOptions options;
  options.least_nodes = options.most_nodes = 2;
  options.ranks = 4;
  options.cores = 3;
  options.gpus = true;
  options.restarts = 1;
  options.name = "job";
  options.sbatch = {"--time=02:00:00", "--partition=a b"};
  options.launcher = {"launcher", "launch", "--grace", "5"};
  options.command = {"./train", "it's", "$HOME \"x\"", ""};
  const std::string script = comm::slurm_script(options);
  for (const char* line :
       {"#!/bin/bash\n", "#SBATCH --job-name=job\n", "#SBATCH --nodes=2\n", "#SBATCH --ntasks-per-node=1\n",
        "#SBATCH --cpus-per-task=12\n", "#SBATCH --gpus-per-node=4\n", "#SBATCH --signal=TERM@120\n",
        "#SBATCH --time=02:00:00\n", "#SBATCH --partition=a b\n"})
    EXPECT_TRUE(has_text(script, line)) << line << "\n" << script;
  // Slurm reads its options up to the first line that is not a comment.
  EXPECT_LT(script.rfind("#SBATCH"), script.find("set -euo"));
  write("script", script);
  const auto ended =
      test::run_command(fmt::format("cd '{0}' && PATH=\"{0}:$PATH\" SLURM_JOB_NODELIST='node[1-2]' "
                                    "SLURM_JOB_ID=17 SLURM_JOB_NUM_NODES=2 bash "
                                    "script",
                                    folder.path.string()));
  ASSERT_EQ(ended.exit_code, 0) << ended.output << script;
  for (const int node : {0, 1})
    EXPECT_TRUE(
        has_text(ended.output,
                 fmt::format("<launch><--grace><5><--nnodes><2><--node-rank><{}><--rdzv><node1:20017><-n><4>"
                             "<--restarts><1><--><./train><it's><$HOME \"x\"><>",
                             node)))
        << ended.output;
  EXPECT_TRUE(has_text(ended.output, "secret 64"));
  EXPECT_TRUE(has_text(ended.output, "srun --ntasks=2\nsrun --ntasks-per-node=1\nsrun --cpus-per-task=12"));
}

TEST(SlurmScript, RangesAndMistakes) {
  comm::SlurmOptions options;
  options.least_nodes = 2;
  options.most_nodes = 4;
  options.launcher = {"penstock", "launch"};
  options.command = {"x"};
  EXPECT_TRUE(has_text(comm::slurm_script(options), "#SBATCH --nodes=2-4\n"));
  EXPECT_FALSE(has_text(comm::slurm_script(options), "gpus"));
  for (const char* text :
       {"time=3", "", "-", "--a\n--b", "--nodes=3", "-N 3", "--ntasks=2", "--signal=USR1"}) {
    options.sbatch = {text};
    EXPECT_THROW(comm::slurm_script(options), ConfigError) << text;
  }
  options.sbatch = {};
  options.name = "a b";
  EXPECT_THROW(comm::slurm_script(options), ConfigError);
}

}  // namespace node_flags_test
}  // namespace penstock::cli
