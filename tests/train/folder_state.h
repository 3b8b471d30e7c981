// The visible state of a folder: names, contents, modification times.
#pragma once

#include <sys/stat.h>

#include <filesystem>
#include <map>
#include <string>

#include "tests/train/scratch_folder.h"

namespace penstock::test {

// Path within the folder -> modification time and contents. The folder itself is ".".
using FolderState = std::map<std::string, std::string>;

inline FolderState state_of(const std::filesystem::path& folder, bool with_times = true) {
  FolderState state;
  const auto add = [&](const std::filesystem::path& path) {
    struct stat info {};
    ::lstat(path.c_str(), &info);
    std::string text =
        with_times ? std::to_string(info.st_mtim.tv_sec) + "." + std::to_string(info.st_mtim.tv_nsec) + " "
                   : "";
    if (S_ISREG(info.st_mode)) {
      const auto bytes = read_bytes(path);
      text.append(bytes.begin(), bytes.end());
    }
    state[path.lexically_relative(folder).string()] = text;
  };
  add(folder);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) add(entry.path());
  return state;
}

// Returns the names of what differs.
inline std::string difference(const FolderState& before, const FolderState& after) {
  std::string names;
  for (const auto& [name, text] : before)
    if (const auto found = after.find(name); found == after.end())
      names += "gone: " + name + "\n";
    else if (found->second != text)
      names += "changed: " + name + "\n";
  for (const auto& [name, text] : after)
    if (!before.contains(name)) names += "new: " + name + "\n";
  return names;
}

}  // namespace penstock::test
