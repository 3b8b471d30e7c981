// The blocks of a checkpoint's files, shared out over the ranks and read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace penstock::checkpoint {

struct SizedFile {
  std::string name;
  std::uint64_t bytes = 0;
};

struct BlockRead {
  std::size_t file = 0;
  std::uint64_t begin = 0, end = 0;        // in the file
  std::span<const std::uint8_t> bytes;     // valid during the call; fewer than end - begin when the file ends early
  std::string error;                       // why there are none
};

// Reads the blocks of share `share` of `shares`: a contiguous stretch of all blocks, in order. One block is in memory at a time.
void read_blocks(const std::filesystem::path& folder, const std::vector<SizedFile>& files, std::uint64_t block_bytes, int share, int shares,
                 const std::function<void(const BlockRead&)>& call);

}  // namespace penstock::checkpoint
