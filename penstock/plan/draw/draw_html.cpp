#include "penstock/draw.h"
#include "penstock/plan/draw/drawing.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "penstock/base/markup.h"
#include "penstock/base/text.h"

namespace penstock::plan {

namespace {

constexpr std::string_view kHead =
    R"(<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<style>
body{margin:0;font:14px/1.45 Inter,'Segoe UI','Helvetica Neue',Arial,sans-serif;color:#12212b;background:#f6f8f9}
main{max-width:1500px;margin:0 auto;padding:20px 24px 48px}
section{background:#fff;border:1px solid #dde4e8;border-radius:8px;padding:12px 16px;margin-top:16px}
h1{font-size:22px;margin:0}h2{font-size:15px;margin:4px 0 10px}
.sub{color:#5b6b76;margin:2px 0 0}
.bar{display:flex;gap:14px;align-items:center;color:#5b6b76;margin-bottom:8px;flex-wrap:wrap}
.scroll{overflow-x:auto}.scroll svg{display:block;height:auto}
.cell{cursor:default}.dim .cell{opacity:.22}.dim .cell.same{opacity:1}
#tip{position:fixed;display:none;white-space:pre-line;background:#12212b;color:#fff;padding:7px 10px;border-radius:6px;font-size:12.5px;pointer-events:none;max-width:420px;z-index:9}
table{border-collapse:collapse}td,th{padding:3px 16px 3px 0;text-align:right;font-variant-numeric:tabular-nums}th{color:#5b6b76;font-weight:500;border-bottom:1px solid #dde4e8}
.curves{display:grid;grid-template-columns:repeat(auto-fill,minmax(320px,1fr));gap:14px}
.curves svg{width:100%;height:96px;background:#f6f8f9;border-radius:4px}.curves p{margin:0 0 4px;color:#33444f}
</style>
)";

// Shows data-tip beside the pointer and dims the cells of other microbatches.
constexpr std::string_view kScript = R"(<script>
const tip=document.getElementById('tip'),view=document.getElementById('view'),picture=view.querySelector('svg'),natural=picture.viewBox.baseVal.width;
const zoom=document.getElementById('zoom'),follow=document.getElementById('follow');
const fit=()=>{picture.setAttribute('width',Math.max(600,Math.min(natural,view.clientWidth)*zoom.value));picture.removeAttribute('height')};
zoom.oninput=fit;addEventListener('resize',fit);fit();
const cells=[...picture.querySelectorAll('.cell')];
view.addEventListener('mousemove',event=>{
  const cell=event.target.closest('.cell');
  if(!cell){tip.style.display='none';picture.classList.remove('dim');return}
  tip.textContent=cell.dataset.tip;tip.style.display='block';
  tip.style.left=Math.min(event.clientX+14,innerWidth-tip.offsetWidth-8)+'px';
  tip.style.top=Math.min(event.clientY+16,innerHeight-tip.offsetHeight-8)+'px';
  const on=follow.checked&&cell.dataset.m!=='-1';picture.classList.toggle('dim',on);
  if(on&&picture.dataset.shown!==cell.dataset.m){picture.dataset.shown=cell.dataset.m;for(const other of cells)other.classList.toggle('same',other.dataset.m===cell.dataset.m)}
});
view.addEventListener('mouseleave',()=>{tip.style.display='none';picture.classList.remove('dim')});
</script>
)";

// One rank's curve as steps: bytes if there are any, otherwise activations in flight.
std::string memory_curve(const Drawing& drawing, std::size_t rank, bool bytes) {
  constexpr double kWidth = 600;
  constexpr double kHeight = 96;
  const auto& curve = drawing.simulation.memory_curve[rank];
  const auto value = [&](const MemoryPoint& point) {
    return bytes ? static_cast<double>(point.bytes) : static_cast<double>(point.activations);
  };
  const double most = std::max(1.0, bytes ? static_cast<double>(drawing.simulation.peak_bytes())
                                          : static_cast<double>(drawing.simulation.peak_activations()));
  const double time = std::max(drawing.simulation.time, 1e-12);
  std::string path;
  double level = kHeight;
  for (const MemoryPoint& point : curve) {
    const double x = kWidth * point.time / time;
    const double y = kHeight - (kHeight - 6) * value(point) / most;
    fmt::format_to(std::back_inserter(path), "{}{:.1f} {:.1f}L{:.1f} {:.1f}", path.empty() ? "M" : "L", x,
                   level, x, y);
    level = y;
  }
  fmt::format_to(std::back_inserter(path), "L{} {:.1f}L{} {}L0 {}Z", kWidth, level, kWidth, kHeight, kHeight);
  return fmt::format(
      "<svg viewBox=\"0 0 {} {}\" preserveAspectRatio=\"none\"><path d=\"{}\" fill=\"#2f6fc4\" "
      "fill-opacity=\".25\" "
      "stroke=\"#2f6fc4\" vector-effect=\"non-scaling-stroke\"/></svg>",
      kWidth, kHeight, path);
}

}  // namespace

std::string draw_html(const Drawing& drawing) {
  const Simulation& simulation = drawing.simulation;
  std::string page = "<!doctype html>\n<html lang=\"en\"><head>\n";
  page += kHead;
  const auto out = std::back_inserter(page);
  fmt::format_to(out, "<title>{0}</title></head><body><main>\n<h1>{0}</h1><p class=\"sub\">{1}; {2}</p>\n",
                 escape_xml(drawing.title), shape_words(drawing.schedule), totals_words(simulation));
  page +=
      "<section><div class=\"bar\"><label>zoom <input id=\"zoom\" type=\"range\" min=\"1\" max=\"8\" "
      "step=\"0.25\" value=\"1\"></label>"
      "<label><input id=\"follow\" type=\"checkbox\" checked> follow the microbatch under the "
      "pointer</label></div>\n"
      "<div class=\"scroll\" id=\"view\">\n";
  page += draw_svg(drawing, {.titles = false, .heading = false});
  page += "</div></section>\n";

  const bool bytes = simulation.peak_bytes() > 0;
  if (!simulation.memory_curve.empty()) {
    fmt::format_to(out, "<section><h2>{} over time</h2><div class=\"curves\">\n",
                   bytes ? "Memory" : "Activations in flight");
    for (std::size_t rank = 0; rank < simulation.ranks.size(); ++rank) {
      const RankSummary& summary = simulation.ranks[rank];
      const std::string peak = bytes ? format_bytes(static_cast<std::uint64_t>(summary.peak_bytes))
                                     : fmt::format("{}", summary.peak_activations);
      fmt::format_to(out, "<div><p>rank {}: at most {}</p>{}</div>\n", rank, peak,
                     memory_curve(drawing, rank, bytes));
    }
    page += "</div></section>\n";
  }
  page +=
      "<section><h2>Ranks</h2><div "
      "class=\"scroll\"><table><tr><th>rank</th><th>busy</th><th>idle</th><th>first start</th><th>last "
      "end</th>"
      "<th>activations</th><th>memory</th></tr>\n";
  for (std::size_t rank = 0; rank < simulation.ranks.size(); ++rank) {
    const RankSummary& summary = simulation.ranks[rank];
    fmt::format_to(out,
                   "<tr><td>{}</td><td>{:.6g}</td><td>{:.6g}</td><td>{:.6g}</td><td>{:.6g}</td><td>{}</"
                   "td><td>{}</td></tr>\n",
                   rank, summary.busy, summary.idle, summary.first, summary.last, summary.peak_activations,
                   format_bytes(static_cast<std::uint64_t>(summary.peak_bytes)));
  }
  page += "</table></div></section>\n</main><div id=\"tip\"></div>\n";
  page += kScript;
  page += "</body></html>\n";
  return page;
}

}  // namespace penstock::plan
