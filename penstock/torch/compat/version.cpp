#include "penstock/torch/compat/version.h"

#include <ATen/Version.h>
#include <dlfcn.h>

#include <fstream>
#include <set>
#include <sstream>

namespace penstock {

std::string torch_version() { return TORCH_VERSION; }

std::string blas_description() {
  // OpenBLAS and MKL report their names; the reference BLAS does not and can only be recognized by its file
  // name.
  if (auto* config = reinterpret_cast<char* (*)()>(dlsym(RTLD_DEFAULT, "openblas_get_config")))
    return config();
  std::istringstream lines(at::show_config());
  for (std::string line; std::getline(lines, line);)
    if (line.find("Math Kernel Library") != std::string::npos)
      return line.substr(line.find_first_not_of(" -"));
  std::ifstream maps("/proc/self/maps");
  std::set<std::string> files;
  for (std::string line; std::getline(maps, line);)
    if (const auto at = line.find('/'); at != std::string::npos && line.find("blas", at) != std::string::npos)
      files.insert(line.substr(at));
  std::string text;
  for (const auto& file : files) text += (text.empty() ? "" : ", ") + file;
  return text.empty() ? "unknown" : text;
}

}  // namespace penstock
