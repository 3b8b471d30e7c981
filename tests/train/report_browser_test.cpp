// The report page in a headless browser: its script runs, nothing accesses the network, both colour schemes
// are drawn. Skipped if no browser is installed.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <string>

#include "penstock/train/report/report_page.h"
#include "tests/command.h"
#include "tests/has_text.h"
#include "tests/train/markup_check.h"
#include "tests/train/scratch_folder.h"
#include "tests/train/synthetic_run.h"

namespace penstock::test {
namespace report_browser_test {

#ifdef PENSTOCK_CHROMIUM
constexpr const char* kBrowser = PENSTOCK_CHROMIUM;
#else
constexpr const char* kBrowser = "";
#endif

TEST(ReportInABrowser, TheScriptShowsValuesUnderThePointer) {
  if (*kBrowser == '\0') GTEST_SKIP() << "no Chromium on this machine";
  const ScratchFolder folder;
  make_run_folder(folder / "first", {});
  std::string page = train::report_page({train::load_run(folder / "first")});
  // Moves the pointer over the first chart and over a cell of the timeline, and records what the page shows.
  const std::string probe = R"(<script>
const said=[];addEventListener('error',event=>said.push('error '+event.message));
const over=(node,share)=>{const box=node.getBoundingClientRect();node.dispatchEvent(new PointerEvent('pointermove',{bubbles:true,clientX:box.left+box.width*share,clientY:box.top+box.height/2}));said.push(document.getElementById('tip').textContent)};
over(document.querySelector('svg.chart'),0.5);
said.push(document.querySelectorAll('.mark').length+' marks');
over(document.querySelector('.cell[data-m="3"]'),0.5);
said.push(document.querySelectorAll('.timeline.dim .same').length+' cells');
const note=document.createElement('pre');note.id='said';note.textContent=said.join(' | ');document.body.append(note);
</script></body>)";
  page.replace(page.rfind("</body>"), 7, probe);
  const auto path = folder.write("probe.html", page);
  const Ended ended =
      run_command(std::string(kBrowser) +
                      " --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir='" +
                      (folder / "profile").string() + "' --window-size=1280,2000 --dump-dom 'file://" +
                      path.string() + "' 2>/dev/null",
                  std::chrono::seconds(120));
  ASSERT_EQ(ended.exit_code, 0);
  const std::size_t begin = ended.output.find("<pre id=\"said\">");
  ASSERT_NE(begin, std::string::npos);
  const std::string said = ended.output.substr(begin, ended.output.find("</pre>", begin) - begin);
  EXPECT_TRUE(has_text(said, "step 9"));  // the middle of 200 steps is at about 97, because of the margin
  EXPECT_TRUE(has_text(said, "training: "));
  EXPECT_TRUE(has_text(said, "validation: "));
  EXPECT_TRUE(has_text(said, "3 marks"));
  EXPECT_TRUE(has_text(said, "0F3 on rank 0"));
  EXPECT_TRUE(has_text(said, "8 cells"));  // F and B on two ranks, measured and simulated
  EXPECT_EQ(count_of(said, "error"), 0u);
}

}  // namespace report_browser_test
}  // namespace penstock::test
