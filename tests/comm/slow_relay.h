// A relay between ranks and a port that delays every byte, as a long cable does, for tests.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/comm/strangers.h"

namespace penstock::test {

class SlowRelay {
 public:
  SlowRelay(int target_port, std::chrono::milliseconds delay) : target_(target_port), delay_(delay) {
    std::tie(listener_, port_) = listen_on_loopback();
    thread_ = std::thread([this] { run(); });
  }
  ~SlowRelay() {
    stop_ = true;
    thread_.join();
    close(listener_);
  }
  SlowRelay(const SlowRelay&) = delete;
  SlowRelay& operator=(const SlowRelay&) = delete;

  int port() const { return port_; }
  int connections() const { return connections_; }

 private:
  using Clock = std::chrono::steady_clock;

  // One direction of one connection: what was read, and when it may be written. Empty bytes: the end.
  struct Direction {
    int from = -1, to = -1;
    bool ended = false;  // nothing more will be read
    std::deque<std::pair<Clock::time_point, std::string>> queue;
  };
  struct Pair {
    Direction out, back;
  };

  void take(Direction& direction) {
    char part[4096];
    const ssize_t got = recv(direction.from, part, sizeof part, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    direction.ended = got <= 0;
    direction.queue.emplace_back(Clock::now() + delay_,
                                 got > 0 ? std::string(part, static_cast<std::size_t>(got)) : std::string());
  }

  static void pass_on(Direction& direction) {
    while (!direction.queue.empty() && direction.queue.front().first <= Clock::now()) {
      const std::string bytes = std::move(direction.queue.front().second);
      direction.queue.pop_front();
      if (bytes.empty()) {
        shutdown(direction.to, SHUT_WR);
      } else {
        [[maybe_unused]] const ssize_t sent = send(direction.to, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      }
    }
  }

  void run() {
    std::vector<std::unique_ptr<Pair>> pairs;
    while (!stop_) {
      std::vector<pollfd> polled = {{listener_, POLLIN, 0}};
      for (const auto& pair : pairs)
        for (const Direction* direction : {&pair->out, &pair->back})
          polled.push_back({direction->ended ? -1 : direction->from, POLLIN, 0});
      poll(polled.data(), polled.size(), 1);
      for (std::size_t i = 0; i < pairs.size(); ++i) {
        if (polled[1 + 2 * i].revents != 0) take(pairs[i]->out);
        if (polled[2 + 2 * i].revents != 0) take(pairs[i]->back);
        pass_on(pairs[i]->out);
        pass_on(pairs[i]->back);
      }
      if (polled[0].revents != 0) {
        const int near = accept(listener_, nullptr, nullptr), far = stranger(target_);
        if (far < 0) {
          close(near);
          continue;
        }
        ++connections_;
        auto pair = std::make_unique<Pair>();
        pair->out = {near, far, false, {}};
        pair->back = {far, near, false, {}};
        pairs.push_back(std::move(pair));
      }
    }
    for (const auto& pair : pairs) {
      close(pair->out.from);
      close(pair->out.to);
    }
  }

  int target_, listener_ = -1, port_ = 0;
  std::chrono::milliseconds delay_;
  std::atomic<bool> stop_{false};
  std::atomic<int> connections_{0};
  std::thread thread_;
};

}  // namespace penstock::test
