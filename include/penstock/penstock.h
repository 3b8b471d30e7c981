// All of Penstock's public API.
//
//   auto world = comm::World::from_env();
//   world.group().all_reduce(x).wait();
//
// The headers, in the order of a first reading: world.h (processes), group.h (communication), device_mesh.h and mesh_groups.h
// (meshes), dtensor.h and tensor_parallel.h (distributed tensors), fully_shard.h (sharded parameters), stage.h and pipeline.h
// (pipelines), schedule.h and simulator.h (schedules as values), optimizer.h, checkpoint.h, compile.h, transformer.h, trainer.h.
// docs/README.md leads through the documentation.
#pragma once

