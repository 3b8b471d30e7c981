#include "penstock/comm/group/self_test.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "penstock/base/exception_text.h"
#include "penstock/comm/transport/transfer.h"
#include "penstock/errors.h"
#include "penstock/torch/compat/version.h"

namespace penstock::comm {

namespace {

constexpr int kRepeats = 15;

class Probe {
 public:
  Probe(const Group& group, at::Device device)
      : group_(group),
        options_(at::TensorOptions().device(device)),
        size_(group.size()),
        own_(group.axis_rank()) {}

  std::vector<ProbeResult> run() {
    point_to_point();
    for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong})
      reductions(type);
    movement();
    coalesced();
    timed("barrier", 0, [&] { group_.barrier().wait(); });
    return std::move(results_);
  }

 private:
  // Returns member i's values; element k depends on i and k.
  at::Tensor values(int member, std::int64_t count, at::ScalarType type) const {
    return (at::arange(count, at::kLong) % 7 + member + 1).to(type).to(options_.device());
  }
  at::Tensor mine(std::int64_t count, at::ScalarType type = at::kFloat) const {
    return values(own_, count, type);
  }
  at::Tensor zeros(std::int64_t count, at::ScalarType type = at::kFloat) const {
    return at::zeros({count}, options_.dtype(type));
  }

  at::Tensor reduced(std::int64_t count, at::ScalarType type, ReduceOp op) const {
    at::Tensor result = values(0, count, at::kDouble);
    for (int member = 1; member < size_; ++member) {
      const at::Tensor other = values(member, count, at::kDouble);
      result = op == ReduceOp::Min   ? at::minimum(result, other)
               : op == ReduceOp::Max ? at::maximum(result, other)
                                     : result + other;
    }
    return (op == ReduceOp::Avg ? result / size_ : result).to(type);
  }

  void check(const std::string& operation, const std::function<bool()>& body) {
    ProbeResult result;
    result.operation = operation;
    try {
      result.ok = body();
      if (!result.ok) result.error = "wrong values";
    } catch (const PeerLostError&) {
      throw;
    } catch (const std::exception& error) {
      result.error = without_backtrace(error.what());
    }
    results_.push_back(std::move(result));
  }

  double median_us(const std::function<void()>& body) const {
    std::vector<double> times;
    for (int i = 0; i < kRepeats + 3; ++i) {
      const auto begin = Clock::now();
      body();
      // On a device the wait only orders the stream; reading one element waits for the transfer.
      if (options_.device().is_cuda()) (void)at::zeros({1}, options_).item<float>();
      if (i >= 3) times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  }

  // Adds times to the latest result, or adds a new result if there is none by that name.
  void timed(const std::string& operation, std::uint64_t bytes, const std::function<void()>& body) {
    if (results_.empty() || results_.back().operation != operation)
      check(operation, [&] { return body(), true; });
    if (!results_.back().ok) return;
    const double us = median_us(body);
    (bytes == 0 ? results_.back().latency_us : results_.back().bandwidth_gbs) =
        bytes == 0 ? us : static_cast<double>(bytes) / us / 1e3;
  }

  void point_to_point() {
    const bool alone = size_ == 1;
    if (alone && !options_.device().is_cuda()) return;  // no peer
    const int peer = own_ == 0 ? size_ - 1 : 0;
    const int other = group_.rank_at(alone ? 0 : peer);
    const bool takes_part = alone || own_ == 0 || own_ == size_ - 1;
    const auto ping = [&](std::int64_t count) {
      const at::Tensor out = mine(count);
      const at::Tensor in = zeros(count);
      if (!takes_part) return;
      if (alone) {
        auto works = group_.batch_isend_irecv({P2POp::recv(in, other), P2POp::send(out, other)});
        wait_all(works);
      } else if (own_ == 0) {
        group_.send(out, other);
        group_.recv(in, other);
      } else {
        group_.recv(in, other);
        group_.send(out, other);
      }
      if (!in.equal(values(alone ? 0 : peer, count, at::kFloat))) throw StateError("wrong values");
    };
    const char* name = alone ? "send/recv to itself" : "send/recv";
    check(name, [&] { return ping(4), ping(100'000), true; });
    const at::Tensor small = zeros(1), large = zeros(2 << 20);
    const auto round = [&](const at::Tensor& tensor) {
      if (!takes_part) return;
      if (alone) {
        auto works = group_.batch_isend_irecv(
            {P2POp::recv(at::empty_like(tensor), other), P2POp::send(tensor, other)});
        wait_all(works);
      } else if (own_ == 0) {
        group_.send(tensor, other);
        group_.recv(tensor, other);
      } else {
        group_.recv(tensor, other);
        group_.send(tensor, other);
      }
    };
    timed(name, 0, [&] { round(small); });
    timed(name, 2 * large.nbytes(), [&] { round(large); });
    results_.back().latency_us /= alone ? 1 : 2;  // one way
    check("batch_isend_irecv", [&] {
      if (!takes_part) return true;
      const at::Tensor a = zeros(5), b = zeros(70'000);
      auto works = group_.batch_isend_irecv(
          {P2POp::send(mine(5), other, {.tag = 1}), P2POp::send(mine(70'000), other, {.tag = 2}),
           P2POp::recv(b, other, {.tag = 2}), P2POp::recv(a, other, {.tag = 1})});
      wait_all(works);
      const int from = alone ? 0 : peer;
      return a.equal(values(from, 5, at::kFloat)) && b.equal(values(from, 70'000, at::kFloat));
    });
  }

  void reductions(at::ScalarType type) {
    for (const auto op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max}) {
      if (op == ReduceOp::Avg && !at::isFloatingType(type)) continue;
      const std::string suffix = fmt::format(" {} {}", to_string(op), c10::toString(type));
      check("all_reduce" + suffix, [&] {
        at::Tensor small = mine(11, type), large = mine(50'000, type);
        group_.all_reduce(small, op).wait();
        group_.all_reduce(large, op).wait();
        return small.equal(reduced(11, type, op)) && large.equal(reduced(50'000, type, op));
      });
      check("reduce_scatter" + suffix, [&] {
        const at::Tensor out = zeros(13, type);
        group_.reduce_scatter(out, mine(13 * size_, type), op).wait();
        return out.equal(reduced(13 * size_, type, op).narrow(0, 13 * own_, 13));
      });
    }
    if (type != at::kFloat) return;
    const at::Tensor small = zeros(1), large = zeros(2 << 20);
    timed("all_reduce", 0, [&] { group_.all_reduce(small).wait(); });
    timed("all_reduce", large.nbytes(), [&] { group_.all_reduce(large).wait(); });
    const at::Tensor part = zeros((2 << 20) / size_), whole = zeros((2 << 20) / size_ * size_);
    timed("reduce_scatter", whole.nbytes(), [&] { group_.reduce_scatter(part, whole).wait(); });
  }

  void movement() {
    check("broadcast", [&] {
      const at::Tensor tensor = mine(1000, at::kBFloat16);
      group_.broadcast(tensor, group_.rank_at(size_ - 1)).wait();
      return tensor.equal(values(size_ - 1, 1000, at::kBFloat16));
    });
    check("all_gather", [&] {
      const at::Tensor out = zeros(17 * size_, at::kBFloat16);
      group_.all_gather(out, mine(17, at::kBFloat16)).wait();
      for (int member = 0; member < size_; ++member)
        if (!out.narrow(0, 17 * member, 17).equal(values(member, 17, at::kBFloat16))) return false;
      return true;
    });
    const at::Tensor part = zeros((2 << 20) / size_), whole = zeros((2 << 20) / size_ * size_);
    timed("all_gather", whole.nbytes(), [&] { group_.all_gather(whole, part).wait(); });
    check("all_gather_uneven", [&] {
      std::vector<at::Tensor> outs;
      for (int member = 0; member < size_; ++member) outs.push_back(zeros(3 * member));
      group_.all_gather_uneven(outs, mine(3 * own_)).wait();
      for (int member = 0; member < size_; ++member)
        if (!outs[static_cast<std::size_t>(member)].equal(values(member, 3 * member, at::kFloat)))
          return false;
      return true;
    });
    check("reduce_scatter_uneven", [&] {
      std::vector<at::Tensor> ins;
      for (int member = 0; member < size_; ++member) ins.push_back(mine(2 * member + 1));
      const at::Tensor out = zeros(2 * own_ + 1);
      group_.reduce_scatter_uneven(out, ins).wait();
      return out.equal(reduced(2 * own_ + 1, at::kFloat, ReduceOp::Sum));
    });
    check("all_to_all", [&] {
      // Member s sends s + r + 1 rows to member r, each row holding s and r.
      std::vector<std::int64_t> to, from;
      std::vector<at::Tensor> rows, expected;
      for (int other = 0; other < size_; ++other) {
        to.push_back(own_ + other + 1);
        from.push_back(own_ + other + 1);
        rows.push_back(
            at::tensor({static_cast<float>(own_), static_cast<float>(other)}).expand({own_ + other + 1, 2}));
        expected.push_back(
            at::tensor({static_cast<float>(other), static_cast<float>(own_)}).expand({own_ + other + 1, 2}));
      }
      const at::Tensor in = at::cat(rows).to(options_.device()),
                       want = at::cat(expected).to(options_.device()), out = at::zeros_like(want);
      group_.all_to_all(out, in, from, to).wait();
      return out.equal(want);
    });
  }

  void coalesced() {
    check("all_reduce_coalesced", [&] {
      const at::Tensor a = mine(3), b = mine(40'000), c = mine(5, at::kDouble);
      group_.all_reduce_coalesced({a, b, c}).wait();
      return a.equal(reduced(3, at::kFloat, ReduceOp::Sum)) &&
             b.equal(reduced(40'000, at::kFloat, ReduceOp::Sum)) &&
             c.equal(reduced(5, at::kDouble, ReduceOp::Sum));
    });
    check("all_gather_coalesced", [&] {
      const at::Tensor a = zeros(2 * size_), b = zeros(3 * size_);
      group_.all_gather_coalesced({a, b}, {mine(2), mine(3)}).wait();
      for (int member = 0; member < size_; ++member)
        if (!a.narrow(0, 2 * member, 2).equal(values(member, 2, at::kFloat)) ||
            !b.narrow(0, 3 * member, 3).equal(values(member, 3, at::kFloat)))
          return false;
      return true;
    });
    check("reduce_scatter_coalesced", [&] {
      const at::Tensor a = zeros(2), b = zeros(3);
      group_.reduce_scatter_coalesced({a, b}, {mine(2 * size_), mine(3 * size_)}).wait();
      return a.equal(reduced(2 * size_, at::kFloat, ReduceOp::Sum).narrow(0, 2 * own_, 2)) &&
             b.equal(reduced(3 * size_, at::kFloat, ReduceOp::Sum).narrow(0, 3 * own_, 3));
    });
  }

  const Group& group_;
  at::TensorOptions options_;
  int size_;
  int own_;
  std::vector<ProbeResult> results_;
};

}  // namespace

std::vector<ProbeResult> self_test(const Group& group, at::Device device) {
  return Probe(group, device).run();
}

}  // namespace penstock::comm
