// Connects every channel of a pipeline before its first step.
//
// Connections are made when they are first used: NCCL builds a communicator for each pair of ranks, Gloo and UCX open sockets and
// endpoints. Without this the first step would pay for it, in the middle of its schedule, and a rank that cannot be reached would be
// found out only there. Here each channel that leaves or enters this rank carries one float, the number of the stage that sends it,
// activations and gradients, between neighbours and along skip connections. Stages without a neighbour on a side have no channel there;
// those that share a rank need none.
//
// All ranks go through the channels in one order, so that communicators whose making blocks cannot wait for each other in a circle.
#pragma once

#include <vector>

#include "penstock/pipeline/runtime/channel_groups.h"
#include "penstock/pipeline/program/program.h"
#include "penstock/stage.h"
#include "penstock/stage_placement.h"

namespace penstock::pipeline {

// Collective over the pipeline. `program` is the one with backward, `stages` are those of this rank. Returns how many transfers this
// rank took part in. Throws PipeliningMetadataError, on every rank, for ranks whose pipelines have their stages or skip connections
// elsewhere, and for a word that came from another stage than it should; TimeoutError and PeerLostError, which name the channel, as
// every transfer does.
int warm_up_channels(const ChannelGroups& groups, const Program& program, const schedule::StageMap& map, const std::vector<SkipConnection>& skips,
                     const std::vector<PipelineStage>& stages);

}  // namespace penstock::pipeline
