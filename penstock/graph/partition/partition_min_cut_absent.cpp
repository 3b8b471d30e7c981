#include "penstock/errors.h"
#include "penstock/graph/partition/partition.h"

namespace penstock::graph {

Partition partition_min_cut(const JointGraph&) {
  throw NotImplemented(
      "graph: this build has no minimum-cut partition; install the Boost.Graph headers and rebuild, or use "
      "partition_default");
}

}  // namespace penstock::graph
