// The safetensors format: written files can be read by any implementation of its specification, and invalid
// files are rejected.
#include "penstock/checkpoint/files/safetensors.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "penstock/checkpoint/files/safetensors_file.h"
#include "penstock/checkpoint_types.h"
#include "penstock/errors.h"
#include "tests/checkpoint/file_ranks.h"
#include "tests/has_text.h"
#include "tests/throws.h"

namespace penstock::checkpoint {
namespace safetensors_test {

using penstock::test::has_text;
using penstock::test::message_of;

constexpr const char* kCodes[] = {"BOOL", "U8",  "I8",  "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16",
                                  "BF16", "I32", "U32", "F32",     "C64",     "F64",     "I64", "U64"};

std::vector<std::uint8_t> file_of(const std::string& json, std::size_t data) {
  std::vector<std::uint8_t> bytes(8);
  for (std::size_t i = 0; i < 8; ++i)
    bytes[i] = static_cast<std::uint8_t>(std::uint64_t{json.size()} >> (8 * i));
  bytes.insert(bytes.end(), json.begin(), json.end());
  bytes.resize(bytes.size() + data, 7);
  return bytes;
}

Header parse(const std::vector<std::uint8_t>& bytes) {
  return parse_header(bytes, bytes.size(), "model.safetensors");
}

std::string refused(const std::string& json, std::size_t data = 0) {
  return message_of<CheckpointError>([&] { parse(file_of(json, data)); });
}

// Reads a file using only the published specification: length, JSON, data.
std::map<std::string, std::pair<nlohmann::json, std::string>> independent_read(const std::string& file) {
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  const auto json = nlohmann::json::parse(file.substr(8, length));
  std::map<std::string, std::pair<nlohmann::json, std::string>> tensors;
  std::size_t end = 0;
  for (const auto& [name, entry] : json.items()) {
    if (name == "__metadata__") continue;
    const std::size_t from = entry.at("data_offsets").at(0), to = entry.at("data_offsets").at(1);
    tensors[name] = {entry, file.substr(8 + length + from, to - from)};
    end = std::max(end, to);
  }
  EXPECT_EQ(8 + length + end, file.size());
  return tensors;
}

TEST(Safetensors, EveryDtypeHasItsNameAndSize) {
  for (const char* code : kCodes) {
    const auto dtype = dtype_of_code(code);
    ASSERT_TRUE(dtype) << code;
    EXPECT_EQ(dtype_code(*dtype), code);
  }
  EXPECT_EQ(item_bytes(Dtype::BF16), 2u);
  EXPECT_EQ(item_bytes(Dtype::C64), 8u);
  EXPECT_FALSE(dtype_of_code("F4"));
  EXPECT_FALSE(dtype_of_code("f32"));
}

TEST(Safetensors, WrittenAndReadAgain) {
  std::vector<TensorEntry> entries;
  for (const char* code : kCodes) entries.push_back({std::string("t.") + code, *dtype_of_code(code), {3, 2}});
  entries.push_back({"scalar", Dtype::F32, {}});
  entries.push_back({"empty", Dtype::I64, {4, 0, 2}});
  entries.push_back({"name with \"quotes\" and \xc3\xa4", Dtype::U8, {1}});
  std::shuffle(entries.begin(), entries.end(), std::mt19937(3));
  Header header = lay_out(entries);
  header.metadata = {{"format", "pt"}, {"a", "b"}};
  const std::string bytes = header_bytes(header);
  EXPECT_EQ(bytes.size() % 64, 0u);
  std::vector<std::uint8_t> file(bytes.begin(), bytes.end());
  file.resize(file.size() + header.data_bytes());
  const Header again = parse(file);
  EXPECT_EQ(again.entries, header.entries);
  EXPECT_EQ(again.metadata, header.metadata);
  EXPECT_EQ(again.data_begin, bytes.size());
  for (const TensorEntry& entry : again.entries)
    EXPECT_EQ((again.data_begin + entry.begin) % item_bytes(entry.dtype), 0u) << entry.name << " is aligned";
  std::shuffle(entries.begin(), entries.end(), std::mt19937(4));
  EXPECT_EQ(lay_out(entries).entries, header.entries) << "the order given does not matter";
}

TEST(Safetensors, AnEmptyFileHasAHeaderAndNothingElse) {
  const std::string bytes = header_bytes(lay_out({}));
  const Header header = parse({bytes.begin(), bytes.end()});
  EXPECT_TRUE(header.entries.empty());
}

TEST(Safetensors, InvalidFilesAreRefused) {
  const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  EXPECT_EQ(parse(file_of(good, 8)).entries.size(), 1u);
  EXPECT_EQ(parse(file_of(good + "    ", 8)).entries.size(), 1u);
  EXPECT_TRUE(has_text(refused(good, 7), "truncated"));
  EXPECT_TRUE(has_text(refused(good, 9), "9 data bytes, of which the tensors use 8"));
  EXPECT_TRUE(has_text(
      refused(
          R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
          8),
      "overlap"));
  EXPECT_TRUE(has_text(
      refused(
          R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})",
          16),
      "gap"));
  EXPECT_TRUE(has_text(refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8), "8-0 of 8"));
  EXPECT_TRUE(has_text(refused(R"({"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}})", 8), "\"F33\""));
  EXPECT_TRUE(has_text(refused(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8),
                       "has 8 bytes, F32 needs 12"));
  EXPECT_TRUE(has_text(
      refused(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296,2],"data_offsets":[0,8]}})", 8), "2^62"));
  EXPECT_TRUE(
      has_text(refused(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8), "the number -2"));
  EXPECT_TRUE(
      has_text(refused(R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8), "the number 2.0"));
  EXPECT_TRUE(
      has_text(refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", 8), "1 data offsets"));
  EXPECT_TRUE(has_text(refused(R"({"a":{"dtype":"F32","shape":[2]}})", 8), "only some of"));
  EXPECT_TRUE(has_text(refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", 8),
                       "unknown field \"x\""));
  EXPECT_TRUE(has_text(refused(R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8),
                       "\"dtype\" twice"));
  EXPECT_TRUE(has_text(refused(good.substr(0, good.size() - 1) + "," + good.substr(1), 8), "its name twice"));
  EXPECT_TRUE(has_text(refused(R"({"__metadata__":{"a":1}})"), "the number 1"));
  EXPECT_TRUE(has_text(refused("[]"), "does not begin with"));
  EXPECT_TRUE(has_text(refused(""), "does not begin with"));
  EXPECT_TRUE(has_text(refused("{\"a\":"), "not valid JSON"));
  EXPECT_TRUE(has_text(refused("{\"\xff\":{}}"), "not valid JSON"));
  EXPECT_TRUE(has_text(refused("{}x"), "not valid JSON"));
  // Nesting is rejected at the first level that the format does not have, however deep it is.
  EXPECT_TRUE(has_text(refused("{\"a\":" + std::string(1'000'000, '[')), "a list"));
}

TEST(Safetensors, TheLengthIsCheckedFirst) {
  std::vector<std::uint8_t> bytes = file_of("{}", 0);
  bytes[7] = 0x7f;
  EXPECT_TRUE(has_text(message_of<CheckpointError>([&] { parse(bytes); }), "the format allows 100000000"));
  bytes = file_of("{}", 0);
  bytes[0] = 3;
  EXPECT_TRUE(has_text(message_of<CheckpointError>([&] { parse(bytes); }), "truncated"));
  EXPECT_TRUE(has_text(message_of<CheckpointError>([&] { parse({1, 2, 3}); }), "3 bytes, too short"));
  EXPECT_TRUE(has_text(message_of<CheckpointError>([&] { parse({}); }), "model.safetensors: 0 bytes"));
}

TEST(Safetensors, BadNamesAreNotWritten) {
  EXPECT_THROW(lay_out({{"", Dtype::F32, {1}}}), ValueError);
  EXPECT_THROW(lay_out({{"__metadata__", Dtype::F32, {1}}}), ValueError);
  EXPECT_THROW(lay_out({{"a", Dtype::F32, {1}}, {"a", Dtype::F32, {1}}}), ValueError);
  EXPECT_THROW(header_bytes(lay_out({{"\xff", Dtype::F32, {1}}})), ValueError);
  EXPECT_THROW(lay_out({{"a", Dtype::F32, {-1}}}), ValueError);
}

TEST(Safetensors, AFileThatCannotBeReadIsNamed) {
  EXPECT_TRUE(has_text(message_of<CheckpointError>([] { map_checkpoint_file("/nowhere/x"); }),
                       "cannot read /nowhere/x: No such file"));
  EXPECT_TRUE(has_text(message_of<CheckpointError>([] { map_checkpoint_file("/"); }), "not a plain file"));
}

// Reads the files of a checkpoint using only the published specification, and with Python's own library if it
// is installed.
TEST(Safetensors, OthersCanReadWhatACheckpointHolds) {
  const test::TemporaryFolder folder;
  try {
    test::save_alone(folder.path(), 1);
  } catch (const CheckpointError& error) {
    ASSERT_TRUE(has_text(error.what(), "no xxHash"));  // this build cannot write any
    return;
  }
  const auto path = folder.path() / "step-00000001";
  const auto model = independent_read(test::read_text(path / "model.safetensors"));
  const auto optimizer = independent_read(test::read_text(path / "optimizer.safetensors"));
  EXPECT_EQ(model.size() + optimizer.size(), test::sample_tensors().size());
  std::ofstream expected(folder.path() / "expected.txt");
  for (const test::SampleTensor& tensor : test::sample_tensors()) {
    const auto& [entry, data] = (tensor.section == Section::Model ? model : optimizer).at(tensor.name);
    const auto bytes = test::sample_bytes(tensor);
    EXPECT_EQ(entry.at("dtype"), dtype_code(tensor.dtype));
    EXPECT_EQ(entry.at("shape").get<std::vector<std::int64_t>>(), tensor.shape);
    EXPECT_EQ(data, std::string(bytes.begin(), bytes.end())) << tensor.name;
    expected << tensor.name << " " << dtype_code(tensor.dtype) << " " << nlohmann::json(tensor.shape).dump()
             << "\n";
  }
  expected.close();
  if (std::system("python3 -c 'import safetensors' 2>/dev/null") != 0) return;
  const std::string script =
      "import json,sys,safetensors\nfound={}\nfor f in ('model','optimizer'):\n  for name,t in "
      "safetensors.deserialize(open(sys.argv[1]+'/'+f+'.safetensors','rb').read()): "
      "found[name]=(t['dtype'],t['shape'])\n"
      "for line in open(sys.argv[2]):\n  name,dtype,shape=line.split(' ',2)\n  assert "
      "found.pop(name)==(dtype,json.loads(shape)), name\nassert not found\n";
  test::write_text(folder.path() / "check.py", script);
  EXPECT_EQ(std::system(("python3 " + (folder.path() / "check.py").string() + " " + path.string() + " " +
                         (folder.path() / "expected.txt").string())
                            .c_str()),
            0);
}

}  // namespace safetensors_test
}  // namespace penstock::checkpoint
