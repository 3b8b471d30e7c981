#include "penstock/train/report/report_page.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <string_view>
#include <system_error>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/base/markup.h"
#include "penstock/base/text.h"
#include "penstock/draw.h"
#include "penstock/errors.h"
#include "penstock/plan/draw/drawing.h"
#include "penstock/train/report/progress.h"
#include "penstock/train/report/report_chart.h"
#include "penstock/train/report/report_style.h"
#include "penstock/train/report/report_timeline.h"

namespace penstock::train {

namespace {

using Look = ChartSeries::Look;

std::string date_text(double unix_seconds) {
  if (!std::isfinite(unix_seconds) || unix_seconds < 0 || unix_seconds > 1e11) return "at an unknown time";
  const auto time = static_cast<std::time_t>(unix_seconds);
  std::tm parts{};
  ::gmtime_r(&time, &parts);
  return fmt::format("{:%Y-%m-%d %H:%M} UTC", parts);
}

std::string count_text(double count) {
  if (count >= 1e9) return fmt::format("{:.2f} G", count / 1e9);
  if (count >= 1e6) return fmt::format("{:.2f} M", count / 1e6);
  if (count >= 1e4) return fmt::format("{:.1f} k", count / 1e3);
  return fmt::format("{:.0f}", count);
}

std::string flops_text(double flops) {
  return flops >= 1e12 ? fmt::format("{:.3g} TFLOP/s", flops / 1e12)
                       : fmt::format("{:.3g} GFLOP/s", flops / 1e9);
}

std::string percent(double share) { return fmt::format("{:.1f} %", 100 * share); }

std::string bytes_text(std::int64_t bytes) {
  return format_bytes(static_cast<std::uint64_t>(std::max<std::int64_t>(bytes, 0)));
}

// A part of a bar, labelled with its share of the step if there is room.
std::string bar_part(std::string_view look, std::string_view name, double ms, double of_ms,
                     double whole_bar_ms) {
  if (!(ms > 0 && of_ms > 0 && whole_bar_ms > 0)) return {};
  const double width = ms / whole_bar_ms;
  const std::string share = percent(ms / of_ms);
  return fmt::format("<div class=\"{}\" style=\"width:{:.3f}%\" title=\"{} {:.2f} ms, {}\">{}</div>", look,
                     100 * width, name, ms, share, width > 0.09 ? share : "");
}

class PageWriter {
 public:
  explicit PageWriter(const std::vector<RunReport>& runs) : runs_(runs), one_(runs.size() == 1) {
    for (const RunReport& run : runs) {
      const bool alone = std::count_if(runs.begin(), runs.end(),
                                       [&](const RunReport& other) { return other.name == run.name; }) == 1;
      names_.push_back(alone ? run.name : run.folder.string());
    }
  }

  std::string write() {
    const std::string title = one_ ? fmt::format("Training run {}", runs_[0].name)
                                   : fmt::format("{} training runs compared", runs_.size());
    out_ +=
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
        "content=\"width=device-width,initial-scale=1\">\n";
    print("<title>{}</title>\n", escape_xml(title));
    out_ += kReportStyle;
    out_ += "</head><body><main>\n";
    if (one_) {
      heading(runs_[0], title);
      tiles(runs_[0]);
    } else {
      print("<h1>{}</h1>\n", escape_xml(title));
      results();
      differences();
    }
    for (const RunReport& run : runs_) notes(run);
    losses();
    auxiliary_losses();
    rates();
    speed();
    for (const RunReport& run : runs_) compilation(run);
    for (const RunReport& run : runs_) pipeline_step(run);
    memory();
    for (const RunReport& run : runs_) partition(run);
    for (const RunReport& run : runs_) checkpoints(run);
    for (const RunReport& run : runs_) configuration(run);
    out_ +=
        "<footer>Written by Penstock from metrics.jsonl and the traces of the run. Traces open in "
        "ui.perfetto.dev.</footer></main><div id=\"tip\"></div>\n";
    out_ += kReportScript;
    out_ += "</body></html>\n";
    return std::move(out_);
  }

 private:
  template <class... Args>
  void print(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<Args>(args)...);
  }

  // " of first" if there are several runs.
  std::string of_run(const RunReport& run) const { return one_ ? "" : " of " + escape_xml(name_of(run)); }
  // The name of the run's folder, or the whole path if two runs have the same name.
  const std::string& name_of(const RunReport& run) const {
    return names_[static_cast<std::size_t>(&run - runs_.data())];
  }

  void heading(const RunReport& run, const std::string& title) {
    const StartMetrics& start = run.start();
    print("<h1>{}<span class=\"state{}\">{}</span></h1>\n", escape_xml(title),
          run.metrics.end && run.metrics.end->end == RunEnd::Finished ? "" : " open",
          run.metrics.end ? to_text(run.metrics.end->end) : "unfinished");
    print(
        "<p class=\"sub\">{} parameters, {} ranks on {}, {} of {} steps, {} tokens processed, {} tokens in "
        "the data, started {}, duration {}, LibTorch {}</p>\n",
        count_text(static_cast<double>(start.parameters)), start.ranks, escape_xml(start.device),
        run.last_step(), start.steps, count_text(static_cast<double>(run.numbers.tokens)),
        count_text(static_cast<double>(start.training_tokens)), date_text(run.metrics.starts.front().time),
        format_duration(run.numbers.seconds), escape_xml(start.libtorch));
  }

  void tile(std::string_view name, const std::string& value, const std::string& more) {
    print("<div class=\"tile\"><span>{}</span><strong>{}</strong><span>{}</span></div>\n", name,
          escape_xml(value), escape_xml(more));
  }

  void tiles(const RunReport& run) {
    const RunNumbers& numbers = run.numbers;
    out_ += "<div class=\"tiles\">\n";
    if (numbers.loss_steps > 0)
      tile("Training loss", fmt::format("{:.4f}", numbers.loss),
           fmt::format("mean of the last {} steps", numbers.loss_steps));
    if (numbers.best_validation)
      tile("Validation loss", fmt::format("{:.4f}", numbers.last_validation->loss),
           fmt::format("best {:.4f} at step {}", numbers.best_validation->loss,
                       numbers.best_validation->step));
    if (numbers.tokens_per_second > 0)
      tile("Speed", format_token_rate(numbers.tokens_per_second),
           fmt::format("{:.1f} ms per step", 1e3 * numbers.times.total));
    if (numbers.mfu > 0)
      tile("MFU", percent(numbers.mfu), fmt::format("of {}, measured", flops_text(run.start().peak_flops)));
    if (const TraceReport* trace = run.trace())
      tile("Bubble", percent(trace->bubble), fmt::format("simulated {}", percent(trace->simulated_bubble)));
    if (numbers.times.total > 0)
      tile("Outside the schedule", percent(numbers.outside_schedule), "of a step: data, sync, update");
    if (numbers.peak_resident_bytes > 0)
      tile(
          "Memory",
          bytes_text(numbers.peak_device_bytes > 0 ? numbers.peak_device_bytes : numbers.peak_resident_bytes),
          numbers.peak_device_bytes > 0 ? "peak on the device of rank 0" : "peak in the process of rank 0");
    if (!run.metrics.checkpoints.empty())
      tile("Checkpoint stall", fmt::format("{:.0f} ms", 1e3 * numbers.longest_stall),
           fmt::format("longest of {}", run.metrics.checkpoints.size()));
    out_ += "</div>\n";
  }

  void notes(const RunReport& run) {
    if (run.notes.empty()) return;
    print("<section class=\"notes\"><h2>Notes{}</h2><ul>", of_run(run));
    for (const std::string& note : run.notes) print("<li>{}</li>", escape_xml(note));
    out_ += "</ul></section>\n";
  }

  // A table of results with a column for each run.
  void results() {
    out_ += "<section><h2>Results</h2><div class=\"wide\"><table><thead><tr><th></th>";
    for (std::size_t i = 0; i < runs_.size(); ++i)
      print("<th class=\"n\"><span class=\"swatch c{0}\" style=\"background:currentColor\"></span> {1}</th>",
            i % 8 + 1, escape_xml(names_[i]));
    out_ += "</tr></thead><tbody>\n";
    const auto row = [&](std::string_view name, const std::function<std::string(const RunReport&)>& value) {
      print("<tr><td>{}</td>", name);
      for (const RunReport& run : runs_) {
        const std::string text = value(run);
        print("<td class=\"n\">{}</td>", text.empty() ? "unknown" : escape_xml(text));
      }
      out_ += "</tr>\n";
    };
    row("folder", [](const RunReport& run) { return run.folder.string(); });
    row("end", [](const RunReport& run) {
      return run.metrics.end ? std::string(to_text(run.metrics.end->end)) : "unfinished";
    });
    row("steps",
        [](const RunReport& run) { return fmt::format("{} of {}", run.last_step(), run.start().steps); });
    row("training loss", [](const RunReport& run) {
      return run.numbers.loss_steps > 0 ? fmt::format("{:.4f}", run.numbers.loss) : "";
    });
    row("validation loss", [](const RunReport& run) {
      return run.numbers.last_validation ? fmt::format("{:.4f}", run.numbers.last_validation->loss) : "";
    });
    row("best validation loss", [](const RunReport& run) {
      return run.numbers.best_validation ? fmt::format("{:.4f} (step {})", run.numbers.best_validation->loss,
                                                       run.numbers.best_validation->step)
                                         : "";
    });
    row("speed", [](const RunReport& run) {
      return run.numbers.tokens_per_second > 0 ? format_token_rate(run.numbers.tokens_per_second) : "";
    });
    row("speed relative to the first", [&](const RunReport& run) {
      return runs_[0].numbers.tokens_per_second > 0 && run.numbers.tokens_per_second > 0
                 ? fmt::format("{:.2f} x", run.numbers.tokens_per_second / runs_[0].numbers.tokens_per_second)
                 : "";
    });
    row("time per step", [](const RunReport& run) {
      return run.numbers.times.total > 0 ? fmt::format("{:.1f} ms", 1e3 * run.numbers.times.total) : "";
    });
    row("outside the schedule", [](const RunReport& run) {
      return run.numbers.times.total > 0 ? percent(run.numbers.outside_schedule) : "";
    });
    row("MFU", [](const RunReport& run) { return run.numbers.mfu > 0 ? percent(run.numbers.mfu) : ""; });
    row("bubble", [](const RunReport& run) { return run.trace() ? percent(run.trace()->bubble) : ""; });
    row("bubble, simulated",
        [](const RunReport& run) { return run.trace() ? percent(run.trace()->simulated_bubble) : ""; });
    row("memory of rank 0", [](const RunReport& run) {
      return run.numbers.peak_resident_bytes > 0 ? bytes_text(run.numbers.peak_resident_bytes) : "";
    });
    row("longest checkpoint stall", [](const RunReport& run) {
      return run.metrics.checkpoints.empty() ? "" : fmt::format("{:.0f} ms", 1e3 * run.numbers.longest_stall);
    });
    row("duration", [](const RunReport& run) { return format_duration(run.numbers.seconds); });
    row("ranks",
        [](const RunReport& run) { return fmt::format("{} on {}", run.start().ranks, run.start().device); });
    out_ += "</tbody></table></div></section>\n";
  }

  void differences() {
    std::vector<std::string> names;
    for (const RunReport& run : runs_)
      for (const auto& [name, value] : run.start().config)
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    std::size_t equal = 0;
    std::string rows;
    for (const std::string& name : names) {
      const std::string first = runs_[0].start().value(name);
      if (std::all_of(runs_.begin(), runs_.end(),
                      [&](const RunReport& run) { return run.start().value(name) == first; })) {
        ++equal;
        continue;
      }
      rows += fmt::format("<tr><td><code>{}</code></td>", escape_xml(name));
      for (const RunReport& run : runs_)
        rows += fmt::format("<td class=\"n\"><code>{}</code></td>", escape_xml(run.start().value(name)));
      rows += "</tr>\n";
    }
    out_ += "<section><h2>Differences in configuration</h2>";
    if (!rows.empty()) {
      out_ += "<div class=\"wide\"><table><thead><tr><th></th>";
      for (const RunReport& run : runs_) print("<th class=\"n\">{}</th>", escape_xml(name_of(run)));
      print("</tr></thead><tbody>{}</tbody></table></div>", rows);
    }
    print("<p class=\"none\">{} of {} fields are equal.</p></section>\n", equal, names.size());
  }

  template <class Get>
  ChartSeries of_steps(const RunReport& run, std::string name, int colour, Look look, Get get) const {
    ChartSeries series{.name = std::move(name), .colour = colour, .look = look, .x = {}, .y = {}};
    for (const StepMetrics& step : run.metrics.steps) {
      series.x.push_back(static_cast<double>(step.outcome.step));
      series.y.push_back(get(step));
    }
    return series;
  }
  static ChartSeries of_validations(const RunReport& run, std::string name, int colour) {
    ChartSeries series{.name = std::move(name), .colour = colour, .look = Look::Points, .x = {}, .y = {}};
    for (const ValidationMetrics& validation : run.metrics.validations) {
      series.x.push_back(static_cast<double>(validation.step));
      series.y.push_back(validation.loss);
    }
    return series;
  }

  // Layouts of the same training have the same curves: wider early curves stay visible below later ones.
  double width_of(std::size_t run) const {
    return 2 + 1.5 * static_cast<double>(std::min<std::size_t>(runs_.size() - 1 - run, 3));
  }

  // A curve of each run, or of the single run under its own name.
  template <class Get>
  void chart_of_runs(Chart chart, Get get, const std::string& own_name, bool may_coincide = false) {
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      chart.series.push_back(
          of_steps(runs_[i], one_ ? own_name : names_[i], static_cast<int>(i) + 1, Look::Line, get));
      if (may_coincide) chart.series.back().width = width_of(i);
    }
    out_ += draw_chart(chart);
  }

  void losses() {
    const auto loss = [](const StepMetrics& step) { return step.outcome.loss; };
    Chart chart{.title = "Loss", .series = {}};
    Chart validation{.title = "Validation loss", .series = {}};
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      const int colour = static_cast<int>(i) + 1;
      const std::size_t span = std::clamp<std::size_t>(runs_[i].metrics.steps.size() / 20, 5, 200) |
                               1;  // odd: a middle and its sides
      ChartSeries raw = of_steps(runs_[i], "training", colour, Look::Faint, loss);
      ChartSeries smooth{.name = one_ ? fmt::format("training, smoothed over {} lines", span) : names_[i],
                         .colour = colour,
                         .look = Look::Line,
                         .x = raw.x,
                         .y = smoothed(raw.y, span)};
      smooth.width = width_of(i);
      if (one_) chart.series.push_back(std::move(raw));
      chart.series.push_back(std::move(smooth));
      ChartSeries held_out = of_validations(runs_[i], one_ ? "validation" : names_[i], one_ ? 2 : colour);
      if (!one_)
        validation.series.push_back(std::move(held_out));
      else if (!held_out.x.empty())
        chart.series.push_back(std::move(held_out));
    }
    out_ += "<section><h2>Loss</h2>\n";
    chart.title = one_ ? "Mean loss per token, in nats" : "Training loss, smoothed";
    out_ += draw_chart(chart);
    if (!one_) out_ += draw_chart(validation);
    out_ += "</section>\n";
  }

  // The names of all runs, in the order in which they first occur.
  std::vector<std::string> names_of_auxiliary_losses() const {
    std::vector<std::string> names;
    for (const RunReport& run : runs_)
      for (const LossTerm& term : run.numbers.auxiliary)
        if (std::find(names.begin(), names.end(), term.name) == names.end()) names.push_back(term.name);
    return names;
  }

  static const LossTerm* term_of(const std::vector<LossTerm>& terms, const std::string& name) {
    const auto found =
        std::find_if(terms.begin(), terms.end(), [&](const LossTerm& term) { return term.name == name; });
    return found == terms.end() ? nullptr : &*found;
  }

  // A table of means, and a chart for each name: they differ in size.
  void auxiliary_losses() {
    const std::vector<std::string> names = names_of_auxiliary_losses();
    if (names.empty()) return;
    out_ +=
        "<section><h2>Auxiliary losses</h2>\n<p class=\"sub\">Without their weights. The table has means "
        "over "
        "the steps that the training loss is averaged over.</p>";
    out_ += "<div class=\"wide\"><table><thead><tr><th>loss</th>";
    for (const RunReport& run : runs_)
      print("<th class=\"n\">{0}mean</th><th class=\"n\">{0}weight</th><th class=\"n\">{0}share</th>",
            one_ ? "" : escape_xml(name_of(run)) + " ");
    out_ += "</tr></thead><tbody>";
    for (const std::string& name : names) {
      print("<tr><td>{}</td>", escape_xml(name));
      for (const RunReport& run : runs_) {
        const LossTerm* term = term_of(run.numbers.auxiliary, name);
        if (term == nullptr) {
          out_ += "<td class=\"n\">none</td><td class=\"n\"></td><td class=\"n\"></td>";
          continue;
        }
        double whole = run.numbers.loss;
        for (const LossTerm& each : run.numbers.auxiliary) whole += each.weight * each.value;
        print("<td class=\"n\">{:.4g}</td><td class=\"n\">{:g}</td><td class=\"n\">{}</td>", term->value,
              term->weight, whole > 0 ? percent(term->weight * term->value / whole) : "unknown");
      }
      out_ += "</tr>";
    }
    out_ += "</tbody></table></div><div class=\"two\" style=\"margin-top:16px\">\n";
    for (const std::string& name : names)
      chart_of_runs(
          {.title = name, .wide = false, .series = {}},
          [&](const StepMetrics& step) {
            const LossTerm* term = term_of(step.outcome.auxiliary, name);
            return term != nullptr ? term->value : std::numeric_limits<double>::quiet_NaN();
          },
          name, true);
    out_ += "</div></section>\n";
  }

  // Of rank 0; the numbers of other ranks are in the first line.
  void compilation(const RunReport& run) {
    std::int64_t first = 0, again = 0, loaded = 0;
    double seconds = 0;
    for (const StepMetrics& step : run.metrics.steps) {
      first += step.outcome.first_captures;
      again += step.outcome.recaptures;
      loaded += step.outcome.loads;
      for (const CompiledForward& forward : step.outcome.compiled) seconds += forward.seconds;
    }
    if (first + again + loaded == 0) return;
    print(
        "<section><h2>Graphs{}</h2>\n<p class=\"sub\">{} captured on all ranks, {} of them again; {} loaded; "
        "{:.2f} s on rank 0, in these steps.</p>",
        one_ ? "" : " of " + escape_xml(name_of(run)), first + again, again, loaded, seconds);
    out_ +=
        "<div class=\"wide\"><table><thead><tr><th class=\"n\">step</th><th class=\"n\">stage</th>"
        "<th class=\"n\">graph</th><th>from</th><th class=\"n\">operators</th><th class=\"n\">of them in "
        "W</th>"
        "<th class=\"n\">seconds</th>"
        "<th>why again</th>"
        "</tr></thead><tbody>";
    for (const StepMetrics& step : run.metrics.steps)
      for (const CompiledForward& forward : step.outcome.compiled)
        print(
            "<tr><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td>{}</td><td "
            "class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{:.2f}</td><td>{}</td></tr>",
            step.outcome.step, forward.stage, forward.graph, escape_xml(forward.source), forward.nodes,
            forward.deferred, forward.seconds, escape_xml(forward.reason));
    out_ += "</tbody></table></div></section>\n";
  }

  void rates() {
    out_ += "<section><h2>Optimization</h2><div class=\"two\">\n";
    chart_of_runs(
        {.title = "Learning rate", .from_zero = true, .wide = false, .series = {}},
        [](const StepMetrics& step) { return step.outcome.lr; }, "learning rate", true);
    chart_of_runs(
        {.title = "Gradient norm before clipping", .logarithmic = true, .wide = false, .series = {}},
        [](const StepMetrics& step) { return step.outcome.grad_norm; }, "gradient norm", true);
    out_ += "</div></section>\n";
  }

  void speed() {
    out_ += "<section><h2>Time breakdown of a step</h2>\n";
    out_ += "<p class=\"sub\">Means over all steps but the first five, on rank 0.</p>";
    out_ +=
        "<div class=\"legend\"><span><b class=\"p1\"></b>schedule: forward and backward</span><span><b "
        "class=\"p2\"></b>data</span><span><b class=\"p4\"></b>gradient synchronization</span><span><b "
        "class=\"p5\"></b>update</span><span><b class=\"lane\"></b>rest</span></div><div class=\"bars\">";
    double longest = 0;
    for (const RunReport& run : runs_) longest = std::max(longest, run.numbers.times.total);
    for (const RunReport& run : runs_) {
      const StepTimes& times = run.numbers.times;
      print("<span>{}{:.1f} ms</span><div class=\"stack\">", one_ ? "" : escape_xml(name_of(run)) + " ",
            1e3 * times.total);
      const auto part = [&](std::string_view look, std::string_view name, double value) {
        out_ += bar_part(look, name, 1e3 * value, 1e3 * times.total, 1e3 * longest);
      };
      part("p1", "schedule", times.schedule);
      part("p2", "data", times.data);
      part("p4", "sync", times.sync);
      part("p5", "update", times.update);
      out_ += "</div>";
    }
    out_ +=
        "</div><div class=\"wide\"><table><thead><tr><th>run</th><th class=\"n\">step</th><th "
        "class=\"n\">schedule</th><th class=\"n\">data</th><th class=\"n\">sync</th><th "
        "class=\"n\">update</th><th class=\"n\">outside the schedule</th></tr></thead><tbody>";
    for (const RunReport& run : runs_) {
      const StepTimes& times = run.numbers.times;
      print(
          "<tr><td>{}</td><td class=\"n\">{:.2f} ms</td><td class=\"n\">{:.2f} ms</td><td class=\"n\">{:.2f} "
          "ms</td><td class=\"n\">{:.2f} ms</td><td class=\"n\">{:.2f} ms</td><td class=\"n\">{}</td></tr>",
          escape_xml(name_of(run)), 1e3 * times.total, 1e3 * times.schedule, 1e3 * times.data,
          1e3 * times.sync, 1e3 * times.update, percent(run.numbers.outside_schedule));
    }
    out_ += "</tbody></table></div><div class=\"two\" style=\"margin-top:16px\">\n";
    chart_of_runs(
        {.title = "Tokens per second",
         .unit = ChartUnit::TokensPerSecond,
         .from_zero = true,
         .wide = false,
         .series = {}},
        [](const StepMetrics& step) { return step.tokens_per_second; }, "tokens per second");
    chart_of_runs(
        {.title = "Time per step, ms",
         .unit = ChartUnit::Milliseconds,
         .from_zero = true,
         .wide = false,
         .series = {}},
        [](const StepMetrics& step) { return 1e3 * step.outcome.times.total; }, "step");
    out_ += "</div></section>\n";
  }

  void pipeline_step(const RunReport& run) {
    print("<section><h2>Pipeline step{}</h2>\n", of_run(run));
    if (run.traces.empty()) {
      out_ += "<p class=\"none\">There is no step trace: no timeline and no times per rank.</p></section>\n";
      return;
    }
    const TraceReport& trace = *run.trace();
    const TraceComparison& comparison = trace.comparison;
    print(
        "<p class=\"sub\">Step {}, {}: measured {:.1f} ms, simulated {:.1f} ms under the median cost of each "
        "action. Bubble {}, simulated {}.</p>\n",
        trace.step, plan_words(trace), comparison.measured_ms, comparison.simulated_ms, percent(trace.bubble),
        percent(trace.simulated_bubble));
    out_ += "<h3>Timeline of the ranks, measured above simulated</h3>\n";
    out_ += draw_timeline(trace);
    out_ +=
        "<h3>Time of each rank, measured above simulated</h3>\n<div class=\"legend\"><span><b "
        "class=\"p1\"></b>compute</span><span><b class=\"p2\"></b>communication</span><span><b "
        "class=\"p3\"></b>wait</span><span><b class=\"lane\"></b>idle or overhead</span></div><div "
        "class=\"bars\">";
    const double longest = std::max({comparison.measured_ms, comparison.simulated_ms, 1e-9});
    for (std::size_t rank = 0; rank < trace.ranks.size(); ++rank) {
      const RankTimes& times = trace.ranks[rank];
      print("<span>rank {}</span><div><div class=\"stack\" style=\"width:{:.2f}%\">", rank,
            100 * comparison.measured_ms / longest);
      const auto part = [&](std::string_view look, std::string_view name, double value) {
        out_ += bar_part(look, name, value, comparison.measured_ms, comparison.measured_ms);
      };
      part("p1", "compute", times.compute);
      part("p2", "communication", times.communication);
      part("p3", "wait", times.wait);
      print(
          "</div><div class=\"stack thin simulated\" style=\"width:{:.2f}%\"><div class=\"p1\" "
          "style=\"width:{:.3f}%\" title=\"simulated compute {:.2f} ms\"></div></div></div>",
          100 * comparison.simulated_ms / longest,
          comparison.simulated_ms > 0 ? 100 * times.simulated_compute / comparison.simulated_ms : 0,
          times.simulated_compute);
    }
    out_ +=
        "</div><div class=\"wide\"><table><thead><tr><th>rank</th><th class=\"n\">compute</th><th "
        "class=\"n\">communication</th><th class=\"n\">wait</th><th class=\"n\">idle or overhead</th><th "
        "class=\"n\">bubble</th><th class=\"n\">simulated compute</th><th class=\"n\">simulated "
        "bubble</th></tr></thead><tbody>";
    for (std::size_t rank = 0; rank < trace.ranks.size(); ++rank) {
      const RankTimes& times = trace.ranks[rank];
      print(
          "<tr><td>{}</td><td class=\"n\">{:.2f} ms</td><td class=\"n\">{:.2f} ms</td><td class=\"n\">{:.2f} "
          "ms</td><td class=\"n\">{:.2f} ms</td><td class=\"n\">{}</td><td class=\"n\">{:.2f} ms</td><td "
          "class=\"n\">{}</td></tr>",
          rank, times.compute, times.communication, times.wait, times.rest,
          percent(comparison.measured_ms > 0 ? 1 - times.compute / comparison.measured_ms : 0),
          times.simulated_compute,
          percent(comparison.simulated_ms > 0 ? 1 - times.simulated_compute / comparison.simulated_ms : 0));
    }
    out_ += "</tbody></table></div>";
    if (run.traces.size() > 1) {
      out_ +=
          "<h3>All traced steps</h3><div class=\"wide\"><table><thead><tr><th>step</th><th "
          "class=\"n\">measured</th><th class=\"n\">simulated</th><th class=\"n\">bubble</th><th "
          "class=\"n\">simulated bubble</th><th>file</th></tr></thead><tbody>";
      for (const TraceReport& each : run.traces)
        print(
            "<tr><td>{}</td><td class=\"n\">{:.2f} ms</td><td class=\"n\">{:.2f} ms</td><td "
            "class=\"n\">{}</td><td class=\"n\">{}</td><td><code>{}</code></td></tr>",
            each.step, each.comparison.measured_ms, each.comparison.simulated_ms, percent(each.bubble),
            percent(each.simulated_bubble), escape_xml(each.path));
      out_ += "</tbody></table></div>";
    }
    out_ += "</section>\n";
  }

  static std::string plan_words(const TraceReport& trace) { return plan::shape_words(trace.trace.schedule); }

  void memory() {
    out_ += "<section><h2>Memory</h2>\n";
    bool device = false;
    for (const RunReport& run : runs_) device = device || run.numbers.peak_device_bytes > 0;
    if (device) out_ += "<div class=\"two\">";
    chart_of_runs(
        {.title = "Main memory of the process of rank 0",
         .unit = ChartUnit::Bytes,
         .from_zero = true,
         .wide = !device,
         .low = !device,
         .series = {}},
        [](const StepMetrics& step) { return static_cast<double>(step.resident_bytes); }, "resident");
    if (device) {
      chart_of_runs(
          {.title = "Peak on the device of rank 0",
           .unit = ChartUnit::Bytes,
           .from_zero = true,
           .wide = false,
           .series = {}},
          [](const StepMetrics& step) { return static_cast<double>(step.device_bytes); }, "device");
      out_ += "</div>";
    }
    out_ += "</section>\n";
  }

  // "stage 0: embed, blocks 0-1, 0.605 M parameters", with the times of the stage in the traced step.
  void partition(const RunReport& run) {
    print("<section><h2>Partition{}</h2>\n", of_run(run));
    const std::vector<std::string>& lines = run.start().partition;
    if (lines.empty()) {
      out_ += "<p class=\"none\">The run did not record the partition of the model.</p></section>\n";
      return;
    }
    const TraceReport* trace = run.trace();
    out_ += "<div class=\"wide\"><table><thead><tr><th>stage</th><th>contents</th>";
    if (trace != nullptr) out_ += "<th class=\"n\">rank</th><th>median times in the traced step</th>";
    out_ += "</tr></thead><tbody>";
    for (std::size_t stage = 0; stage < lines.size(); ++stage) {
      const std::size_t colon = lines[stage].find(": ");
      const std::string name =
          colon == std::string::npos ? std::to_string(stage) : lines[stage].substr(0, colon);
      print("<tr><td>{}</td><td>{}</td>", escape_xml(name),
            escape_xml(colon == std::string::npos ? lines[stage] : lines[stage].substr(colon + 2)));
      if (trace != nullptr) {
        std::string costs;
        const schedule::StageMap& map = trace->trace.schedule.stages();
        for (const ActionCost& cost : trace->comparison.costs)
          if (cost.stage == static_cast<int>(stage) && cost.median_ms >= 0.005)
            costs += fmt::format("{}{} {:.2f} ms", costs.empty() ? "" : ", ", schedule::to_text(cost.kind),
                                 cost.median_ms);
        // A bidirectional schedule has a second copy of the stage on another rank.
        std::string ranks;
        for (const schedule::Chain& chain : map.chains())
          if (static_cast<int>(stage) < chain.stages)
            ranks += fmt::format("{}{}", ranks.empty() ? "" : ", ",
                                 map.rank_of(chain.first_stage + static_cast<int>(stage)));
        print("<td class=\"n\">{}</td><td>{}</td>", ranks.empty() ? "?" : ranks, costs);
      }
      out_ += "</tr>";
    }
    out_ += "</tbody></table></div></section>\n";
  }

  void checkpoints(const RunReport& run) {
    print("<section><h2>Checkpoints{}</h2>\n", of_run(run));
    if (run.metrics.checkpoints.empty()) {
      out_ += "<p class=\"none\">No checkpoint was written.</p></section>\n";
      return;
    }
    constexpr std::size_t kMostRows = 100;
    const std::size_t first =
        run.metrics.checkpoints.size() > kMostRows ? run.metrics.checkpoints.size() - kMostRows : 0;
    print("<p class=\"sub\">How long training paused; files are written in the background.{}</p>",
          first > 0
              ? fmt::format(" Only the last {} of {} are shown.", kMostRows, run.metrics.checkpoints.size())
              : "");
    out_ +=
        "<div class=\"wide\"><table><thead><tr><th>step</th><th class=\"n\">total</th><th "
        "class=\"n\">waiting for the previous one</th><th class=\"n\">planning</th><th "
        "class=\"n\">copying</th><th>when</th></tr></thead><tbody>";
    for (std::size_t i = first; i < run.metrics.checkpoints.size(); ++i) {
      const CheckpointMetrics& each = run.metrics.checkpoints[i];
      print(
          "<tr><td>{}</td><td class=\"n\">{:.1f} ms</td><td class=\"n\">{:.1f} ms</td><td class=\"n\">{:.1f} "
          "ms</td><td class=\"n\">{:.1f} ms</td><td>{}</td></tr>",
          each.step, 1e3 * each.stall.total(), 1e3 * each.stall.waiting, 1e3 * each.stall.planning,
          1e3 * each.stall.copying, date_text(each.time));
    }
    out_ += "</tbody></table></div></section>\n";
  }

  void configuration(const RunReport& run) {
    print(
        "<section><h2>Configuration{}</h2><details{}><summary>all {} fields</summary><div class=\"columns\">",
        of_run(run), one_ ? " open" : "", run.start().config.size());
    std::string section;
    for (const auto& [name, value] : run.start().config) {
      const std::size_t dot = name.find('.');
      if (name.substr(0, dot) != section) {
        if (!section.empty()) out_ += "</tbody></table>";
        section = name.substr(0, dot);
        print("<table><thead><tr><th>[{}]</th><th></th></tr></thead><tbody>", escape_xml(section));
      }
      print("<tr><td><code>{}</code></td><td><code>{}</code></td></tr>",
            escape_xml(dot == std::string::npos ? name : name.substr(dot + 1)), escape_xml(value));
    }
    if (!section.empty()) out_ += "</tbody></table>";
    out_ += "</div></details></section>\n";
  }

  const std::vector<RunReport>& runs_;
  bool one_;
  std::vector<std::string> names_;
  std::string out_;
};

}  // namespace

std::string report_page(const std::vector<RunReport>& runs) {
  if (runs.empty())
    throw ValueError(describe("report", "no run", "at least one run", "give the folder of a run"));
  return PageWriter(runs).write();
}

void write_page(const std::filesystem::path& path, const std::string& page) {
  const std::filesystem::path temporary = path.string() + ".tmp";
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  file << page;
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(temporary, path, error);
  if (!file || error) {
    std::error_code ignored;  // the error below is reported instead
    std::filesystem::remove(temporary, ignored);
    throw ConfigError(
        describe("report page", path.string(), "a file that can be written", "give another path with --out"));
  }
}

std::filesystem::path write_report(const std::filesystem::path& folder) {
  const std::vector<RunReport> runs{load_run(folder)};
  const std::filesystem::path path = runs[0].folder / "report.html";
  write_page(path, report_page(runs));
  return path;
}

}  // namespace penstock::train
