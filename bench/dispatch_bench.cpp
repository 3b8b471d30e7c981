// The cost of interception: a pass-through mode and a two-tensor subclass compared with plain tensors, and a
// shape-only run.
//
//   dispatch_bench                                              the figures of this library
//   dispatch_bench --peer "python3 bench/fake_peer.py"  also Python's FakeTensorMode on the same model
//
// The methods alternate in short blocks on one core; differences are taken within a block, where other load
// on the machine affects both sides equally, and the median over the blocks is shown.
#include <fmt/format.h>
#include <sched.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>

#include "penstock/fake.h"
#include "penstock/torch/compat/version.h"
#include "tests/torch/sample_wrappers.h"

namespace {

using namespace penstock;
using Clock = std::chrono::steady_clock;

constexpr int kBlocks = 41;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Microseconds per call.
double time_calls(const std::function<void()>& call, int calls) {
  const auto begin = Clock::now();
  for (int i = 0; i < calls; ++i) call();
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / calls;
}

struct PassThrough final : Mode {
  void dispatch(const c10::OperatorHandle& op, Stack* stack) override { op.callBoxed(stack); }
};

void interception(const char* name, const std::function<void(const at::Tensor&)>& op,
                  const at::Tensor& input) {
  constexpr int kCalls = 400;
  PassThrough mode;
  const at::Tensor boxed = sample::Boxed::make(input), two = sample::Two::make(input, input.clone());
  std::vector<double> plain, through_mode, over_boxed, over_two;
  for (int block = 0; block < kBlocks; ++block) {
    const double eager = time_calls([&] { op(input); }, kCalls);
    double with_mode;
    {
      const ModeGuard guard(mode);
      with_mode = time_calls([&] { op(input); }, kCalls);
    }
    plain.push_back(eager);
    through_mode.push_back(with_mode - eager);
    over_boxed.push_back(time_calls([&] { op(boxed); }, kCalls) - eager);
    over_two.push_back(time_calls([&] { op(two); }, kCalls) - 2 * eager);
  }
  fmt::print("{:<14} {:>9.2f} {:>14.2f} {:>18.2f} {:>18.2f}\n", name, median(plain), median(through_mode),
             median(over_boxed), median(over_two));
}

// The model of fake_peer.py.
struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t width, std::int64_t heads) : heads(heads) {
    ln1 = register_module("ln1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    ln2 = register_module("ln2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    proj = register_module("proj", torch::nn::Linear(width, width));
    fc1 = register_module("fc1", torch::nn::Linear(width, 4 * width));
    fc2 = register_module("fc2", torch::nn::Linear(4 * width, width));
  }
  at::Tensor forward(at::Tensor x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts =
        qkv(ln1(x)).view({batch, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto weights = torch::softmax(
        torch::matmul(parts[0], parts[1].transpose(-2, -1)) * std::pow(width / heads, -0.5), -1);
    x = x + proj(torch::matmul(weights, parts[2]).transpose(1, 2).reshape({batch, length, width}));
    return x + fc2(torch::gelu(fc1(ln2(x))));
  }
  std::int64_t heads;
  torch::nn::LayerNorm ln1{nullptr}, ln2{nullptr};
  torch::nn::Linear qkv{nullptr}, proj{nullptr}, fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(Block);

struct FakeRun {
  double milliseconds = 0;
  int operators = 0;
};

// Forward and backward of 12 blocks with shapes only.
FakeRun fake_transformer() {
  struct Counter final : Mode {
    void dispatch(const c10::OperatorHandle& op, Stack* stack) override {
      ++calls;
      op.callBoxed(stack);
    }
    int calls = 0;
  } counter;
  FakeMode fake;
  const ModeGuard guard(fake);
  torch::nn::Sequential model;
  for (int i = 0; i < 12; ++i) model->push_back(Block(256, 4));
  const at::Tensor x = torch::empty({4, 64, 256}), target = torch::empty({4, 64, 256});
  const auto step = [&] {
    model->zero_grad();
    torch::mse_loss(model->forward(x), target).backward();
  };
  step();
  {
    const ModeGuard counting(counter);
    step();
  }
  std::vector<double> times;
  for (int i = 0; i < 21; ++i) times.push_back(time_calls(step, 1) / 1000);
  return {median(times), counter.calls};
}

// The median in milliseconds that the peer's script prints.
double peer_milliseconds(const std::string& command) {
  std::FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) throw std::runtime_error("cannot run " + command);
  char line[256];
  double value = -1;
  while (std::fgets(line, sizeof line, pipe)) std::sscanf(line, "fake_ms %lf", &value);
  if (pclose(pipe) != 0 || value < 0) throw std::runtime_error("the peer's script failed: " + command);
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  std::string peer;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--peer") == 0 && i + 1 < argc)
      peer = argv[++i];
    else {
      fmt::print("usage: dispatch_bench [--peer \"python3 bench/fake_peer.py\"]\n");
      return std::strcmp(argv[i], "--help") == 0 ? 0 : 2;
    }
  }
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(0, &one);
  sched_setaffinity(0, sizeof one, &one);
  at::set_num_threads(1);
  fmt::print("LibTorch {}, one core, medians of {} blocks, microseconds per operator\n", torch_version(),
             kBlocks);
  fmt::print("{:<14} {:>9} {:>14} {:>18} {:>18}\n", "", "plain", "mode adds", "1-tensor adds",
             "2-tensor adds *");
  {
    const at::NoGradGuard no_grad;
    const at::Tensor x = torch::ones({16, 16});
    interception(
        "add", [](const at::Tensor& t) { t + t; }, x);
    interception(
        "mul (number)", [](const at::Tensor& t) { t * 2; }, x);
    interception(
        "mm", [](const at::Tensor& t) { t.mm(t); }, x);
    interception(
        "t (view)", [](const at::Tensor& t) { t.t(); }, x);
    interception(
        "add_ (in pl.)", [](const at::Tensor& t) { t.add_(1); }, x);
    interception(
        "cat",
        [](const at::Tensor& t) {
          at::cat({t, t});
        },
        x);
    interception(
        "softmax", [](const at::Tensor& t) { t.softmax(1); }, x);
  }
  fmt::print("* beyond the two inner operators\n\n");
  const FakeRun run = fake_transformer();
  fmt::print(
      "shape-only run, 12-layer transformer, forward and backward: {:.2f} ms, {} operators, {:.2f} us each\n",
      run.milliseconds, run.operators, run.milliseconds * 1000 / run.operators);
  if (!peer.empty()) {
    const double theirs = peer_milliseconds(peer);
    const FakeRun again = fake_transformer();
    fmt::print("the peer's FakeTensorMode on the same model: {:.1f} ms, ratio {:.1f}\n", theirs,
               theirs / std::max(run.milliseconds, again.milliseconds));
  }
}
