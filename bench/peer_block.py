"""The transformer block of block.h: the same names, and the same order of parameters."""
import torch
import torch.nn as nn
import torch.nn.functional as F

HEADS, SEQUENCE = 4, 64


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln1, self.qkv, self.proj = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ln2, self.fc1, self.fc2 = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        rows, length, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(rows, length, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * (d // HEADS) ** -0.5, -1)
        x = x + self.proj(torch.matmul(weights, v).transpose(1, 2).reshape(rows, length, d))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))
