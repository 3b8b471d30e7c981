// Compiled instead of the transport if the build found no UCX.
#include "penstock/comm/transport/ucx_transport.h"
#include "penstock/errors.h"

namespace penstock::comm {

namespace {

[[noreturn]] void refuse() {
  throw ConfigError(
      "UCX transport: this build has no UCX; install the UCX headers and libraries (Debian: libucx-dev) "
      "and rebuild, or choose another transport");
}

}  // namespace

class UcxTransport::Core {};

bool ucx_available() { return false; }

std::string ucx_version() { return {}; }

UcxTransport::UcxTransport(int, int, const Publish&, const Fetch&, UcxOptions) { refuse(); }

UcxTransport::~UcxTransport() = default;

std::shared_ptr<UcxTransfer> UcxTransport::send(const void*, std::size_t, int, std::uint32_t, std::uint16_t) {
  refuse();
}

std::shared_ptr<UcxTransfer> UcxTransport::recv(void*, std::size_t, int, std::uint32_t) { refuse(); }

bool UcxTransport::fetches_large_messages() const { refuse(); }

}  // namespace penstock::comm
