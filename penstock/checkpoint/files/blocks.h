// Distributes the blocks of a checkpoint's files over the ranks and reads them.
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
  std::uint64_t begin = 0, end = 0;     // in the file
  std::span<const std::uint8_t> bytes;  // valid during the call; shorter if the file ends early
  std::string error;                    // set if the block could not be read
};

// Reads the blocks of share `share` of `shares`: a contiguous range of all blocks, in order. Holds one block
// in memory at a time.
void read_blocks(const std::filesystem::path& folder, const std::vector<SizedFile>& files,
                 std::uint64_t block_bytes, int share, int shares,
                 const std::function<void(const BlockRead&)>& call);

}  // namespace penstock::checkpoint
