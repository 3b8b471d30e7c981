// A training step whose numbers are no numbers any more: where that began.
#pragma once

#include "penstock/errors.h"

namespace penstock::train {

class NotFiniteError : public Error {
 public:
  using Error::Error;
};

}  // namespace penstock::train
