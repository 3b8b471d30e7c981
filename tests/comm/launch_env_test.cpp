#include "penstock/comm/launch/launch_env.h"

#include <gtest/gtest.h>

#include <map>

#include "penstock/errors.h"

namespace penstock::comm {
namespace launch_env_test {

LaunchEnv parse(const std::map<std::string, std::string>& variables) {
  return parse_launch_env([&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

std::string message_for(const std::map<std::string, std::string>& variables) {
  try {
    parse(variables);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(LaunchEnv, NothingSetIsOneRank) {
  const LaunchEnv env = parse({});
  EXPECT_EQ(env.rank, 0);
  EXPECT_EQ(env.world_size, 1);
  EXPECT_EQ(env.rendezvous.kind, Rendezvous::Kind::None);
}

TEST(LaunchEnv, OwnLauncherAndTorchrun) {
  const LaunchEnv env = parse({{"RANK", "5"},
                               {"WORLD_SIZE", "8"},
                               {"LOCAL_RANK", "1"},
                               {"LOCAL_WORLD_SIZE", "4"},
                               {"MASTER_ADDR", "node7"},
                               {"MASTER_PORT", "1234"}});
  EXPECT_EQ(env.rank, 5);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.rendezvous.describe(), "tcp://node7:1234");
  EXPECT_TRUE(env.rendezvous.hosted_by_rank0);
  EXPECT_FALSE(env.rendezvous.loopback_only());
  const LaunchEnv agent = parse({{"RANK", "0"},
                                 {"WORLD_SIZE", "2"},
                                 {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                 {"TORCHELASTIC_RESTART_COUNT", "3"}});
  EXPECT_FALSE(agent.rendezvous.hosted_by_rank0);
  EXPECT_EQ(agent.rendezvous.prefix, "attempt3");
  EXPECT_TRUE(agent.rendezvous.loopback_only());
}

TEST(LaunchEnv, OpenMpi) {
  const std::map<std::string, std::string> base = {{"OMPI_COMM_WORLD_RANK", "1"},
                                                   {"OMPI_COMM_WORLD_SIZE", "2"},
                                                   {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                                   {"PMIX_NAMESPACE", "job.7"}};
  const LaunchEnv env = parse(base);
  EXPECT_EQ(env.launcher, "Open MPI");
  EXPECT_EQ(env.rank, 1);
  EXPECT_EQ(env.rendezvous.host, "127.0.0.1");
  auto other_job = base;
  other_job["PMIX_NAMESPACE"] = "job.8";
  EXPECT_NE(parse(other_job).rendezvous.port, env.rendezvous.port);
  auto many_hosts = base;
  many_hosts["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";
  many_hosts["OMPI_COMM_WORLD_SIZE"] = "4";
  EXPECT_NE(message_for(many_hosts).find("MASTER_ADDR"), std::string::npos);
}

TEST(LaunchEnv, SlurmStepButNotBatchScript) {
  const LaunchEnv env = parse({{"SLURM_STEP_ID", "0"},
                               {"SLURM_JOB_ID", "99"},
                               {"SLURM_PROCID", "3"},
                               {"SLURM_NTASKS", "4"},
                               {"SLURM_LOCALID", "1"},
                               {"SLURM_NNODES", "2"},
                               {"SLURM_STEP_NODELIST", "gpu[07-08]"}});
  EXPECT_EQ(env.launcher, "Slurm");
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_EQ(env.rendezvous.host, "gpu07");
  EXPECT_EQ(parse({{"SLURM_JOB_ID", "99"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}).world_size, 1);
}

TEST(LaunchEnv, SlurmNodeLists) {
  EXPECT_EQ(first_slurm_host("gpu[03-05,9],login1"), "gpu03");
  EXPECT_EQ(first_slurm_host("a1,b[2-3]"), "a1");
  EXPECT_EQ(first_slurm_host("solo"), "solo");
  EXPECT_EQ(first_slurm_host("rack[1-2]-gpu,x"), "rack1-gpu");
  EXPECT_THROW(first_slurm_host("gpu[03"), ConfigError);
}

TEST(LaunchEnv, RendezvousOverride) {
  const LaunchEnv file =
      parse({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"PENSTOCK_RENDEZVOUS", "file:///tmp/meet"}});
  EXPECT_EQ(file.rendezvous.kind, Rendezvous::Kind::File);
  EXPECT_EQ(file.rendezvous.path, "/tmp/meet");
  EXPECT_EQ(parse({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"PENSTOCK_RENDEZVOUS", "tcp://h:9"}}).rendezvous.port,
            9);
  for (const char* bad : {"meet", "tcp://host", "tcp://:5", "file://relative", "tcp://h:70000", "tcp://h:x"})
    EXPECT_NE(message_for({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"PENSTOCK_RENDEZVOUS", bad}})
                  .find("PENSTOCK_RENDEZVOUS"),
              std::string::npos)
        << bad;
}

TEST(LaunchEnv, BadValuesNameTheVariable) {
  EXPECT_NE(message_for({{"RANK", "1"}}).find("WORLD_SIZE"), std::string::npos);
  EXPECT_NE(message_for({{"WORLD_SIZE", "2"}}).find("RANK"), std::string::npos);
  EXPECT_NE(message_for({{"RANK", "2"}, {"WORLD_SIZE", "2"}}).find("below WORLD_SIZE = 2"),
            std::string::npos);
  EXPECT_NE(message_for({{"RANK", "one"}, {"WORLD_SIZE", "2"}}).find("\"one\""), std::string::npos);
  EXPECT_NE(message_for({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "3"}, {"LOCAL_WORLD_SIZE", "2"}})
                .find("local rank"),
            std::string::npos);
  EXPECT_NE(message_for({{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}})
                .find("MASTER_ADDR"),
            std::string::npos);
}

}  // namespace launch_env_test
}  // namespace penstock::comm
