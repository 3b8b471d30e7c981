#!/usr/bin/env python3
"""Python's FakeTensorMode on the 12-layer transformer of dispatch_bench: forward and backward with shapes only, one core.
Prints "fake_ms <median>". Run by dispatch_bench --peer; requires PyTorch."""
import os
import statistics
import time

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

os.sched_setaffinity(0, {0})
torch.set_num_threads(1)


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.proj = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.fc1, self.fc2 = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * (width // self.heads) ** -0.5, -1)
        x = x + self.proj(torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(self.ln2(x))))


times = []
with FakeTensorMode():
    model = torch.nn.Sequential(*[Block(256, 4) for _ in range(12)])
    x, target = torch.empty(4, 64, 256), torch.empty(4, 64, 256)
    for step in range(14):
        model.zero_grad()
        begin = time.perf_counter()
        torch.nn.functional.mse_loss(model(x), target).backward()
        if step >= 3:  # its cache is warm by then
            times.append((time.perf_counter() - begin) * 1e3)
print("fake_ms", statistics.median(times))
