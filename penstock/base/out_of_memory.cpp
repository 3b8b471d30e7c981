#include "penstock/base/out_of_memory.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <new>
#include <string_view>

#include "penstock/base/exception_text.h"
#include "penstock/base/text.h"
#include "penstock/errors.h"

namespace penstock {

namespace {

// The CPU allocator throws a plain c10::Error, which can only be recognized by its text.
std::optional<std::string> of_cpu_allocator(std::string_view text) {
  constexpr std::string_view kMark = "DefaultCPUAllocator: ", kAmount = "you tried to allocate ";
  if (text.find("Storage size calculation overflowed") != std::string_view::npos)
    return "more bytes than 64 bits can count";
  if (text.find(kMark) == std::string_view::npos) return std::nullopt;
  const std::size_t at = text.find(kAmount);
  if (at == std::string_view::npos) return "memory on the CPU";
  const std::string_view number = text.substr(at + kAmount.size());
  std::uint64_t bytes = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), bytes);
  return error == std::errc() && end != number.data() ? fmt::format("{} on the CPU", format_bytes(bytes))
                                                      : "memory on the CPU";
}

// "CUDA out of memory. Tried to allocate 20.00 GiB (GPU 0; ...)": the amount, without the advice about
// PyTorch's settings.
std::optional<std::string> of_device_allocator(std::string_view text) {
  constexpr std::string_view kMark = "CUDA out of memory", kAmount = "Tried to allocate ";
  if (text.find(kMark) == std::string_view::npos) return std::nullopt;
  const std::size_t at = text.find(kAmount);
  if (at == std::string_view::npos) return "memory of the GPU";
  const std::string_view amount = text.substr(at + kAmount.size());
  const std::size_t unit = amount.find(' ');
  return fmt::format(
      "{} on the GPU",
      amount.substr(0, unit == std::string_view::npos ? unit : amount.find_first_of(" .", unit + 1)));
}

}  // namespace

std::optional<std::string> out_of_memory(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return "memory of the process";
  if (dynamic_cast<const Error*>(&error) == nullptr) {  // Penstock's own errors may quote others
    const std::string text = without_backtrace(error.what());
    if (auto what = of_device_allocator(text)) return what;
    if (auto what = of_cpu_allocator(text)) return what;
  }
  try {
    std::rethrow_if_nested(error);
  } catch (const std::exception& inner) {
    return out_of_memory(inner);
  } catch (...) {
    return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace penstock
