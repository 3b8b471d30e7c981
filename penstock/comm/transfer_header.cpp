#include "penstock/comm/transfer_header.h"

#include <fmt/format.h>

#include <algorithm>

#include "penstock/base/text.h"

namespace penstock::comm {

TransferHeader TransferHeader::of(const at::Tensor& tensor, int source, int tag) {
  TransferHeader header;
  header.dtype = static_cast<std::int8_t>(tensor.scalar_type());
  header.dims = static_cast<std::uint8_t>(std::min<std::int64_t>(tensor.dim(), 255));
  header.source = source;
  header.tag = tag;
  header.bytes = tensor.nbytes();
  for (int i = 0; i < std::min<int>(header.dims, kMaxDims); ++i) header.shape[i] = tensor.size(i);
  return header;
}

std::string TransferHeader::describe() const {
  std::string text = dtype >= 0 && dtype < static_cast<int>(at::ScalarType::NumOptions)
                         ? c10::toString(static_cast<at::ScalarType>(dtype))
                         : fmt::format("unknown type {}", static_cast<int>(dtype));
  text += "[";
  for (int i = 0; i < std::min<int>(dims, kMaxDims); ++i) text += fmt::format("{}{}", i > 0 ? ", " : "", shape[i]);
  if (dims > kMaxDims) text += ", ...";
  return text + fmt::format("] ({})", format_bytes(bytes));
}

}  // namespace penstock::comm
