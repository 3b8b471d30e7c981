// The order in which one rank of an interleaved schedule runs its chunks and microbatches. Yields the entries
// of `virtual_pipeline_table` in O(1) per step, without a table.
#pragma once

#include "penstock/schedule/generate/virtual_pipeline.h"

namespace penstock::schedule {

class InterleavedOrder {
 public:
  InterleavedOrder(int microbatches, int chunks, int group_size)
      : chunks_(chunks),
        group_(group_size),
        whole_(microbatches / group_size),
        rest_(microbatches % group_size) {}

  TableEntry operator[](int step) const {
    const int per_group = group_ * chunks_;
    const int group = step / per_group;
    if (group < whole_) {
      const int within = step - group * per_group;
      return {group * group_ + within % group_, within / group_};
    }
    const int within = step - whole_ * per_group;  // the last group holds the remainder
    return {whole_ * group_ + within % rest_, within / rest_};
  }

 private:
  int chunks_;
  int group_;
  int whole_;
  int rest_;
};

}  // namespace penstock::schedule
