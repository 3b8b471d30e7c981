// Thrown when a training step produces NaN or infinity; the message says where they first appeared.
#pragma once

#include <stdexcept>

namespace penstock::train {

class NotFiniteError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace penstock::train
