#!/usr/bin/env python3
"""Python's DTensor on the operators of dtensor_bench: microseconds per call, distributed and plain, one core per rank.
Prints a line "name distributed plain" for each. Run by dtensor_bench --peer; requires PyTorch."""
import argparse
import os
import statistics
import time

os.environ.setdefault("USE_LIBUV", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--world", type=int, default=2)
parser.add_argument("--grad", action="store_true")
arguments = parser.parse_args()


def per_call(call, calls=300):
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def rank_main(rank, port):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    os.sched_setaffinity(0, {rank % os.cpu_count()})
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=arguments.world)
    mesh = init_device_mesh("cpu", (arguments.world,))

    def spread(shape, placement):
        return distribute_tensor(torch.randn(*shape), mesh, [placement]).requires_grad_(arguments.grad)

    x, y = spread((16, 16), Shard(0)), spread((16, 16), Shard(0))
    whole, weight, bias = spread((16, 16), Replicate()), spread((16, 16), Shard(0)), spread((16,), Shard(0))
    lx, ly, lwhole, lweight, lbias = (t.to_local().detach().clone().requires_grad_(arguments.grad) for t in (x, y, whole, weight, bias))
    linear = torch.nn.functional.linear
    pairs = {
        "add": (lambda: x + y, lambda: lx + ly),
        "mul_scalar": (lambda: x * 1.5, lambda: lx * 1.5),
        "linear": (lambda: linear(whole, weight, bias), lambda: linear(lwhole, lweight, lbias)),
        "detach": (lambda: x.detach(), lambda: lx.detach()),
    }
    for name, (distributed, plain) in pairs.items():
        per_call(distributed, 200), per_call(plain, 200)
        dist.barrier()
        blocks = [(per_call(distributed), per_call(plain)) for _ in range(21)]
        if rank == 0:
            print(name, *(round(statistics.median(column), 3) for column in zip(*blocks)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, port)) for rank in range(arguments.world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert all(process.exitcode == 0 for process in ranks)
