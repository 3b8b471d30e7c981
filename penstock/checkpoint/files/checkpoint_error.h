// What can go wrong with a checkpoint: a file that cannot be written or read, damage, contents that do not fit.
// The message names the path, the cause and what to do. Where several ranks work together, all of them throw
// the same message.
#pragma once

#include "penstock/errors.h"

namespace penstock::checkpoint {

class CheckpointError : public Error {
 public:
  using Error::Error;
};

// A checkpoint that is sound, as far as this build can tell, but has a format that it does not know. Never taken for damage: an older
// checkpoint is not used in its place.
class CheckpointFormatError : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

}  // namespace penstock::checkpoint
