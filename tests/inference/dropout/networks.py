"""Networks with dropout layers at the places that matter."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knowable.testing.networks import LastOfLSTM


def perceptron(rate: float | None = 0.2, *, inputs: int = 3, width: int = 6, outputs: int = 1) -> nn.Sequential:
    """Two hidden layers, each followed by dropout (None: by nothing)."""
    layers: list[nn.Module] = []
    for first, second in ((inputs, width), (width, width)):
        layers += [nn.Linear(first, second), nn.ReLU()]
        layers += [] if rate is None else [nn.Dropout(rate)]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def images(*, groups: int = 1) -> nn.Sequential:
    """For ``(rows, 1, 8, 8)``: channels are dropped before a convolution, and before they are flattened."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(0.3), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 2, groups=groups), nn.Dropout2d(0.2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2),
    )  # fmt: skip


class Residual(nn.Module):
    """Dropout whose output is added to something: no mask on weights is the same."""

    def __init__(self, rate: float = 0.4):
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(3, 4), nn.Linear(4, 1), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden + self.drop(hidden))


class Functional(nn.Module):
    """Dropout in code of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(torch.tanh(self.first(x)), 0.5, self.training))


class Attention(nn.Module):
    """Attention over short sequences, its dropout in the weights of the attention; time first inside."""

    def __init__(self, rate: float = 0.3, *, batch_first: bool = True):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=rate, batch_first=batch_first)
        self.head, self.batch_first = nn.Linear(4, 1), batch_first

    def forward(self, x: Tensor) -> Tensor:
        tokens = x if self.batch_first else x.transpose(0, 1)
        out = self.attention(tokens, tokens, tokens)[0]
        return self.head(out.mean(1 if self.batch_first else 0))


class Branches(nn.Module):
    """One dropout layer that feeds two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(3, 4), nn.Dropout(0.3)
        self.left, self.right = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.first(x)))
        return self.left(hidden) * self.right(hidden)


class Recurrent(nn.Module):
    """Two layers of an LSTM with dropout between them, before them and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Dropout(0.1), nn.Dropout(0.3)
        self.lstm = nn.LSTM(2, 4, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.after(self.lstm(self.before(x))[0][:, -1]))


class CellLoop(nn.Module):
    """A recurrent cell in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(2, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 4)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.head(state)


__all__ = [
    "Attention",
    "Branches",
    "CellLoop",
    "Functional",
    "LastOfLSTM",
    "Recurrent",
    "Residual",
    "images",
    "perceptron",
]
