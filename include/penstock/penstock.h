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

#include "penstock/action.h"
#include "penstock/auto_schedule.h"
#include "penstock/checkpoint.h"
#include "penstock/checkpoint_types.h"
#include "penstock/compile.h"
#include "penstock/compile_options.h"
#include "penstock/cost_model.h"
#include "penstock/deferred_linear.h"
#include "penstock/device_mesh.h"
#include "penstock/draw.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/fully_shard.h"
#include "penstock/generators.h"
#include "penstock/gradients.h"
#include "penstock/group.h"
#include "penstock/lower.h"
#include "penstock/lr_schedule.h"
#include "penstock/mesh_layout.h"
#include "penstock/microbatch.h"
#include "penstock/mode.h"
#include "penstock/observer.h"
#include "penstock/operator_traits.h"
#include "penstock/optimizer.h"
#include "penstock/partition.h"
#include "penstock/pipeline.h"
#include "penstock/placement.h"
#include "penstock/pytree.h"
#include "penstock/pytree_convert.h"
#include "penstock/random.h"
#include "penstock/reduce_op.h"
#include "penstock/schedule.h"
#include "penstock/shard_options.h"
#include "penstock/simulator.h"
#include "penstock/stage.h"
#include "penstock/stage_module.h"
#include "penstock/stage_placement.h"
#include "penstock/step_context.h"
#include "penstock/tensor_parallel.h"
#include "penstock/tensor_subclass.h"
#include "penstock/train_config.h"
#include "penstock/trainer.h"
#include "penstock/transformer.h"
#include "penstock/transformer_options.h"
#include "penstock/validate.h"
#include "penstock/world.h"
