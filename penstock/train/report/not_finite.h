// Thrown when a training step produces NaN or infinity; the message says where they first appeared.
#pragma once

#include "penstock/errors.h"

namespace penstock::train {

class NotFiniteError : public Error {
 public:
  using Error::Error;
};

}  // namespace penstock::train
