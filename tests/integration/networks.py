"""Small networks with the structure of those of ``transformers`` and ``peft``."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """The linear layer of GPT-2: its weight is ``(in, out)`` and multiplied by ``addmm``; nothing resets it."""

    def __init__(self, out: int, inputs: int) -> None:
        super().__init__()
        self.nf = out
        self.weight = nn.Parameter(torch.empty(inputs, out).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class LoRALinear(nn.Module):
    """A frozen linear layer with an update of low rank, of which the second factor begins at zero."""

    def __init__(self, inputs: int, out: int, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, out).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, out, bias=False)})
        nn.init.kaiming_uniform_(self.lora_A["default"].weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class TinyGPT(nn.Module):
    """Embeddings, a block with layer normalisation and two ``Conv1D``, and a head."""

    def __init__(self, width: int = 8, classes: int = 2) -> None:
        super().__init__()
        self.wte, self.ln = nn.Embedding(10, width), nn.LayerNorm(width)
        self.c_fc, self.c_proj = Conv1D(2 * width, width), Conv1D(width, 2 * width)
        self.score = nn.Linear(width, classes, bias=False)
        for layer in (self.wte, self.score):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.wte(ids)
        hidden = hidden + self.c_proj(torch.tanh(self.c_fc(self.ln(hidden))))
        return self.score(hidden.mean(1))
