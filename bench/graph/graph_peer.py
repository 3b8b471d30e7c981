#!/usr/bin/env python3
"""Python's AOT autograd on the model of graph_bench: one process on one core, with a no-op compiler.
Prints "capture_us N nodes N eager_ms E step_ms S loss L norm G". Run by graph_bench --peer; requires PyTorch."""
import argparse
import os
import statistics
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_module, make_boxed_func
from torch._functorch.partitioners import default_partition

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from peer_block import SEQUENCE, Block

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--repeats", type=int, default=3)
parser.add_argument("--steps", type=int, default=10)
arguments = parser.parse_args()
os.sched_setaffinity(0, {0})
torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[Block(arguments.width) for _ in range(layers)])

    def forward(self, x, target):
        return F.mse_loss(self.blocks(x), target)


generator = torch.Generator().manual_seed(1)
x, target = (torch.randn(arguments.batch, SEQUENCE, arguments.width, generator=generator) for _ in range(2))


def capture(model):
    """Returns the compiled model, by how many seconds its first call exceeded the second, and the number of joint nodes."""
    seen = {}

    def partition(joint, inputs, **options):
        seen["nodes"] = len(joint.graph.nodes)
        return default_partition(joint, inputs, **options)

    def as_it_is(graph, inputs):
        return make_boxed_func(graph.forward)

    compiled = aot_module(model, fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition)
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        loss = compiled(x, target)
        times.append(time.perf_counter() - begin)
    loss.backward()
    return compiled, times[0] - times[1], seen["nodes"]


def step(model, call):
    for parameter in model.parameters():
        parameter.grad = None
    begin = time.perf_counter()
    loss = call(x, target)
    loss.backward()
    return time.perf_counter() - begin, float(loss.detach())


capture(Model(1))  # imports and first registrations
seconds = []
for _ in range(arguments.repeats):
    model = Model(arguments.layers)
    compiled, spent, nodes = capture(model)
    seconds.append(spent)
for call in (model, compiled):
    for _ in range(3):
        step(model, call)
eager, replayed = [], []
for _ in range(arguments.steps):
    eager.append(step(model, model)[0])
    spent, loss = step(model, compiled)
    replayed.append(spent)
norm = sum(float(p.grad.double().pow(2).sum()) for p in model.parameters()) ** 0.5
print(
    f"capture_us {1e6 * statistics.median(seconds):.1f} nodes {nodes} eager_ms {1e3 * statistics.median(eager):.3f} "
    f"step_ms {1e3 * statistics.median(replayed):.3f} loss {loss:.6f} norm {norm:.6f}"
)
