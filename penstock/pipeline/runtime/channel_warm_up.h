// Connects every channel of a pipeline before its first step.
//
// Connections are made on first use: NCCL builds a communicator for each pair of ranks, Gloo and UCX open
// sockets and endpoints. Without the warm-up this would happen in the middle of the first step, and an
// unreachable rank would only be detected there. The warm-up sends one float, the index of the sending stage,
// over each channel that leaves or enters this rank: activations and gradients, between neighbours and along
// skip connections. Stages without a neighbour on one side have no channel there; stages that share a rank
// need none.
//
// All ranks go through the channels in the same order, so that communicators whose creation blocks cannot
// deadlock.
#pragma once

#include <vector>

#include "penstock/pipeline/program/program.h"
#include "penstock/pipeline/runtime/channel_groups.h"
#include "penstock/stage.h"
#include "penstock/stage_placement.h"

namespace penstock {

// Collective over the pipeline. `program` is the one with backward, `stages` are those of this rank. Returns
// the number of transfers that this rank took part in. Throws PipeliningMetadataError on every rank if the
// ranks disagree about the placement of stages or skip connections, and if a value came from another stage
// than expected; throws TimeoutError and PeerLostError, which name the channel, as every transfer does.
int warm_up_channels(const ChannelGroups& groups, const Program& program, const schedule::StageMap& map,
                     const std::vector<SkipConnection>& skips, const std::vector<PipelineStage>& stages);

}  // namespace penstock
