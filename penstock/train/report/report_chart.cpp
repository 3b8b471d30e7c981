#include "penstock/train/report/report_chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string_view>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/markup.h"
#include "penstock/base/text.h"
#include "penstock/draw.h"
#include "penstock/errors.h"
#include "penstock/plan/draw/drawing.h"
#include "penstock/train/report/progress.h"

namespace penstock::train {

namespace {

constexpr std::size_t kMostPoints = 1600;
constexpr double kLeft = 66, kRight = 14, kTop = 10, kBottom = 34;

bool shown(double x, double y) { return std::isfinite(x) && std::isfinite(y); }

struct Axis {
  double low = 0;
  double high = 1;
  bool logarithmic = false;
  // 0 to 1.
  double place(double value) const {
    return logarithmic ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
  }
};

std::vector<double> ticks_of(const Axis& axis, int count, ChartUnit unit = ChartUnit::Plain) {
  std::vector<double> ticks;
  if (axis.logarithmic) {
    for (double power = std::pow(10, std::floor(std::log10(axis.low))); power <= axis.high; power *= 10)
      for (const double factor : {1.0, 2.0, 5.0})
        if (power * factor >= axis.low * 0.999 && power * factor <= axis.high * 1.001)
          ticks.push_back(power * factor);
    return ticks;
  }
  double whole = 1;  // unit such as MiB, in which ticks are round numbers
  while (unit == ChartUnit::Bytes && whole * 1024 <= axis.high) whole *= 1024;
  const double distance = plan::tick_distance((axis.high - axis.low) / whole, count) * whole;
  for (double at = std::ceil(axis.low / distance - 1e-9); at * distance <= axis.high + 1e-9 * distance; ++at)
    ticks.push_back(at == 0 ? 0 : at * distance);
  return ticks;
}

std::string tick_text(double value, ChartUnit unit) {
  if (unit == ChartUnit::Bytes) return format_bytes(static_cast<std::uint64_t>(std::max(value, 0.0)));
  if (unit == ChartUnit::TokensPerSecond && std::abs(value) >= 1000)
    return fmt::format("{:g} k", value / 1000);
  return fmt::format("{:g}", value);
}

class ChartWriter {
 public:
  explicit ChartWriter(const Chart& chart)
      : chart_(chart),
        width_(chart.wide ? 1120 : 548),
        height_(chart.low    ? 170
                : chart.wide ? 300
                             : 230) {
    for (const ChartSeries& each : chart.series) {
      PENSTOCK_INVARIANT(each.x.size() == each.y.size(), "every point has both coordinates");
      series_.push_back(thinned(each, kMostPoints));
    }
  }

  std::string write() {
    print("<figure><figcaption>{}</figcaption>", escape_xml(chart_.title));
    if (!find_axes()) return out_ + "<p class=\"none\">no data recorded</p></figure>\n";
    legend();
    print(
        "<svg class=\"chart\" viewBox=\"0 0 {0:.0f} {1:.0f}\" role=\"img\" aria-label=\"{2}\" "
        "data-chart=\"{3}\">",
        width_, height_, escape_xml(chart_.title), escape_xml(data()));
    grid();
    for (const ChartSeries& each : series_) curve(each);
    out_ += "</svg></figure>\n";
    return std::move(out_);
  }

 private:
  template <class... Args>
  void print(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<Args>(args)...);
  }

  bool find_axes() {
    double x_low = std::numeric_limits<double>::infinity(), x_high = -x_low, y_low = x_low, y_high = -x_low;
    for (const ChartSeries& each : series_)
      for (std::size_t i = 0; i < each.x.size(); ++i) {
        if (!shown(each.x[i], each.y[i])) continue;
        x_low = std::min(x_low, each.x[i]);
        x_high = std::max(x_high, each.x[i]);
        y_low = std::min(y_low, each.y[i]);
        y_high = std::max(y_high, each.y[i]);
      }
    if (!(x_low <= x_high)) return false;
    if (x_low == x_high) x_high = x_low + 1;
    x_ = {x_low, x_high};
    const bool logarithmic = chart_.logarithmic && y_low > 0 && y_high / y_low > 20;
    if (logarithmic) {
      y_ = {y_low / 1.15, y_high * 1.15, true};
      return true;
    }
    if (chart_.from_zero) y_low = std::min(y_low, 0.0);
    double margin = 0.06 * (y_high - y_low);
    if (!(margin > 0)) margin = y_high != 0 ? 0.1 * std::abs(y_high) : 1;
    y_ = {chart_.from_zero && y_low == 0 ? 0 : y_low - margin, y_high + margin};
    return true;
  }

  double x_at(double value) const { return kLeft + x_.place(value) * (width_ - kLeft - kRight); }
  double y_at(double value) const { return height_ - kBottom - y_.place(value) * (height_ - kTop - kBottom); }
  static int colour(const ChartSeries& series) { return (series.colour - 1) % 8 + 1; }

  void legend() {
    out_ += "<div class=\"legend\">";
    for (const ChartSeries& each : series_)
      print("<span><i class=\"c{}{}\"></i>{}</span>", colour(each),
            each.look == ChartSeries::Look::Faint    ? " faint"
            : each.look == ChartSeries::Look::Points ? " dotted"
                                                     : "",
            escape_xml(each.name));
    out_ += "</div>";
  }

  void grid() {
    const double bottom = height_ - kBottom;
    for (const double tick : ticks_of(y_, chart_.low ? 3 : chart_.wide ? 6 : 5, chart_.unit)) {
      const double y = y_at(tick);
      print(
          "<line class=\"tick\" x1=\"{}\" x2=\"{:.0f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/><text class=\"note "
          "end\" x=\"{}\" y=\"{:.1f}\">{}</text>",
          kLeft, width_ - kRight, y, y, kLeft - 8, y + 4, tick_text(tick, chart_.unit));
    }
    for (const double tick : ticks_of(x_, chart_.wide ? 10 : 5))
      print("<text class=\"note mid\" x=\"{:.1f}\" y=\"{:.1f}\">{:g}</text>", x_at(tick), bottom + 16, tick);
    print("<line class=\"axis\" x1=\"{}\" x2=\"{:.0f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>", kLeft,
          width_ - kRight, bottom, bottom);
    print("<text class=\"note end\" x=\"{:.0f}\" y=\"{:.1f}\">{}</text>", width_ - kRight, bottom + 30,
          escape_xml(chart_.x_name));
  }

  void curve(const ChartSeries& series) {
    std::string path;
    bool gap = true;
    std::size_t points = 0;
    for (std::size_t i = 0; i < series.x.size(); ++i) {
      if (!shown(series.x[i], series.y[i])) {
        gap = true;
        continue;
      }
      fmt::format_to(std::back_inserter(path), "{}{:.1f} {:.1f}", gap ? "M" : "L", x_at(series.x[i]),
                     y_at(series.y[i]));
      gap = false;
      ++points;
    }
    if (points == 0) return;
    using Look = ChartSeries::Look;
    print("<path class=\"curve c{}{}\"{} d=\"{}\"/>", colour(series),
          series.look == Look::Faint    ? " faint"
          : series.look == Look::Points ? " dotted"
                                        : "",
          series.width == 2 ? "" : fmt::format(" style=\"stroke-width:{}\"", series.width), path);
    // A single point does not form a line.
    if ((series.look == Look::Points && points <= 60) || points == 1)
      for (std::size_t i = 0; i < series.x.size(); ++i)
        if (shown(series.x[i], series.y[i]))
          print("<circle class=\"dot c{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\"/>", colour(series),
                x_at(series.x[i]), y_at(series.y[i]));
  }

  // For the script: the position of the axes, and the points.
  std::string data() const {
    const char* unit = chart_.unit == ChartUnit::Bytes             ? "B"
                       : chart_.unit == ChartUnit::TokensPerSecond ? "tok/s"
                       : chart_.unit == ChartUnit::Milliseconds    ? "ms"
                                                                   : "";
    std::string text = fmt::format(
        "{{\"x\":[{},{}],\"y\":[{},{}],\"log\":{},\"box\":[{},{},{},{}],\"unit\":\"{}\",\"series\":[", x_.low,
        x_.high, y_.low, y_.high, y_.logarithmic, kLeft, kTop, width_ - kRight, height_ - kBottom, unit);
    for (std::size_t i = 0; i < series_.size(); ++i) {
      text += fmt::format("{}{{\"colour\":{},\"points\":[", i == 0 ? "" : ",", colour(series_[i]));
      bool first = true;
      for (std::size_t at = 0; at < series_[i].x.size(); ++at) {
        if (!shown(series_[i].x[at], series_[i].y[at])) continue;
        text += fmt::format("{}{:.10g},{:.6g}", std::exchange(first, false) ? "" : ",", series_[i].x[at],
                            series_[i].y[at]);
      }
      text += "]}";
    }
    return text + "]}";
  }

  const Chart& chart_;
  double width_;
  double height_;
  std::vector<ChartSeries> series_;
  Axis x_;
  Axis y_;
  std::string out_;
};

}  // namespace

std::string format_value(double value, ChartUnit unit) {
  if (!std::isfinite(value)) return "not finite";
  switch (unit) {
    case ChartUnit::Bytes:
      return format_bytes(static_cast<std::uint64_t>(std::max(value, 0.0)));
    case ChartUnit::TokensPerSecond:
      return format_token_rate(value);
    case ChartUnit::Milliseconds:
      return fmt::format("{:.{}f} ms", value, value < 10 ? 2 : 1);
    case ChartUnit::Plain:
      return fmt::format("{:.5g}", value);
  }
  return "";
}

ChartSeries thinned(const ChartSeries& series, std::size_t most) {
  if (series.x.size() <= most || most < 2) return series;
  ChartSeries thin{.name = series.name,
                   .colour = series.colour,
                   .look = series.look,
                   .width = series.width,
                   .x = {},
                   .y = {}};
  const std::size_t stretches = most / 2;
  for (std::size_t i = 0; i < stretches; ++i) {
    const std::size_t begin = i * series.x.size() / stretches, end = (i + 1) * series.x.size() / stretches;
    std::size_t least = begin, greatest = begin;
    for (std::size_t at = begin; at < end; ++at) {
      // Non-finite values are neither; an interval with no finite values stays a gap.
      if (!std::isfinite(series.y[at])) continue;
      if (!(series.y[least] <= series.y[at])) least = at;
      if (!(series.y[greatest] >= series.y[at])) greatest = at;
    }
    for (const std::size_t at : {std::min(least, greatest), std::max(least, greatest)}) {
      thin.x.push_back(series.x[at]);
      thin.y.push_back(series.y[at]);
      if (least == greatest) break;
    }
  }
  return thin;
}

std::string draw_chart(const Chart& chart) { return ChartWriter(chart).write(); }

}  // namespace penstock::train
