// The picture of ActivationReport: one shape for each tensor, stacked over the operators of a step.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/markup.h"
#include "penstock/base/text.h"
#include "penstock/graph/tools/memory_report.h"

namespace penstock::graph {
namespace {

constexpr double kChartLeft = 80, kChartTop = 20, kChartWidth = 1400, kChartHeight = 640;
// Tensors below this part of the peak are drawn together.
constexpr double kSmallPart = 1.0 / 500;

std::string_view colour_of(StepTensor::Kind kind) {
  switch (kind) {
    case StepTensor::Kind::Temporary:
      return "#b8c4d0";
    case StepTensor::Kind::Saved:
      return "#4f86c6";
    case StepTensor::Kind::Recomputed:
      return "#e08e45";
    case StepTensor::Kind::Gradient:
      return "#6aa56a";
    case StepTensor::Kind::Given:
      return "#a7cfa7";
  }
  return "#b8c4d0";
}

// From below: what lives longest first, so that little moves when something is freed.
int layer_of(StepTensor::Kind kind) {
  switch (kind) {
    case StepTensor::Kind::Saved:
      return 0;
    case StepTensor::Kind::Gradient:
      return 1;
    case StepTensor::Kind::Given:
      return 2;
    case StepTensor::Kind::Recomputed:
      return 3;
    case StepTensor::Kind::Temporary:
      return 4;
  }
  return 4;
}

// A tensor, or the sum of small ones.
struct Band {
  const StepTensor* tensor = nullptr;  // null: small ones
  std::size_t first = 0, last = 0;
  // Where it begins and ends, from the operator on; only where that changes.
  struct Step {
    std::size_t from;
    std::int64_t low, high;
    bool operator==(const Step& other) const { return low == other.low && high == other.high; }
  };
  std::vector<Step> steps;
};

class MemoryPicture {
 public:
  explicit MemoryPicture(const StepMemory& step)
      : step_(step), peak_(std::max<std::int64_t>(1, step.peak_bytes())), small_(step.live.size(), 0) {
    std::vector<Band> small{
        {.tensor = nullptr, .first = 0, .last = step.live.empty() ? 0 : step.live.size() - 1}};
    for (const StepTensor& tensor : step.tensors) {
      if (static_cast<double>(tensor.bytes) < kSmallPart * static_cast<double>(peak_)) {
        for (std::size_t i = tensor.first; i <= tensor.last; ++i) small_[i] += tensor.bytes;
      } else {
        bands_.push_back({.tensor = &tensor, .first = tensor.first, .last = tensor.last});
      }
    }
    std::stable_sort(bands_.begin(), bands_.end(), [](const Band& a, const Band& b) {
      return std::pair(layer_of(a.tensor->kind), a.first) < std::pair(layer_of(b.tensor->kind), b.first);
    });
    bands_.insert(bands_.begin(), small.begin(), small.end());
    for (std::size_t i = 0; i < step.live.size(); ++i) {
      std::int64_t height = 0;
      for (Band& band : bands_) {
        if (i < band.first || i > band.last) continue;
        const std::int64_t bytes = band.tensor ? band.tensor->bytes : small_[i];
        const Band::Step here{i, height, height + bytes};
        if (band.steps.empty() || !(band.steps.back() == here)) band.steps.push_back(here);
        height += bytes;
      }
    }
  }

  template <class NameOf>
  std::string svg(const NameOf& name_of) const {
    std::string text = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0f} {:.0f}\" font-family=\"sans-serif\" "
        "font-size=\"12\">\n",
        kChartLeft + kChartWidth + 20, kChartTop + kChartHeight + 40);
    const auto out = std::back_inserter(text);
    for (int line = 0; line <= 4; ++line) {
      const std::int64_t bytes = peak_ * line / 4;
      fmt::format_to(out,
                     "<line x1=\"{:.0f}\" x2=\"{:.0f}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#ddd\"/>"
                     "<text x=\"{:.0f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
                     kChartLeft, kChartLeft + kChartWidth, y(bytes), y(bytes), kChartLeft - 6, y(bytes) + 4,
                     format_bytes(static_cast<std::uint64_t>(bytes)));
    }
    for (const Band& band : bands_) {
      if (band.steps.empty()) continue;
      const std::string name =
          band.tensor
              ? fmt::format(
                    "{}\n{}, {}\noperators {} to {}", name_of(*band.tensor), to_text(band.tensor->kind),
                    format_bytes(static_cast<std::uint64_t>(band.tensor->bytes)), band.first, band.last)
              : fmt::format(
                    "tensors below {}",
                    format_bytes(static_cast<std::uint64_t>(kSmallPart * static_cast<double>(peak_))));
      fmt::format_to(
          out, "<path d=\"{}\" fill=\"{}\" stroke=\"#fff\" stroke-width=\"0.3\"><title>{}</title></path>\n",
          outline(band), band.tensor ? colour_of(band.tensor->kind) : "#8a8a8a", escape_xml(name));
    }
    const double border = x(step_.forward_operators), peak = x(step_.peak_operator());
    fmt::format_to(
        out,
        "<line x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.0f}\" y2=\"{2:.0f}\" stroke=\"#444\" "
        "stroke-dasharray=\"4 3\"/>\n<text x=\"{3:.1f}\" y=\"{4:.0f}\">forward</text>"
        "<text x=\"{5:.1f}\" y=\"{4:.0f}\">backward</text>\n"
        "<line x1=\"{6:.1f}\" x2=\"{6:.1f}\" y1=\"{1:.0f}\" y2=\"{2:.0f}\" stroke=\"#c33\"/>"
        "<text x=\"{6:.1f}\" y=\"{7:.0f}\" fill=\"#c33\" text-anchor=\"middle\">peak</text>\n</svg>\n",
        border, kChartTop, kChartTop + kChartHeight, kChartLeft, kChartTop + kChartHeight + 18, border + 4,
        peak, kChartTop - 6);
    return text;
  }

 private:
  double x(std::size_t place) const {
    return kChartLeft + kChartWidth * static_cast<double>(place) /
                            static_cast<double>(std::max<std::size_t>(1, step_.live.size()));
  }
  double y(std::int64_t bytes) const {
    return kChartTop + kChartHeight * (1 - static_cast<double>(bytes) / static_cast<double>(peak_));
  }

  // Along the lower edge, and back along the upper one.
  std::string outline(const Band& band) const {
    std::string text = "M";
    const auto out = std::back_inserter(text);
    const auto end_of = [&](std::size_t i) {
      return x(i + 1 < band.steps.size() ? band.steps[i + 1].from : band.last + 1);
    };
    for (std::size_t i = 0; i < band.steps.size(); ++i)
      fmt::format_to(out, "{:.2f} {:.2f}L{:.2f} {:.2f}L", x(band.steps[i].from), y(band.steps[i].low),
                     end_of(i), y(band.steps[i].low));
    for (std::size_t i = band.steps.size(); i-- > 0;)
      fmt::format_to(out, "{:.2f} {:.2f}L{:.2f} {:.2f}{}", end_of(i), y(band.steps[i].high),
                     x(band.steps[i].from), y(band.steps[i].high), i > 0 ? "L" : "Z");
    return text;
  }

  const StepMemory& step_;
  const std::int64_t peak_;
  std::vector<std::int64_t> small_;  // by operator: bytes of small tensors
  std::vector<Band> bands_;          // from below
};

}  // namespace

std::string ActivationReport::to_html(const std::string& title) const {
  std::string legend;
  for (const StepTensor::Kind kind : {StepTensor::Kind::Saved, StepTensor::Kind::Recomputed,
                                      StepTensor::Kind::Gradient, StepTensor::Kind::Temporary})
    legend +=
        fmt::format("<span style=\"color:{}\">&#9632;</span> {} &nbsp; ", colour_of(kind), to_text(kind));
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{0}</title>\n"
      "<style>body{{font-family:sans-serif;margin:1.5em}} svg{{width:100%;height:auto}} "
      "path:hover{{stroke:#000;stroke-width:1.5}} pre{{overflow-x:auto}}</style></head>\n"
      "<body><h1>{0}</h1>\n<p>Memory of one call by operator, parameters and inputs not counted. {1}</p>\n"
      "{2}<pre>{3}\n{4}</pre></body></html>\n",
      escape_xml(title), legend,
      MemoryPicture(step_).svg([&](const StepTensor& tensor) { return name_of(tensor); }),
      escape_xml(peak_text(24)), escape_xml(saving_text()));
}

}  // namespace penstock::graph
