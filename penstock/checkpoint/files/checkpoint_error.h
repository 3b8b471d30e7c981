// Errors of checkpoints: a file that cannot be written or read, damage, contents that do not match. The
// message names the path, the cause and what to do. If several ranks work together, all of them throw the
// same message.
#pragma once

#include "penstock/errors.h"

namespace penstock::checkpoint {

class CheckpointError : public Error {
 public:
  using Error::Error;
};

// A checkpoint that is intact, as far as this build can tell, but has an unknown format. Not treated as
// damage: an older checkpoint is not used in its place.
class CheckpointFormatError : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

}  // namespace penstock::checkpoint
