// How captures with distributed tensors are kept between runs (penstock/context_codec.h).
//
// Stored are the placements, the boundary of a parallelized module, and of the mesh its device type, the
// names and sizes of its axes, and the coordinate of the rank: what a rank computes depends on nothing else.
// The ranks themselves are not stored, so that replicas, whose meshes differ in nothing but their ranks,
// share what one of them has stored; two meshes of one process that differ in nothing else are
// NotImplemented. Graphs name the process group of an axis; it is stored as mesh and axis.
//
// When a capture is loaded, its mesh is the one of this process that fits: of the inputs of the call, or else
// any to which there is a handle (MeshGroups::all). Groups that the graph uses are made then, which is
// [collective] over their members.
#pragma once

namespace penstock::detail {

// Once per process.
void register_dtensor_codec();

}  // namespace penstock::detail
