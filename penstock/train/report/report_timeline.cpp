#include "penstock/train/report/report_timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/base/markup.h"
#include "penstock/draw.h"
#include "penstock/pipeline/report/step_trace.h"
#include "penstock/plan/draw/drawing.h"

namespace penstock::train {

namespace {

using schedule::Action;
using schedule::ActionKind;

// Pixels.
constexpr double kTimelineLeft = 64;
constexpr double kTimelineRight = 14;
constexpr double kMeasured = 28;
constexpr double kSimulated = 17;
constexpr double kBetween = 2;
constexpr double kGap = 12;
constexpr double kTimelineTop = 6;
constexpr double kNarrowest = 1042;  // of the time axis
constexpr double kWidest = 8000;
constexpr double kPleasantCell = 16;  // wide enough for a number

std::string_view words_of(ActionKind kind) {
  switch (kind) {
    case ActionKind::Forward:
      return "F forward";
    case ActionKind::Backward:
      return "B backward";
    case ActionKind::BackwardInput:
      return "I input gradient";
    case ActionKind::BackwardWeight:
      return "W weight gradient";
    case ActionKind::Unshard:
      return "gather parameters";
    case ActionKind::Reshard:
      return "free parameters";
    case ActionKind::ReduceGrad:
      return "reduce gradients";
    default:
      return "transfer";
  }
}

class TimelineWriter {
 public:
  explicit TimelineWriter(const TraceReport& report)
      : report_(report),
        chunk_(plan::chunk_of_stages(report.trace.schedule.stages())),
        chunks_(plan::most_chunks(report.trace.schedule.stages())) {
    time_ = std::max({report.comparison.measured_ms, report.comparison.simulated_ms, 1e-6});
    std::vector<double> lengths;
    for (const ActionComparison& action : report.comparison.actions)
      lengths.push_back(action.end_ms - action.begin_ms);
    const double usual = median_of(lengths);
    scale_ = std::clamp(usual > 0 ? kPleasantCell * time_ / usual : kNarrowest, kNarrowest, kWidest) / time_;
  }

  std::string write() {
    const auto ranks = static_cast<double>(report_.trace.ranks.size());
    const double row = kMeasured + kBetween + kSimulated + kGap;
    const double bottom = kTimelineTop + ranks * row;
    const double width = kTimelineLeft + time_ * scale_ + kTimelineRight;
    const double height = bottom + 24;
    print(
        "<svg class=\"timeline\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
        "role=\"img\" aria-label=\"step {2} over the ranks\">",
        width, height, report_.step);
    const double distance = plan::tick_distance(time_, static_cast<int>(std::max(4.0, time_ * scale_ / 110)));
    for (int tick = 0; tick * distance <= time_ * (1 + 1e-9); ++tick) {
      const double x = kTimelineLeft + tick * distance * scale_;
      print(
          "<line class=\"tick\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2:.1f}\"/><text class=\"note "
          "mid\" x=\"{0:.1f}\" y=\"{3:.1f}\">{4:g}{5}</text>",
          x, kTimelineTop - 4, bottom - 4, bottom + 12, tick * distance, tick == 0 ? " ms" : "");
    }
    std::size_t next = 0;  // index into the comparison's actions, which are in the same order
    for (std::size_t rank = 0; rank < report_.trace.ranks.size(); ++rank) {
      const double y = kTimelineTop + static_cast<double>(rank) * row;
      print("<text class=\"label end\" x=\"{}\" y=\"{:.1f}\">rank {}</text>", kTimelineLeft - 10,
            y + kMeasured / 2 + 4.5, rank);
      print("<text class=\"note end\" x=\"{}\" y=\"{:.1f}\">simulated</text>", kTimelineLeft - 10,
            y + kMeasured + kBetween + kSimulated / 2 + 4);
      lane(y, kMeasured, report_.comparison.measured_ms);
      lane(y + kMeasured + kBetween, kSimulated, report_.comparison.simulated_ms);
      for (const TraceEvent& event : report_.trace.ranks[rank]) {
        const double begin = static_cast<double>(event.begin_ns) / 1e6,
                     end = static_cast<double>(event.end_ns) / 1e6;
        if (event.kind == TraceEvent::Kind::Compute) {
          const ActionComparison& action = report_.comparison.actions.at(next++);
          const std::string tip = fmt::format(
              "{} on rank {}\nmeasured {:.3f} to {:.3f} ms: {:.3f} ms\nsimulated {:.3f} to {:.3f} ms: {:.3f} "
              "ms",
              action.action, rank, begin, end, end - begin, action.simulated_begin_ms,
              action.simulated_end_ms, action.simulated_end_ms - action.simulated_begin_ms);
          cell(event.actions, begin, end, y, kMeasured, tip, true);
          cell(event.actions, action.simulated_begin_ms, action.simulated_end_ms, y + kMeasured + kBetween,
               kSimulated, tip, false);
        } else if (event.kind == TraceEvent::Kind::Stage) {
          cell(event.actions, begin, end, y, kMeasured,
               fmt::format("{} on rank {}\n{:.3f} ms", action_text(event), rank, end - begin), true);
        } else if (event.kind == TraceEvent::Kind::Await || event.kind == TraceEvent::Kind::Finish) {
          wait(begin, end, y,
               fmt::format("{} on rank {}\nwaits {:.3f} ms",
                           event.channel ? to_text(*event.channel) : "sends", rank, end - begin));
        }
      }
    }
    out_ += "</svg>";
    return legend() + "<div class=\"scroll\">" + out_ + "</div>";
  }

 private:
  template <class... Args>
  void print(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<Args>(args)...);
  }

  void lane(double y, double height, double length) {
    print("<rect class=\"lane\" x=\"{}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{}\" rx=\"3\"/>",
          kTimelineLeft, y, length * scale_, height);
  }

  void wait(double begin, double end, double y, const std::string& tip) {
    const double width = (end - begin) * scale_;
    if (width < 0.4) return;  // too narrow to be visible
    waits_ = true;
    print(
        "<g class=\"cell\" data-m=\"-1\" data-tip=\"{}\"><rect class=\"wait\" x=\"{:.2f}\" y=\"{:.1f}\" "
        "width=\"{:.2f}\" height=\"{}\"/></g>",
        escape_xml(tip), kTimelineLeft + begin * scale_, y + kMeasured - 6, width, 6);
  }

  void cell(const std::vector<Action>& actions, double begin, double end, double y, double height,
            const std::string& tip, bool measured) {
    const double width = (end - begin) * scale_;
    if (!(width > 0) || actions.empty()) return;
    const double x = kTimelineLeft + begin * scale_;
    const double drawn = std::max(width - (width > 4 ? 1 : 0.3), 0.3);
    const Action& first = actions.front();
    print("<g class=\"cell{}\" data-m=\"{}\" data-tip=\"{}\">", measured ? "" : " simulated",
          first.has_microbatch() ? *first.microbatch() : -1, escape_xml(tip));
    const double each = height / static_cast<double>(actions.size());
    for (std::size_t i = 0; i < actions.size(); ++i) {
      const Action& action = actions[i];
      kinds_.insert(action.kind());
      const std::string fill =
          plan::fill_colour(action.kind(), chunk_.at(static_cast<std::size_t>(action.stage())), chunks_);
      const double top = y + static_cast<double>(i) * each;
      print("<rect fill=\"{}\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" rx=\"{}\"/>",
            fill, x, top, drawn, each - (i + 1 < actions.size() ? 0.6 : 0), width > 8 ? 2 : 0);
      const std::string number = action.has_microbatch() ? fmt::format("{}", *action.microbatch()) : "";
      if (each >= 13 && drawn >= 7 * static_cast<double>(number.size()) + 3)
        print("<text class=\"number\" fill=\"{}\" x=\"{:.2f}\" y=\"{:.1f}\">{}</text>",
              plan::text_colour(fill), x + drawn / 2, top + each / 2 + 4, number);
    }
    out_ += "</g>";
  }

  std::string legend() const {
    std::string text = "<div class=\"legend\">";
    for (const ActionKind kind : kinds_) {
      text += "<span>";
      for (int chunk = 0; chunk < chunks_; ++chunk)
        text += fmt::format("<b style=\"background:{}\"></b>", plan::fill_colour(kind, chunk, chunks_));
      text += fmt::format("{}</span>", words_of(kind));
    }
    if (waits_) text += "<span><b class=\"wait\"></b>waits</span>";
    text += "<span><b class=\"lane\"></b>idle</span>";
    text += fmt::format("<span>numbers are microbatches{}</span></div>",
                        chunks_ > 1 ? "; lighter shades are later stages of a rank" : "");
    return text;
  }

  const TraceReport& report_;
  std::vector<int> chunk_;
  int chunks_;
  double time_ = 1;
  double scale_ = 1;
  bool waits_ = false;
  std::set<ActionKind> kinds_;
  std::string out_;
};

}  // namespace

std::string draw_timeline(const TraceReport& report) { return TimelineWriter(report).write(); }

}  // namespace penstock::train
