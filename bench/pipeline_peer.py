#!/usr/bin/env python3
"""Python's torch.distributed.pipelining on the model of pipeline_bench: two ranks, one core each, over Gloo.
Prints "step_ms median loss L norm G". Run by pipeline_bench --peer; requires PyTorch."""
import argparse
import os
import statistics
import time

os.environ.setdefault("USE_LIBUV", "0")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

from peer_block import SEQUENCE, Block

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--schedule", default="1F1B")
parser.add_argument("--d", type=int, default=256)
parser.add_argument("--mb", type=int, default=1)
parser.add_argument("--nmb", type=int, default=8)
parser.add_argument("--steps", type=int, default=15)
parser.add_argument("--port", type=int, default=29620)
arguments = parser.parse_args()
BLOCKS, WARMUP = 8, 3


def rank_main(rank):
    os.sched_setaffinity(0, {rank % os.cpu_count()})
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(arguments.port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    from torch.distributed.pipelining import PipelineStage, schedules

    single = arguments.schedule in ("GPipe", "1F1B")
    count = 2 if single else 4
    mine = [rank] if single else [rank, 3 - rank] if arguments.schedule in ("ZBVZeroBubble", "DualPipeV") else [rank, rank + 2]
    torch.manual_seed(0)
    blocks = [Block(arguments.d) for _ in range(BLOCKS)]
    per_stage = BLOCKS // count
    shape = (arguments.mb, SEQUENCE, arguments.d)
    stages = [
        PipelineStage(
            nn.Sequential(*blocks[i * per_stage : (i + 1) * per_stage]), i, count, torch.device("cpu"),
            input_args=(torch.empty(shape, requires_grad=i > 0),), output_args=(torch.empty(shape, requires_grad=True),),
        )
        for i in mine
    ]
    kind = schedules.get_schedule_class(arguments.schedule)
    schedule = kind(stages[0] if single else stages, arguments.nmb, loss_fn=F.mse_loss)
    generator = torch.Generator().manual_seed(1)
    rows = arguments.mb * arguments.nmb
    x, target = (torch.randn(rows, SEQUENCE, arguments.d, generator=generator) for _ in range(2))
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    times = []
    for step in range(WARMUP + arguments.steps):
        for parameter in parameters:
            parameter.grad = None
        dist.barrier()
        begin, losses = time.perf_counter(), []
        schedule.step(*((x,) if 0 in mine else ()), **(dict(target=target, losses=losses) if count - 1 in mine else {}))
        dist.barrier()
        if step >= WARMUP:
            times.append(time.perf_counter() - begin)
    sums = torch.tensor([sum(float(p.grad.double().pow(2).sum()) for p in parameters), float(sum(losses) / len(losses)) if losses else 0.0], dtype=torch.double)
    dist.all_reduce(sums)
    if rank == 0:
        print(f"step_ms {statistics.median(times) * 1e3:.3f} loss {float(sums[1]):.6f} norm {float(sums[0].sqrt()):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(rank_main, nprocs=2, start_method="fork")
