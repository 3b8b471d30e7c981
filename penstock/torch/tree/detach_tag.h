// Requests tensors that are detached from their graph: flatten_args(args, kDetach).
#pragma once

namespace penstock {

struct DetachTag {};
inline constexpr DetachTag kDetach{};

}  // namespace penstock
