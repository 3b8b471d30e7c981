// Curves as inline SVG for the report: axes, legend, and the values in an attribute for the page's script to show under the pointer.
// Colours come from the style sheet of the page (classes c1 to c8), so that a chart is right in the light and in the dark.
#pragma once

#include <string>
#include <vector>

namespace penstock::train {

struct ChartSeries {
  enum class Look { Line, Faint, Points };  // Points: a dashed line with a dot at each
  std::string name;
  int colour = 1;  // from 1 on; goes round after 8
  Look look = Look::Line;
  double width = 2;  // of the line; wider ones below narrower ones show curves that lie on each other
  std::vector<double> x;
  std::vector<double> y;  // as long as x; what is not finite is a gap
};

enum class ChartUnit { Plain, Milliseconds, Bytes, TokensPerSecond };

struct Chart {
  std::string title;
  std::string x_name = "step";
  ChartUnit unit = ChartUnit::Plain;
  bool logarithmic = false;  // where all values are above 0, else not
  bool from_zero = false;
  bool wide = true;
  bool low = false;          // half as high: for what hardly changes
  std::vector<ChartSeries> series;
};

// A <figure> with title, legend and picture; a sentence in its place where no series has a value.
std::string draw_chart(const Chart& chart);

// "312.0 MiB", "15.2 ktok/s", "0.0021".
std::string format_value(double value, ChartUnit unit);

// At most about `most` points: of each stretch those with the least and the greatest value.
ChartSeries thinned(const ChartSeries& series, std::size_t most);

}  // namespace penstock::train
