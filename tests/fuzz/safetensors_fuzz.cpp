// Reads arbitrary bytes as a safetensors file and as the index of a checkpoint. Accepted input must be
// consistent: tensors are contiguous within the file, and a header or index is unchanged after being written
// and read again. Only CheckpointError may be thrown.
//
// Input: a byte of flags, and the rest. Flag 1: the rest is a whole file. Flag 2: it is an index. Otherwise
// it is the JSON of a header; its length is added here, and as many data bytes as the byte after the flags
// specifies.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "penstock/checkpoint/files/index.h"
#include "penstock/checkpoint/files/safetensors.h"
#include "penstock/checkpoint_types.h"

namespace {

using namespace penstock::checkpoint;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "safetensors_fuzz: %s\n", what);
  std::abort();
}

void read_index(const std::string& text) {
  try {
    if (to_text(parse_index(text, "fuzz")) != text) fail("an accepted index is written differently");
  } catch (const CheckpointError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  if ((data[0] & 2) != 0) {
    read_index(std::string(data + 1, data + size));
    return 0;
  }
  std::vector<std::uint8_t> file(data + 1, data + size);
  if ((data[0] & 1) == 0) {
    const std::size_t json = size - 2, rest = data[1];
    file.assign(8, 0);
    for (std::size_t i = 0; i < 8; ++i)
      file[i] = static_cast<std::uint8_t>(static_cast<std::uint64_t>(json) >> (8 * i));
    file.insert(file.end(), data + 2, data + size);
    file.insert(file.end(), rest, 0);
  }
  Header header;
  try {
    header = parse_header(file, file.size(), "fuzz");
  } catch (const CheckpointError&) {
    return 0;
  }
  std::uint64_t end = 0;
  for (const TensorEntry& entry : header.entries) {
    if (entry.begin != end || entry.end < entry.begin) fail("tensors that overlap or leave a gap");
    if (tensor_bytes(entry.dtype, entry.shape) != entry.end - entry.begin) fail("a tensor of another size");
    end = entry.end;
  }
  if (header.data_begin + end != file.size()) fail("tensors that do not fill the file");
  const std::string bytes = header_bytes(header);
  const std::vector<std::uint8_t> again(bytes.begin(), bytes.end());
  const Header same = parse_header(again, again.size() + header.data_bytes(), "fuzz");
  if (same.entries != header.entries || same.metadata != header.metadata)
    fail("a header differs after being written and read again");
  return 0;
}
