// Collects the code that people read (``` cpp blocks of the docs, snippets in the heads of public headers)
// into one source, which the build compiles: documentation that does not compile is an error.
//
//   extract_snippets OUTPUT.cpp ROOT FILE...
//
// Each snippet becomes a namespace of its own. Includes go to the top; types, templates, using declarations
// and functions stay at namespace scope; the other statements become the body of a function. Names that
// snippets presume (`world`, `model`, `x`) are declared in snippet_context.h; what a snippet declares itself
// hides those.
#include <algorithm>
#include <cctype>
#include <fstream>
#include <iostream>
#include <iterator>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

struct Snippet {
  std::string file;
  int line = 0;  // of its first line
  std::vector<std::string> lines;
};

std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream in(path);
  if (!in) {
    std::cerr << path << " cannot be read\n";
    std::exit(2);
  }
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::vector<Snippet> of_markdown(const std::string& file, const std::vector<std::string>& lines) {
  std::vector<Snippet> found;
  bool inside = false;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const std::string& line = lines[i];
    if (!inside && line.starts_with("```cpp")) {
      inside = true;
      found.push_back({file, static_cast<int>(i) + 2, {}});
    } else if (inside && line.starts_with("```")) {
      inside = false;
    } else if (inside) {
      found.back().lines.push_back(line);
    }
  }
  return found;
}

// Lines of the first comment that are indented by three spaces or more. Tables are no code: a snippet ends a
// line with ; { or }.
std::vector<Snippet> of_header(const std::string& file, const std::vector<std::string>& lines) {
  std::vector<Snippet> found;
  bool inside = false;
  for (std::size_t i = 0; i < lines.size() && lines[i].starts_with("//"); ++i) {
    const std::string& line = lines[i];
    if (line.starts_with("//   ")) {
      if (!inside) found.push_back({file, static_cast<int>(i) + 1, {}});
      inside = true;
      found.back().lines.push_back(line.substr(5));
    } else {
      inside = false;
    }
  }
  std::erase_if(found, [](const Snippet& snippet) {
    static const std::regex statement("[;{}] *(//.*)?$");
    return std::none_of(snippet.lines.begin(), snippet.lines.end(),
                        [](const std::string& line) { return std::regex_search(line, statement); });
  });
  return found;
}

int depth_change(const std::string& line) {
  int depth = 0;
  char quote = 0;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quote != 0) {
      if (c == '\\')
        ++i;
      else if (c == quote)
        quote = 0;
    } else if (c == '"' ||
               (c == '\'' && (i == 0 || !std::isalnum(static_cast<unsigned char>(line[i - 1]))))) {
      quote = c;
    } else if (c == '/' && i + 1 < line.size() && line[i + 1] == '/') {
      break;
    } else if (c == '{' || c == '(') {
      ++depth;
    } else if (c == '}' || c == ')') {
      --depth;
    }
  }
  return depth;
}

void write(const Snippet& snippet, int number, std::ostream& out, std::set<std::string>& includes) {
  static const std::regex scope(
      "^(class|struct|enum|template|using|namespace|TORCH_MODULE|static|inline|constexpr|int "
      "main|(void|at::Tensor|torch::Tensor|std::\\w+) \\w+\\()");
  static const std::regex program("^int main\\(");
  std::ostringstream outside, body;
  int depth = 0;
  bool at_scope = false;
  int line = snippet.line;
  const auto mark = [&](std::ostream& to) { to << "#line " << line << " \"" << snippet.file << "\"\n"; };
  mark(outside);
  mark(body);
  for (const std::string& text : snippet.lines) {
    std::smatch include;
    static const std::regex included("^#include .*");
    if (std::regex_match(text, included)) {
      includes.insert(text.substr(0, text.find("  //")));
      outside << "\n";
      body << "\n";
    } else {
      if (depth == 0) at_scope = std::regex_search(text, scope);
      depth += depth_change(text);
      (at_scope ? outside : body) << std::regex_replace(text, program, "int main_of_snippet(") << "\n";
      (at_scope ? body : outside) << "\n";
    }
    ++line;
  }
  out << "\nnamespace snippet_" << number << " {\nusing namespace presumed;\n"
      << outside.str() << "[[maybe_unused]] void run() {\n"
      << body.str() << "}\n}  // namespace\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "extract_snippets OUTPUT.cpp ROOT FILE...\n";
    return 2;
  }
  const std::string root = argv[2];
  std::vector<Snippet> snippets;
  for (int i = 3; i < argc; ++i) {
    const std::string file = argv[i];
    const auto lines = lines_of(root + "/" + file);
    const auto more = file.ends_with(".md") ? of_markdown(file, lines) : of_header(file, lines);
    snippets.insert(snippets.end(), more.begin(), more.end());
  }
  std::set<std::string> includes;
  std::ostringstream text;
  int number = 0;
  for (const Snippet& snippet : snippets) write(snippet, ++number, text, includes);
  std::ofstream out(argv[1]);
  out << "// Made by extract_snippets.\n#include \"tests/house/snippet_context.h\"\n\n";
  for (const std::string& include : includes) out << include << "\n";
  out << text.str();
  out.close();
  if (!out) {
    std::cerr << argv[1] << " cannot be written\n";
    return 1;
  }
  std::cout << number << " snippets\n";
  return number > 0 ? 0 : 1;
}
