// Charts as inline SVG for the report: axes, legend, and the values in an attribute for the page's script,
// which shows them under the pointer. Colours come from the page's style sheet (classes c1 to c8), so that
// charts work in light and dark mode.
#pragma once

#include <string>
#include <vector>

namespace penstock::train {

struct ChartSeries {
  enum class Look { Line, Faint, Points };  // Points: a dashed line with a dot at each point
  std::string name;
  int colour = 1;  // from 1; wraps around after 8
  Look look = Look::Line;
  double width = 2;  // of the line; wide lines below narrow ones show coinciding curves
  std::vector<double> x;
  std::vector<double> y;  // as long as x; non-finite values are gaps
};

enum class ChartUnit { Plain, Milliseconds, Bytes, TokensPerSecond };

struct Chart {
  std::string title;
  std::string x_name = "step";
  ChartUnit unit = ChartUnit::Plain;
  bool logarithmic = false;  // only if all values are above 0
  bool from_zero = false;
  bool wide = true;
  bool low = false;  // half the height, for values that hardly change
  std::vector<ChartSeries> series;
};

// Returns a <figure> with title, legend and picture, or with a sentence if no series has a value.
std::string draw_chart(const Chart& chart);

// "312.0 MiB", "15.2 ktok/s", "0.0021".
std::string format_value(double value, ChartUnit unit);

// Reduces a series to about `most` points: keeps the minimum and the maximum of each interval.
ChartSeries thinned(const ChartSeries& series, std::size_t most);

}  // namespace penstock::train
