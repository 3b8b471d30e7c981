// Exchanges with other ranks inside of overlapped units: one half computes while the other exchanges. Results
// keep their bits, failures of either half reach every rank, and the trace shows the overlap.
#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/comm/group/operators.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/pipeline.h"
#include "penstock/pipeline/report/step_trace.h"
#include "penstock/pipeline/runtime/last_trace.h"
#include "penstock/pipeline/runtime/overlapped_halves.h"
#include "penstock/recompute.h"
#include "penstock/step_context.h"
#include "penstock/torch/dispatch/autocast_scope.h"
#include "penstock/torch/random/unit_half.h"
#include "tests/has_text.h"
#include "tests/pipeline/parity_scenarios.h"

namespace penstock {
namespace overlapped_exchange_test {

using namespace std::chrono_literals;
using test::Block;
using test::has_text;
using test::kWidth;
namespace functional = comm::functional;

// Two stages on one rank; one unit pairs the forward of microbatch 1 with the backward of microbatch 0.
constexpr const char* kSchedule = "0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1\n";

// Something that one thread waits for and another one announces.
class Announcement {
 public:
  void make() {
    const std::lock_guard lock(mutex_);
    made_ = true;
    changed_.notify_all();
  }
  void await(const char* what) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, 10s, [&] { return made_; }))
      throw std::runtime_error(std::string("nobody has announced: ") + what);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool made_ = false;
};

// Places in the unit where a test acts. Called with the stage, outside of trial runs, in the unit only.
struct Hooks {
  std::function<void()> before_forward_exchange = [] {};   // of 0F1
  std::function<void()> after_forward_exchange = [] {};    // of 0F1
  std::function<void()> before_backward_exchange = [] {};  // of 1B0
  std::function<void()> after_backward_exchange = [] {};   // of 1B0
};

bool runs(std::int64_t microbatch) {
  const auto step = StepContext::current();
  return !step->trial && step->microbatch == microbatch;
}

at::Tensor hooked(at::Tensor x, const std::function<void()>& hook) {
  if (x.requires_grad())
    x.register_hook([hook](const at::Tensor& gradient) {
      hook();
      return gradient;
    });
  return x;
}

// A block whose rows go to the other rank and come back from there.
StageModule exchanging(int stage, const comm::Group& group, const Hooks& hooks) {
  Block first(2 * stage), second(2 * stage + 1);
  return StageModule(
      [=](at::Tensor x) mutable {
        const bool forward = stage == 0 && runs(1), backward = stage == 1 && runs(0);
        at::Tensor h = first->forward(x);
        // In a backward the hooks are called in reverse.
        if (backward) h = hooked(h + 0, hooks.after_backward_exchange);
        if (forward) hooks.before_forward_exchange();
        h = functional::wait_in_turn(functional::all_to_all(h, {}, {}, group));
        if (forward) hooks.after_forward_exchange();
        if (backward) h = hooked(h + 0, hooks.before_backward_exchange);
        return second->forward(h);
      },
      {first.ptr(), second.ptr()});
}

struct Result {
  std::vector<at::Tensor> losses;
  std::map<std::string, at::Tensor> gradients;
  StepReport report;
  std::optional<StepTrace> trace;
};

// Each rank is a pipeline of its own; their stages exchange rows.
Result step(comm::World& world, bool overlaps, const Hooks& hooks = {}) {
  const comm::Group group = world.group();
  std::vector<PipelineStage> stages;
  for (const int stage : {0, 1}) stages.emplace_back(exchanging(stage, group, hooks), stage, 2, at::kCPU);
  PipelineOptions options{world};
  options.ranks = {world.rank()};
  options.overlap_exchanges = overlaps;
  PipelineRuntime pipeline = pipeline_from_csv(kSchedule, stages, test::square_loss(), options);
  const test::Batch batch = test::plain_batch(world.rank(), 8);
  Result result;
  result.losses = pipeline.step(batch.args, {}, batch.target).losses;
  for (const PipelineStage& stage : stages) {
    int number = 0;
    for (const at::Tensor& parameter : stage.module().parameters())
      result.gradients[std::to_string(stage.index()) + "." + std::to_string(number++)] = parameter.grad();
  }
  result.report = pipeline.report();
  result.trace = trace_last_step(pipeline, false);
  return result;
}

void expect_same_bits(const Result& a, const Result& b) {
  ASSERT_EQ(a.losses.size(), b.losses.size());
  for (std::size_t i = 0; i < a.losses.size(); ++i) EXPECT_TRUE(at::equal(a.losses[i], b.losses[i])) << i;
  ASSERT_EQ(a.gradients.size(), b.gradients.size());
  for (const auto& [name, gradient] : a.gradients)
    EXPECT_TRUE(at::equal(gradient, b.gradients.at(name))) << name;
}

TEST(OverlappedExchange, HasTheSameBits) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const Result plain = step(world, false), overlapped = step(world, true);
    expect_same_bits(plain, overlapped);
    EXPECT_EQ(plain.report.overlapped_exchanges, 0);
    // That of the forward, and that of the backward, while the forward is not done.
    EXPECT_EQ(overlapped.report.overlapped_exchanges, 2);
  });
}

// Rank 1 starts the exchange of the forward only after the backward of rank 0 has begun, and that of the
// backward only after the forward of rank 0 is past its exchange: rank 0 must compute while it exchanges.
TEST(OverlappedExchange, TheOtherHalfComputesWhileOneIsHeldBack) {
  Announcement backward_began, forward_continued;
  comm::run_ranks(2, 60s, [&](comm::World& world) {
    Hooks hooks;
    if (world.rank() == 0) {
      hooks.before_backward_exchange = [&] { backward_began.make(); };
      hooks.after_forward_exchange = [&] { forward_continued.make(); };
    } else {
      hooks.before_forward_exchange = [&] { backward_began.await("the backward of rank 0 has begun"); };
      hooks.before_backward_exchange = [&] { forward_continued.await("the forward of rank 0 continues"); };
    }
    step(world, true, hooks);
  });
}

// The exchange of one half contains the beginning of a computation of the other.
bool hides_computation(const TraceEvent& unit, int exchanging_member, int computing_member) {
  for (const UnitPiece& exchange : unit.pieces)
    for (const UnitPiece& piece : unit.pieces)
      if (exchange.kind == UnitPiece::Kind::Exchange && exchange.member == exchanging_member &&
          piece.kind == UnitPiece::Kind::Compute && piece.member == computing_member &&
          exchange.begin_ns <= piece.begin_ns && piece.begin_ns < exchange.end_ns)
        return true;
  return false;
}

TEST(OverlappedExchange, IsShownByTheTrace) {
  comm::run_ranks(2, 60s, [](comm::World& world) {
    const Result result = step(world, true);
    ASSERT_TRUE(result.trace);
    const auto& events = result.trace->ranks[0];
    const auto unit = std::find_if(events.begin(), events.end(),
                                   [](const auto& event) { return event.actions.size() == 2; });
    ASSERT_NE(unit, events.end());
    EXPECT_TRUE(hides_computation(*unit, 0, 1));
    EXPECT_TRUE(hides_computation(*unit, 1, 0));
    const auto exchanges = [&](int member) {
      return std::count_if(unit->pieces.begin(), unit->pieces.end(), [&](const UnitPiece& piece) {
        return piece.member == member && piece.kind == UnitPiece::Kind::Exchange;
      });
    };
    EXPECT_EQ(exchanges(0), 1);
    EXPECT_EQ(exchanges(1), 1);
    const std::string json = to_chrome_json(*result.trace);
    for (const char* text :
         {"\"0F1 exchange\"", "\"1B0 exchange\"", "\"forwards of units\"", "\"backwards of units\""})
      EXPECT_TRUE(has_text(json, text));
    EXPECT_EQ(parse_trace(json), *result.trace);
    // Without overlapping nothing changes in the display.
    const std::string plain = to_chrome_json(*step(world, false).trace);
    EXPECT_FALSE(has_text(plain, "exchange"));
    EXPECT_FALSE(has_text(plain, "of units"));
  });
}

// ------------------------------------------------------------------------------------------------- failures

std::vector<std::string> ends_of(const Hooks& of_rank_0) {
  std::vector<std::string> ends(2);
  const auto body = [&](comm::World& world) {
    std::string& end = ends[static_cast<std::size_t>(world.rank())];
    try {
      step(world, true, world.rank() == 0 ? of_rank_0 : Hooks{});
    } catch (const StageForwardError& error) {
      end = std::string("StageForwardError: ") + error.what();
      throw;
    } catch (const StageBackwardError& error) {
      end = std::string("StageBackwardError: ") + error.what();
      throw;
    } catch (const PeerLostError& error) {
      end = std::string("PeerLostError: ") + error.what();
      throw;
    } catch (const std::exception& error) {
      end = std::string("other: ") + error.what();
      throw;
    }
  };
  EXPECT_ANY_THROW(comm::run_ranks(2, 30s, body));
  return ends;
}

// Wherever a half fails, while the other one has not begun, waits or computes: the error is that of the half
// that failed, and the other rank learns of it.
TEST(OverlappedExchange, AFailureOfEitherHalfReachesEveryRank) {
  const auto fail = [] { throw std::runtime_error("no such luck"); };
  const std::pair<const char*, std::function<void(Hooks&)>> places[] = {
      {"StageForwardError: stage 0, microbatch 1", [&](Hooks& h) { h.before_forward_exchange = fail; }},
      {"StageForwardError: stage 0, microbatch 1", [&](Hooks& h) { h.after_forward_exchange = fail; }},
      {"StageBackwardError: stage 1, microbatch 0", [&](Hooks& h) { h.before_backward_exchange = fail; }},
      {"StageBackwardError: stage 1, microbatch 0", [&](Hooks& h) { h.after_backward_exchange = fail; }},
  };
  for (std::size_t i = 0; i < std::size(places); ++i) {
    SCOPED_TRACE(i);
    Hooks hooks;
    places[i].second(hooks);
    const std::vector<std::string> ends = ends_of(hooks);
    EXPECT_TRUE(has_text(ends[0], places[i].first)) << ends[0];
    EXPECT_TRUE(has_text(ends[0], "no such luck")) << ends[0];
    // Of whatever kind: rank 1 may wait in an exchange of its forward, or of its backward.
    EXPECT_TRUE(has_text(ends[1], "rank 0 failed: stage ")) << ends[1];
    EXPECT_TRUE(has_text(ends[1], "no such luck")) << ends[1];
  }
}

// ------------------------------------------------------------------------------------- the thread of
// backwards

// What a half can see of its thread.
std::string seen() {
  const auto step = StepContext::current();
  const AutocastState autocast = autocast_state();
  return std::to_string(at::GradMode::is_enabled()) + std::to_string(autocast.cpu) +
         std::to_string(static_cast<int>(autocast.cpu_dtype)) +
         std::to_string(ImplicitReplicationGuard::active()) + std::to_string(at::get_num_threads()) + " " +
         std::to_string(step->microbatch.value_or(-1)) + std::to_string(step->seed);
}

TEST(OverlappedHalves, BackwardsSeeTheThreadStateOfTheCaller) {
  OverlappedHalves halves(30s);
  const auto here = std::this_thread::get_id();
  const auto both_see_it = [&] {
    const std::string expected = seen();
    std::vector<std::string> found;
    bool elsewhere = false;
    const std::vector<UnitPiece> pieces =
        halves.run([&](OverlappedHalves::Half& half) { half.piece(0, [&] { found.push_back(seen()); }); },
                   [&](OverlappedHalves::Half& half) {
                     half.piece(1, [&] { found.push_back(seen()); });
                     elsewhere = std::this_thread::get_id() != here;
                   },
                   at::kCPU);
    EXPECT_EQ(found, (std::vector<std::string>{expected, expected}));
    EXPECT_TRUE(elsewhere);
    EXPECT_EQ(pieces.size(), 2u);
  };
  both_see_it();
  {
    StepContext context;
    context.seed = 42;
    context.microbatch = 3;
    context.microbatches = 8;
    const StepGuard step(context);
    const at::NoGradGuard no_grad;
    const ImplicitReplicationGuard replicates;
    const AutocastScope autocast(at::kCPU, at::kBFloat16);
    both_see_it();
  }
  both_see_it();  // and the thread has kept nothing
}

TEST(OverlappedHalves, AHalfIsCurrentWithinIt) {
  EXPECT_EQ(UnitHalf::current(), nullptr);
  OverlappedHalves halves(30s);
  std::set<UnitHalf*> found;
  const auto body = [&](OverlappedHalves::Half& half) {
    EXPECT_EQ(UnitHalf::current().get(), &half);
    {
      const StepGuard step{StepContext{}};  // also in the scopes of steps
      EXPECT_EQ(UnitHalf::current().get(), &half);
      found.insert(UnitHalf::current().get());
    }
    const UnitHalfGuard none(nullptr);
    EXPECT_EQ(UnitHalf::current(), nullptr);
  };
  halves.run(body, body, at::kCPU);
  EXPECT_EQ(found.size(), 2u);
  EXPECT_EQ(UnitHalf::current(), nullptr);
}

// Generators that a recomputation has set back are not for the other half to draw from.
TEST(OverlappedHalves, ARecomputationThatSetsGeneratorsBackIsNotInterrupted) {
  OverlappedHalves halves(30s);
  for (const bool preserve : {true, false}) {
    std::vector<bool> interruptible;
    const auto backward = [&](OverlappedHalves::Half&) {
      const at::Tensor x = at::ones({2}).requires_grad_();
      at::Tensor y;
      const auto part = [&](const std::vector<at::Tensor>& inputs) {
        interruptible.push_back(UnitHalf::current() != nullptr);
        y = (inputs[0] * inputs[0]).exp();
      };
      {
        const RecomputedPart recomputed(part, {x}, {.preserve_generators = preserve});
        part({x});
      }
      y.sum().backward();
    };
    halves.run([](OverlappedHalves::Half&) {}, backward, at::kCPU);
    EXPECT_EQ(interruptible, (std::vector<bool>{true, !preserve}));
  }
}

}  // namespace overlapped_exchange_test
}  // namespace penstock
