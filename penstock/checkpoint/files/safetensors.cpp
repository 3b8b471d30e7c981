#include "penstock/checkpoint/files/safetensors.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/checkpoint_types.h"
#include "penstock/errors.h"

namespace penstock::checkpoint {

namespace {

struct DtypeRow {
  std::string_view code;
  std::uint64_t bytes;
};

// In the order of the enumerators.
constexpr auto kDtypes = std::to_array<DtypeRow>({{"BOOL", 1},
                                                  {"U8", 1},
                                                  {"I8", 1},
                                                  {"F8_E5M2", 1},
                                                  {"F8_E4M3", 1},
                                                  {"F8_E8M0", 1},
                                                  {"I16", 2},
                                                  {"U16", 2},
                                                  {"F16", 2},
                                                  {"BF16", 2},
                                                  {"I32", 4},
                                                  {"U32", 4},
                                                  {"F32", 4},
                                                  {"C64", 8},
                                                  {"F64", 8},
                                                  {"I64", 8},
                                                  {"U64", 8}});

constexpr std::string_view kMetadata = "__metadata__";
constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kAlignment = 64;
constexpr std::uint64_t kMaxTensorBytes = std::uint64_t{1} << 62;

// A name from a file may be long or contain control characters: errors show its beginning, without them.
std::string shown(std::string_view name) {
  std::string text;
  for (const char c : name.substr(0, 80)) text += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
  return name.size() > 80 ? text + "..." : text;
}

// Reads the one form of JSON that a header has, event by event, so that duplicate names are detected and only
// the entries are built. The form itself limits nesting.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(Header& header, const std::string& where) : header_(header), where_(where) {}

  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a boolean"); }
  bool number_integer(number_integer_t value) override { unexpected(fmt::format("the number {}", value)); }
  bool number_float(number_float_t, const string_t& text) override {
    unexpected("the number " + shown(text));
  }
  bool binary(binary_t&) override { unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::Shape) {
      if (value > static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max()))
        refuse("a size above 2^63");
      entry_.shape.push_back(static_cast<std::int64_t>(value));
    } else if (place_ == Place::Offsets) {
      offsets_.push_back(value);
    } else {
      unexpected(fmt::format("the number {}", value));
    }
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::Metadata) {
      if (!header_.metadata.emplace(key_, value).second)
        refuse(fmt::format("the metadata key \"{}\" twice", shown(key_)));
    } else if (place_ == Place::Entry && key_ == "dtype") {
      const auto dtype = dtype_of_code(value);
      if (!dtype) refuse(fmt::format("the dtype \"{}\", which this version does not support", shown(value)));
      entry_.dtype = *dtype;
    } else {
      unexpected("text");
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::Start) {
      place_ = Place::Root;
    } else if (place_ == Place::Root) {
      place_ = key_ == kMetadata ? Place::Metadata : Place::Entry;
      entry_ = TensorEntry{.name = key_};
      fields_.clear();
      offsets_.clear();
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(string_t& key) override {
    key_ = std::move(key);
    if (place_ == Place::Root && !names_.insert(key_).second) {
      entry_.name = key_;
      refuse("its name twice");
    }
    if (place_ == Place::Entry) {
      if (key_ != "dtype" && key_ != "shape" && key_ != "data_offsets")
        refuse(fmt::format("an unknown field \"{}\"", shown(key_)));
      if (!fields_.insert(key_).second) refuse(fmt::format("the field \"{}\" twice", key_));
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::Entry) {
      if (fields_.size() != 3) refuse("only some of dtype, shape and data_offsets");
      if (offsets_.size() != 2) refuse(fmt::format("{} data offsets instead of 2", offsets_.size()));
      entry_.begin = offsets_[0];
      entry_.end = offsets_[1];
      header_.entries.push_back(std::move(entry_));
    }
    place_ = place_ == Place::Root ? Place::End : Place::Root;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ == Place::Entry && key_ == "shape")
      place_ = Place::Shape;
    else if (place_ == Place::Entry && key_ == "data_offsets")
      place_ = Place::Offsets;
    else
      unexpected("a list");
    return true;
  }

  bool end_array() override {
    place_ = Place::Entry;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    throw CheckpointError(fmt::format(
        "{}: the header is not valid JSON at byte {}; the file is damaged or not a safetensors file", where_,
        kLengthBytes + position));
  }

 private:
  enum class Place { Start, Root, Metadata, Entry, Shape, Offsets, End };

  [[noreturn]] void refuse(const std::string& what) const {
    throw CheckpointError(
        fmt::format("{}: the header gives tensor \"{}\" {}; the file is damaged or was not written by a "
                    "safetensors library",
                    where_, shown(entry_.name), what));
  }
  [[noreturn]] void unexpected(const std::string& what) const {
    throw CheckpointError(fmt::format(
        "{}: the header has {} at \"{}\", which the format does not allow there; the file is damaged "
        "or was not written by a safetensors library",
        where_, what, shown(key_)));
  }

  Header& header_;
  const std::string& where_;
  Place place_ = Place::Start;
  std::string key_;
  TensorEntry entry_;
  std::vector<std::uint64_t> offsets_;
  std::set<std::string, std::less<>> fields_, names_;
};

std::uint64_t read_length(std::span<const std::uint8_t> bytes) {
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) length |= std::uint64_t{bytes[i]} << (8 * i);
  return length;
}

}  // namespace

std::string_view dtype_code(Dtype dtype) { return kDtypes.at(static_cast<std::size_t>(dtype)).code; }

std::optional<Dtype> dtype_of_code(std::string_view code) {
  for (std::size_t i = 0; i < kDtypes.size(); ++i)
    if (kDtypes[i].code == code) return static_cast<Dtype>(i);
  return std::nullopt;
}

std::uint64_t item_bytes(Dtype dtype) { return kDtypes.at(static_cast<std::size_t>(dtype)).bytes; }

std::uint64_t tensor_bytes(Dtype dtype, const std::vector<std::int64_t>& shape) {
  std::uint64_t bytes = item_bytes(dtype);
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0)
      throw ValueError(describe("tensor shape", tensor_text(dtype, shape), "sizes of at least 0"));
    empty = empty || size == 0;
  }
  if (empty) return 0;
  for (const std::int64_t size : shape)
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes) || bytes > kMaxTensorBytes)
      throw ValueError(describe("tensor shape", tensor_text(dtype, shape), "at most 2^62 bytes"));
  return bytes;
}

std::string tensor_text(Dtype dtype, const std::vector<std::int64_t>& shape) {
  return fmt::format("{}[{}]", dtype_code(dtype), fmt::join(shape, ", "));
}

const TensorEntry* Header::find(std::string_view name) const {
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [&](const TensorEntry& entry) { return entry.name == name; });
  return found == entries.end() ? nullptr : &*found;
}

Header lay_out(std::vector<TensorEntry> entries) {
  std::sort(entries.begin(), entries.end(), [](const TensorEntry& a, const TensorEntry& b) {
    const auto wide_a = item_bytes(a.dtype), wide_b = item_bytes(b.dtype);
    return wide_a != wide_b ? wide_a > wide_b : a.name < b.name;
  });
  std::set<std::string_view> names;
  std::uint64_t end = 0;
  for (TensorEntry& entry : entries) {
    if (entry.name.empty() || entry.name == kMetadata)
      throw ValueError(
          describe("tensor name", "\"" + entry.name + "\"", "a non-empty name other than __metadata__"));
    if (!names.insert(entry.name).second)
      throw ValueError(describe("tensor names", "\"" + entry.name + "\" twice", "each name once"));
    entry.begin = end;
    if (__builtin_add_overflow(end, tensor_bytes(entry.dtype, entry.shape), &end) || end > kMaxTensorBytes)
      throw ValueError(describe("tensors of one file", "more than 2^62 bytes", "at most 2^62 bytes"));
    entry.end = end;
  }
  return {std::move(entries), {}, 0};
}

std::string header_bytes(const Header& header) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!header.metadata.empty()) json[std::string(kMetadata)] = header.metadata;
  // Written by hand: a JSON object would look up every name again, which is quadratic.
  std::string text;
  const auto quoted = [](const std::string& part) {
    try {
      return nlohmann::json(part).dump();
    } catch (const nlohmann::json::exception&) {
      throw ValueError(
          describe("tensor name", "bytes that are not UTF-8", "UTF-8 text", "rename the parameter"));
    }
  };
  text = header.metadata.empty() ? "{"
                                 : fmt::format("{{\"{}\":{}", kMetadata, json[std::string(kMetadata)].dump());
  for (const TensorEntry& entry : header.entries)
    text += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                        text.size() > 1 ? "," : "", quoted(entry.name), dtype_code(entry.dtype),
                        fmt::join(entry.shape, ","), entry.begin, entry.end);
  text += "}";
  while ((kLengthBytes + text.size()) % kAlignment != 0) text += ' ';
  if (text.size() > kMaxHeaderBytes)
    throw ValueError(describe("safetensors header", fmt::format("{} bytes", text.size()),
                              fmt::format("at most {}", kMaxHeaderBytes),
                              "lower the maximum file size, so that each file holds fewer tensors"));
  std::string bytes;
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    bytes += static_cast<char>(static_cast<std::uint64_t>(text.size()) >> (8 * i));
  return bytes + text;
}

Header parse_header(std::span<const std::uint8_t> bytes, std::uint64_t file_bytes, const std::string& where) {
  if (file_bytes < kLengthBytes || bytes.size() < kLengthBytes)
    throw CheckpointError(
        fmt::format("{}: {} bytes, too short for a safetensors file; it is truncated", where, file_bytes));
  const std::uint64_t length = read_length(bytes);
  if (length > kMaxHeaderBytes)
    throw CheckpointError(fmt::format(
        "{}: bytes 0-7 say that the header has {} bytes, the format allows {}; the file is damaged or not "
        "a safetensors file",
        where, length, kMaxHeaderBytes));
  if (length > file_bytes - kLengthBytes || length > bytes.size() - kLengthBytes)
    throw CheckpointError(
        fmt::format("{}: the header has {} bytes, the whole file {}; it is truncated or damaged", where,
                    length, file_bytes));
  const auto json = bytes.subspan(kLengthBytes, length);
  Header header;
  header.data_begin = kLengthBytes + length;
  if (json.empty() || json.front() != '{')
    throw CheckpointError(fmt::format(
        "{}: the header does not begin with '{{'; the file is damaged or not a safetensors file", where));
  HeaderReader reader(header, where);
  nlohmann::json::sax_parse(json.begin(), json.end(), &reader);

  const std::uint64_t data_bytes = file_bytes - header.data_begin;
  std::stable_sort(header.entries.begin(), header.entries.end(),
                   [](const TensorEntry& a, const TensorEntry& b) {
                     return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
                   });
  std::uint64_t end = 0;
  for (const TensorEntry& entry : header.entries) {
    const auto refuse = [&](const std::string& what) {
      throw CheckpointError(
          fmt::format("{}: tensor \"{}\" {}; the file is damaged", where, shown(entry.name), what));
    };
    if (entry.name.empty()) refuse("has no name");
    if (entry.begin > entry.end || entry.end > data_bytes)
      refuse(fmt::format("is at {}-{} of {} data bytes, which may be truncated", entry.begin, entry.end,
                         data_bytes));
    if (entry.begin != end)
      refuse(fmt::format("begins at {}, but the previous one ends at {}: they {}", entry.begin, end,
                         entry.begin < end ? "overlap" : "leave a gap"));
    std::uint64_t wanted = 0;
    try {
      wanted = tensor_bytes(entry.dtype, entry.shape);
    } catch (const ValueError& error) {
      refuse(error.what());
    }
    if (entry.end - entry.begin != wanted)
      refuse(
          fmt::format("has {} bytes, {} needs {}", entry.end - entry.begin, dtype_code(entry.dtype), wanted));
    end = entry.end;
  }
  if (end != data_bytes)
    throw CheckpointError(
        fmt::format("{}: {} data bytes, of which the tensors use {}; the file is truncated or damaged", where,
                    data_bytes, end));
  return header;
}

}  // namespace penstock::checkpoint
