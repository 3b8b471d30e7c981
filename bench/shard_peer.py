#!/usr/bin/env python3
"""Python's fully_shard on the model of shard_bench: two ranks, one core each, over Gloo, AdamW (foreach).
Prints "step_ms median loss L norm G forward F backward B update U gather A reduce R copies C". Run by shard_bench --peer; requires PyTorch."""
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
parser.add_argument("--d", type=int, default=256)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--batch", type=int, default=8, help="rows of all ranks and microbatches together")
parser.add_argument("--accumulate", type=int, default=1, help="microbatches; parameters stay gathered until the last")
parser.add_argument("--reshard", type=int, default=1)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--port", type=int, default=29640)
arguments = parser.parse_args()
WARMUP, WORLD = 3, 2


class Spent:
    """Time spent in calls, excluding nested calls that are counted elsewhere."""

    def __init__(self):
        self.parts, self.inside = {"gather": 0.0, "reduce": 0.0, "copies": 0.0}, [0.0]

    def wrap(self, part, call):
        def timed(*args, **kwargs):
            begin = time.perf_counter()
            self.inside.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                whole = time.perf_counter() - begin
                self.parts[part] += whole - self.inside.pop()
                self.inside[-1] += whole

        return timed

    def watch(self):
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as calls, _fsdp_param_group as group

        for name, part in {"foreach_all_gather": "gather", "foreach_all_gather_copy_out": "copies", "foreach_reduce": "reduce"}.items():
            setattr(group, name, self.wrap(part, getattr(calls, name)))
        calls.foreach_reduce_scatter_copy_in = self.wrap("copies", calls.foreach_reduce_scatter_copy_in)
        torch.ops.fsdp.all_gather_copy_in = self.wrap("copies", torch.ops.fsdp.all_gather_copy_in)
        calls.DefaultAllGather.__call__ = self.waiting("gather", calls.DefaultAllGather.__call__)
        calls.DefaultReduceScatter.__call__ = self.waiting("reduce", calls.DefaultReduceScatter.__call__)

    def waiting(self, part, call):
        class Work:
            def __init__(work, inner):
                work.inner = inner

            def wait(work, *args):
                return self.wrap(part, work.inner.wait)(*args)

            def __getattr__(work, name):
                return getattr(work.inner, name)

        def start(*args, **kwargs):
            inner = self.wrap(part, call)(*args, **kwargs)
            return inner if inner is None else Work(inner)

        return start


def rank_main(rank):
    spent = Spent()
    spent.watch()
    os.sched_setaffinity(0, {rank % os.cpu_count()})
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(arguments.port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*[Block(arguments.d) for _ in range(arguments.layers)], nn.LayerNorm(arguments.d))
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in list(model)[:-1]:
        fully_shard(block, mesh=mesh, reshard_after_forward=bool(arguments.reshard))
    fully_shard(model, mesh=mesh, reshard_after_forward=bool(arguments.reshard))
    generator = torch.Generator().manual_seed(1)
    shape = (arguments.batch, SEQUENCE, arguments.d)
    x, target = (torch.randn(shape, generator=generator).chunk(WORLD)[rank].chunk(arguments.accumulate) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    times, phases, first = [], [], None
    for step in range(WARMUP + arguments.steps):
        dist.barrier()
        if step == WARMUP:
            spent.parts = dict.fromkeys(spent.parts, 0.0)
        begin = time.perf_counter()
        forward = backward = loss_sum = 0.0
        for i in range(arguments.accumulate):
            last = i == arguments.accumulate - 1
            if arguments.accumulate > 1:
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
            a = time.perf_counter()
            loss = F.mse_loss(model(x[i]), target[i]) / arguments.accumulate
            b = time.perf_counter()
            loss.backward()
            c = time.perf_counter()
            forward, backward, loss_sum = forward + b - a, backward + c - b, loss_sum + float(loss.detach())
        if step == 0:
            first = torch.tensor([loss_sum / WORLD, sum(float(p.grad.to_local().double().pow(2).sum()) for p in model.parameters())], dtype=torch.double)
        d = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        update = time.perf_counter() - d
        dist.barrier()
        if step >= WARMUP:
            times.append(time.perf_counter() - begin)
            phases.append((forward, backward, update))
    dist.all_reduce(first)
    if rank == 0:
        f, b, u = (1e3 * statistics.median(phase) for phase in zip(*phases))
        parts = " ".join(f"{name} {1e3 * seconds / arguments.steps:.2f}" for name, seconds in spent.parts.items())
        print(f"step_ms {1e3 * statistics.median(times):.3f} loss {float(first[0]):.6f} norm {float(first[1]) ** 0.5:.6f} forward {f:.2f} backward {b:.2f} update {u:.2f} {parts}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(rank_main, nprocs=WORLD, start_method="fork")
