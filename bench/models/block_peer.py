#!/usr/bin/env python3
"""Blocks and models of bench/models in PyTorch, eager and compiled: one line per mode, milliseconds per step.

    python3 bench/models/block_peer.py state_space --batch 16
    python3 bench/models/block_peer.py experts --batch 32 --experts 64 --expert-width 512
    python3 bench/models/block_peer.py mamba2-130m --batch 16          # presets of penstock train, head tied
    python3 bench/models/block_peer.py mixtral-small --batch 16 --modes compile

Compare with state_space_bench, expert_bench and train_bench on the same device. A step of a block is its forward and
backward, a step of a model also clipping and AdamW. bfloat16 autocast on CUDA; --device cpu runs in float32, to check."""
import argparse
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as fn


class Residual(nn.Module):
    """x + block(norm(x)); a block may also return a loss."""

    def __init__(self, block, width):
        super().__init__()
        self.norm, self.block = nn.RMSNorm(width, eps=1e-5), block

    def forward(self, x):
        added = self.block(self.norm(x))
        if isinstance(added, tuple):
            return x + added[0], added[1]
        return x + added, x.new_zeros(())


class StateSpace(nn.Module):
    """Selective scan in chunks by matrix products."""

    def __init__(self, width, state=128, head=64, chunk=128):
        super().__init__()
        inner = 2 * width
        self.sizes = [inner, inner, state, state, inner // head]
        self.state, self.head, self.chunk, self.heads = state, head, chunk, inner // head
        self.project = nn.Linear(width, sum(self.sizes), bias=False)
        self.taps = nn.Conv1d(inner + 2 * state, inner + 2 * state, 4, groups=inner + 2 * state, padding=3)
        self.step_bias = nn.Parameter(torch.full((self.heads,), -4.0))
        self.decay_log = nn.Parameter(torch.linspace(1, 16, self.heads).log())
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.norm, self.output = nn.RMSNorm(inner, eps=1e-5), nn.Linear(inner, width, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        chunks = length // self.chunk
        gate, value, key, query, step = self.project(x).split(self.sizes, -1)
        mixed = self.taps(torch.cat([value, key, query], -1).transpose(1, 2))[..., :length].transpose(1, 2)
        value, key, query = fn.silu(mixed).split(self.sizes[1:4], -1)
        step = fn.softplus(step.float() + self.step_bias)
        # [batch, chunks, heads, tokens of a chunk]
        sums = (step * -self.decay_log.exp()).view(batch, chunks, self.chunk, self.heads).transpose(2, 3).cumsum(-1)
        values = value.view(batch, chunks, self.chunk, self.heads, self.head)
        inputs = (values * step.view(batch, chunks, self.chunk, self.heads, 1)).to(value.dtype).transpose(2, 3)
        key, query = (part.view(batch, chunks, 1, self.chunk, self.state) for part in (key, query))
        causal = torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=x.device).tril()
        decays = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(~causal, float("-inf")).exp()
        inside = ((query @ key.transpose(-1, -2)) * decays).to(value.dtype) @ inputs
        # The state after each chunk, then what a token reads of the state before its chunk.
        last = (sums[..., -1:] - sums).exp().unsqueeze(-1).to(value.dtype)
        added = (key.transpose(-1, -2) @ (inputs * last)).float()
        carried, states = torch.zeros_like(added[:, 0]), []
        for chunk in range(chunks):
            states.append(carried)
            carried = carried * sums[:, chunk, :, -1].exp()[..., None, None] + added[:, chunk]
        read = (query @ torch.stack(states, 1).to(value.dtype)) * sums.exp().unsqueeze(-1).to(value.dtype)
        y = (inside + read).transpose(2, 3) + values * self.skip.view(-1, 1).to(value.dtype)
        return self.output(self.norm(y.reshape(batch, length, -1) * fn.silu(gate)))


class Experts(nn.Module):
    """Top-k routing without dropped tokens; products of sorted rows by torch's grouped product on CUDA."""

    def __init__(self, width, experts, top_k, expert_width):
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.router = nn.Linear(width, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, width, 2 * expert_width) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, expert_width, width) * 0.02)

    def product(self, rows, weight, ends):
        if rows.is_cuda:
            return torch._grouped_mm(rows.bfloat16(), weight.bfloat16(), offs=ends)
        bounds = [0] + ends.tolist()
        return torch.cat([rows[a:b] @ weight[i] for i, (a, b) in enumerate(zip(bounds, bounds[1:]))])

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.router(tokens).float()
        scores = logits.softmax(-1)
        weights, choices = scores.topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = choices.flatten().argsort(stable=True)
        counts = (choices.flatten()[:, None] == torch.arange(self.experts, device=x.device)).sum(0)
        ends = counts.cumsum(0).int()
        source = order // self.top_k
        gate, up = self.product(tokens[source], self.gate_up, ends).chunk(2, -1)
        rows = self.product(fn.silu(gate) * up, self.down, ends).float() * weights.flatten()[order, None]
        hidden = torch.zeros_like(tokens, dtype=torch.float32).index_add(0, source, rows)
        balance = self.experts * (counts / choices.numel() * scores.mean(0)).sum()
        square = logits.logsumexp(-1).square().mean()
        return hidden.view_as(x).to(x.dtype), 0.01 * balance + 0.001 * square


class Attention(nn.Module):
    def __init__(self, width, heads, context):
        super().__init__()
        self.heads, self.project, self.output = heads, nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(context).float(), 10000 ** (-torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def turned(self, x):
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * self.cosine - b * self.sine, a * self.sine + b * self.cosine], -1).to(x.dtype)

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        mixed = fn.scaled_dot_product_attention(self.turned(query), self.turned(key), value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Embedding, blocks, norm, and a head that uses the embedding's weight. Returns the loss."""

    def __init__(self, blocks, width, vocabulary):
        super().__init__()
        self.embed, self.blocks, self.norm = nn.Embedding(vocabulary, width), nn.ModuleList(blocks), nn.RMSNorm(width, eps=1e-5)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens):
        x, losses = self.embed(tokens), 0
        for block in self.blocks:
            x, loss = block(x)
            losses = losses + loss
        logits = fn.linear(self.norm(x), self.embed.weight)
        return fn.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()) + losses


def made(what, options):
    width = options.width
    if what == "state_space":
        return Residual(StateSpace(width), width)
    if what == "experts":
        return Residual(Experts(width, options.experts, options.top_k, options.expert_width), width)
    if what == "mamba2-130m":
        return Model([Residual(StateSpace(width), width) for _ in range(24)], width, options.vocabulary)
    layers = []
    for _ in range(12):
        layers += [Residual(Attention(width, width // 64, options.length), width), Residual(Experts(width, 8, 2, 2048), width)]
    return Model(layers, width, options.vocabulary)


def measure(what, mode, options):
    torch.manual_seed(0)
    device, is_model = torch.device(options.device), what in ("mamba2-130m", "mixtral-small")
    module = made(what, options).to(device)
    call = torch.compile(module) if mode == "compile" else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=device.type == "cuda") if is_model else None
    if is_model:
        given = torch.randint(0, options.vocabulary, (options.batch, options.length), device=device)
    else:
        given = torch.randn(options.batch, options.length, options.width, device=device, requires_grad=True)

    def step():
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            result = call(given)
        loss = result if is_model else result[0].float().mean() + result[1]
        loss.backward()
        if is_model:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
            optimizer.step()
        module.zero_grad(set_to_none=True)
        given.grad = None

    def elapsed():
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        wait()
        begin = time.perf_counter()
        step()
        wait()
        return time.perf_counter() - begin

    for _ in range(4):
        elapsed()
    seconds = statistics.median(elapsed() for _ in range(options.rounds))
    tokens = options.batch * options.length
    print(f"{what}, {mode}: {tokens} tokens, {seconds * 1e3:.2f} ms, {tokens / seconds / 1e3:.1f} thousand tokens/s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["state_space", "experts", "mamba2-130m", "mixtral-small"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--modes", default="eager,compile")
    for name, default in {"batch": 16, "length": 1024, "width": 768, "experts": 64, "top-k": 2, "expert-width": 512,
                          "vocabulary": 50304, "rounds": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    for mode in options.modes.split(","):
        measure(options.what, mode, options)


if __name__ == "__main__":
    main()
