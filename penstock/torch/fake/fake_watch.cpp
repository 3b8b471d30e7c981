#include "penstock/torch/fake/fake_watch.h"

#include <memory>
#include <utility>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/torch/fake/fake_payload.h"

namespace penstock {
namespace {

thread_local FakeWatch* current = nullptr;

}  // namespace

FakeWatch::Guard::Guard(FakeWatch& watch) : before_(std::exchange(current, &watch)) {}
FakeWatch::Guard::~Guard() { current = before_; }

std::vector<at::Tensor> FakeWatch::survivors() const {
  std::vector<at::Tensor> alive;
  for (const auto& made : made_)
    if (auto impl = made.lock()) alive.emplace_back(std::move(impl));
  // The handle may have been given other data since.
  std::erase_if(alive, [](const at::Tensor& tensor) { return !is_fake(tensor); });
  return alive;
}

void note_fake(const at::Tensor& fake) {
  if (current) [[unlikely]]
    current->made_.emplace_back(fake.getIntrusivePtr());
}

void mark_leftover(const at::Tensor& fake, std::string why) {
  auto* payload = payload_as<detail::FakePayload>(fake);
  PENSTOCK_INVARIANT(payload, "only fake tensors are leftovers of a run in shape only");
  payload->leftover = std::make_shared<const std::string>(std::move(why));
}

}  // namespace penstock
