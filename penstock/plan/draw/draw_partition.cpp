#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <set>
#include <utility>

#include "penstock/base/markup.h"
#include "penstock/base/text.h"
#include "penstock/plan/draw/drawing.h"
#include "penstock/plan/draw/partition_drawing.h"

namespace penstock::plan {
namespace {

// Pixels.
constexpr double kRankLeft = 74, kHeadTop = 78, kBoxHeight = 30, kRankHeight = 46, kStageGap = 14;
constexpr double kBlocksWide = 760;  // about; letters are not narrower than kNarrowLetter
constexpr double kWideLetter = 18, kNarrowLetter = 3, kReadableLetter = 9;
constexpr double kBarWide = 190, kBarGap = 36, kEndWide = 12;

struct LetterStyle {
  char letter;
  const char* colour;
  const char* name;
};
constexpr std::array<LetterStyle, 4> kLetterStyles{{{'A', "#4f7fd9", "A attention"},
                                                    {'E', "#e0923a", "E experts"},
                                                    {'M', "#3fa08a", "M state space"},
                                                    {'F', "#9a74c9", "F feed-forward"}}};
constexpr const char* kEndColour = "#5b6b76";

std::string colour_of_letter(char letter) {
  for (const LetterStyle& style : kLetterStyles)
    if (style.letter == letter) return style.colour;
  return "#8a97a0";
}

class PartitionWriter {
 public:
  explicit PartitionWriter(const PartitionDrawing& drawing)
      : drawing_(drawing), of_rank_(static_cast<std::size_t>(drawing.ranks)) {
    for (const DrawnStage& stage : drawing.stages)
      of_rank_[static_cast<std::size_t>(stage.rank)].push_back(&stage);
    double most_letters = 1, most_stages = 1;
    for (auto& stages : of_rank_) {
      std::sort(stages.begin(), stages.end(),
                [](const DrawnStage* a, const DrawnStage* b) { return a->stage < b->stage; });
      double letters = 0, cost = 0, bytes = 0;
      for (const DrawnStage* stage : stages) {
        letters += static_cast<double>(stage->letters.size());
        cost += stage->cost;
        bytes += stage->bytes;
      }
      most_letters = std::max(most_letters, letters);
      most_stages = std::max(most_stages, static_cast<double>(stages.size()));
      most_cost_ = std::max(most_cost_, cost);
      most_bytes_ = std::max(most_bytes_, bytes);
    }
    for (const double limit : drawing.limits) most_bytes_ = std::max(most_bytes_, limit);
    letter_ = std::clamp(kBlocksWide / most_letters, kNarrowLetter, kWideLetter);
    blocks_ = letter_ * most_letters + most_stages * (kStageGap + 2 * kEndWide);
  }

  std::string write() {
    const double cost_left = kRankLeft + blocks_ + kBarGap, bytes_left = cost_left + kBarWide + 2 * kBarGap;
    const double width = bytes_left + kBarWide + 92, bottom = kHeadTop + drawing_.ranks * kRankHeight,
                 height = bottom + 44;
    print(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" "
        "height=\"{1:.0f}\" font-family=\"Inter, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif\">\n",
        width, height);
    out_ +=
        "<style>.title{font-size:19px;font-weight:600;fill:#12212b}.label{font-size:13px;fill:#33444f}"
        ".note{font-size:11.5px;fill:#5b6b76}.letter{font-size:11px;text-anchor:middle;fill:#ffffff}"
        ".lane{fill:#f1f4f6}.limit{stroke:#b3261e;stroke-width:1.6}</style>\n";
    print("<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n");
    print("<text class=\"title\" x=\"16\" y=\"28\">{}</text>\n", escape_xml(drawing_.title));
    print("<text class=\"label\" x=\"16\" y=\"48\">{}</text>\n", escape_xml(drawing_.summary));
    print("<text class=\"note\" x=\"{:.1f}\" y=\"{:.1f}\">cost of the rank's stages</text>\n", cost_left,
          kHeadTop - 10);
    if (most_bytes_ > 0)
      print("<text class=\"note\" x=\"{:.1f}\" y=\"{:.1f}\">memory{}</text>\n", bytes_left, kHeadTop - 10,
            drawing_.limits.empty() ? "" : ", with its limit");
    for (int rank = 0; rank < drawing_.ranks; ++rank) {
      const double y = kHeadTop + rank * kRankHeight;
      row(rank, y);
      bar(rank, cost_left, y, &DrawnStage::cost, most_cost_, false);
      if (most_bytes_ > 0) bar(rank, bytes_left, y, &DrawnStage::bytes, most_bytes_, true);
    }
    legend(bottom + 20);
    out_ += "</svg>\n";
    return std::move(out_);
  }

 private:
  template <class... Values>
  void print(fmt::format_string<Values...> text, Values&&... values) {
    fmt::format_to(std::back_inserter(out_), text, std::forward<Values>(values)...);
  }

  void row(int rank, double y) {
    print("<text class=\"label\" text-anchor=\"end\" x=\"{:.1f}\" y=\"{:.1f}\">rank {}</text>\n",
          kRankLeft - 12, y + kBoxHeight / 2 + 4.5, rank);
    double x = kRankLeft;
    for (const DrawnStage* stage : of_rank_[static_cast<std::size_t>(rank)]) {
      print("<g><title>{}</title>", escape_xml(stage->hover));
      print("<text class=\"note\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", x, y - 2, stage->stage);
      if (stage->has_first) box(x, y, kEndWide, kEndColour, "");
      if (stage->has_first) x += kEndWide;
      for (const char letter : stage->letters) {
        box(x, y, letter_, colour_of_letter(letter), std::string(letter_ >= kReadableLetter ? 1 : 0, letter));
        x += letter_;
      }
      if (stage->has_last) box(x, y, kEndWide, kEndColour, "");
      if (stage->has_last) x += kEndWide;
      x += kStageGap;
      out_ += "</g>\n";
    }
  }

  void box(double x, double y, double width, const std::string& colour, const std::string& text) {
    print("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\"/>", x, y + 2,
          std::max(0.5, width - (width > 4 ? 1 : 0)), kBoxHeight - 4, colour);
    if (!text.empty())
      print("<text class=\"letter\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", x + (width - 1) / 2,
            y + kBoxHeight / 2 + 4, text);
  }

  void bar(int rank, double left, double y, double DrawnStage::*value, double most, bool in_bytes) {
    print("<rect class=\"lane\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{}\" height=\"16\" rx=\"2\"/>", left, y + 7,
          kBarWide);
    double x = left, all = 0;
    const auto& stages = of_rank_[static_cast<std::size_t>(rank)];
    for (std::size_t i = 0; i < stages.size(); ++i) {
      const double wide = most > 0 ? stages[i]->*value / most * kBarWide : 0;
      print("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"16\" fill=\"{}\"/>", x, y + 7,
            std::max(0.0, wide - 0.6), i % 2 == 0 ? "#5a7fa8" : "#8fb0cf");
      x += wide;
      all += stages[i]->*value;
    }
    if (in_bytes && !drawing_.limits.empty()) {
      const double at = left + drawing_.limits[static_cast<std::size_t>(rank)] / most * kBarWide;
      print("<line class=\"limit\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\"/>", at, y + 3,
            y + 27);
    }
    print("<text class=\"note\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", left + kBarWide + 8, y + 19,
          in_bytes ? format_bytes(static_cast<std::uint64_t>(all))
                   : fmt::format("{:.0f} %", most > 0 ? 100 * all / most : 0));
  }

  void legend(double y) {
    std::set<char> used;
    for (const DrawnStage& stage : drawing_.stages) used.insert(stage.letters.begin(), stage.letters.end());
    double x = kRankLeft;
    const auto entry = [&](const std::string& colour, const std::string& words) {
      print("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"14\" height=\"14\" rx=\"2\" fill=\"{}\"/>", x, y,
            colour);
      print("<text class=\"note\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", x + 20, y + 11, words);
      x += 38 + 6.2 * static_cast<double>(words.size());
    };
    for (const LetterStyle& style : kLetterStyles)
      if (used.contains(style.letter)) entry(style.colour, style.name);
    entry(kEndColour, "embedding, head");
  }

  const PartitionDrawing& drawing_;
  std::vector<std::vector<const DrawnStage*>> of_rank_;
  double most_cost_ = 0, most_bytes_ = 0, letter_ = kWideLetter, blocks_ = 0;
  std::string out_;
};

}  // namespace

std::string draw_partition(const PartitionDrawing& drawing) { return PartitionWriter(drawing).write(); }

}  // namespace penstock::plan
