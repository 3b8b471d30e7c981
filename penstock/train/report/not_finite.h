// A training step whose numbers are no numbers any more: where that began.
#pragma once

#include <stdexcept>

namespace penstock::train {

class NotFiniteError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace penstock::train
