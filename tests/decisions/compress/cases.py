"""Networks of every shape that compression has to follow, and posteriors of them made by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import knowable as kn


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 9), nn.Sigmoid(), nn.Linear(9, 3))


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.Tanh()),
        *(nn.AvgPool2d(2, stride=1, padding=1), nn.AvgPool2d(2, stride=1), nn.Flatten(), nn.Linear(32, 12)),
        *(nn.ReLU(inplace=True), nn.Linear(12, 3)),
    )


def batch_norm_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.PReLU(6), nn.Conv2d(6, 6, 3, groups=6, padding=1)),
        *(nn.BatchNorm2d(6), nn.ReLU6(), nn.Conv2d(6, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
    )


class Residual(nn.Module):
    """Two blocks with skips; the first has a projection, the second starts and ends in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 5, 3, padding=1)
        self.one, self.two = nn.Conv2d(5, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.skip, self.norm = nn.Conv2d(5, 6, 1), nn.BatchNorm2d(6)
        self.three, self.four = nn.Conv2d(6, 4, 1), nn.Conv2d(4, 6, 1)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = self.relu(self.norm(self.two(F.relu(self.one(x)))) + self.skip(x))
        out = self.four(F.gelu(self.three(x)))
        out += x
        return self.head(self.relu(out).mean((2, 3)))


class Dense(nn.Module):
    """Every layer reads all before it, the input too; sizes written down in a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(5, 4, 3, padding=1, padding_mode="reflect")
        self.third = nn.Conv2d(9, 4, 3)
        self.head = nn.Linear(4 * 6 * 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        one = torch.cat([x, F.relu(self.first(x))], 1)
        two = torch.cat((one, torch.relu(self.second(one))), dim=1)
        return self.head(F.elu(self.third(two)).view(-1, 4 * 6 * 6))


class UNet(nn.Module):
    """Down and up again, with skips over both ways of going up."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.up, self.mix = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(8, 5, 3, padding=1)
        self.out = nn.Conv2d(10, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.down(x))
        two = F.leaky_relu(self.deep(F.max_pool2d(one, 2)), 0.1)
        up = torch.cat([self.up(two), one], 1)
        mixed = torch.sigmoid(self.mix(up))
        wide = F.interpolate(two, size=mixed.shape[-2:], mode="nearest")[:, :5]
        return self.out(torch.cat([mixed, wide], 1))


class Views(nn.Module):
    """Flattened in every way there is, with a product of branches and a gate of squeeze-and-excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.squeeze, self.excite = nn.Linear(6, 4), nn.Linear(4, 6)
        self.a, self.b, self.c = nn.Linear(6 * 36, 5), nn.Linear(6, 5), nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1).flatten(1)))))
        x = x * gate.unsqueeze(-1).unsqueeze(-1)
        b, c, h, w = x.shape
        flat = self.a(x.reshape(b, c * h * w))
        pooled = self.b(F.adaptive_max_pool2d(x, 1).squeeze())
        last = self.c(x.permute(0, 2, 3, 1)).amax(dim=(1, 2))
        return self.head(torch.tanh(flat) * 2.0 - pooled + last.view(x.size(0), -1))


class Recurrent(nn.Module):
    """Tokens through a linear layer, an LSTM and a normalisation over features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Linear(3, 6), nn.LSTM(6, 5, batch_first=True)
        self.wide, self.norm, self.head = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(torch.relu(self.embed(x)))
        return self.head(self.norm(torch.relu(self.wide(states))).mean(1))


class Branching(nn.Module):
    """A part that looks at values cannot be followed; what lies around it can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(7, 6), Looking(), nn.Linear(6, 3)
        self.before = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.inner(self.before(torch.relu(self.first(x))))))


class Looking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.mean() > 0 else -x


class Shared(nn.Module):
    """One layer used twice, and one overwritten in place while it is still needed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.head = nn.Linear(7, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.relu(x)
        return self.head(self.twice(self.twice(y)) + x)


class Tokens(nn.Module):
    """Linear layers over tokens, a transposition, and a mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.over_tokens = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.embed(x))
        x = x + self.mix(x)
        x = self.over_tokens(x.transpose(1, 2)).transpose(1, 2)
        return self.head(F.silu(x).mean(dim=1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (7,)),
    "lenet": (lenet, (1, 8, 8)),
    "batch_norm_cnn": (batch_norm_cnn, (1, 8, 8)),
    "residual": (Residual, (1, 8, 8)),
    "dense": (Dense, (1, 8, 8)),
    "unet": (UNet, (1, 8, 8)),
    "views": (Views, (1, 8, 8)),
    "recurrent": (Recurrent, (4, 3)),
    "branching": (Branching, (7,)),
    "shared": (Shared, (7,)),
    "tokens": (Tokens, (4, 3)),
}


def make(name: str, *, generator: torch.Generator) -> tuple[nn.Module, Tensor]:
    """A network in evaluation mode, with statistics and biases that are not those of a start, and a batch for it."""
    kind, shape = NETWORKS[name]
    net = kind().eval()
    with torch.no_grad():
        for key, value in net.named_buffers():
            if key.endswith(("mean", "var")):
                value.copy_(torch.rand(value.shape, generator=generator) + 0.2)
        for value in net.parameters():
            if value.dim() == 1:
                value.copy_(torch.randn(value.shape, generator=generator))
    return net, torch.randn((5, *shape), generator=generator)


def random_masks(net: nn.Module, share: float, *, generator: torch.Generator) -> dict[str, Tensor]:
    """True for weights that stay: single ones, and whole rows and columns, go with about this probability."""
    masks = {}
    for name, value in net.named_parameters():
        if value.dim() >= 2:
            single = torch.rand(value.shape, generator=generator) >= share
            whole = (value.shape[0], 1), (1, value.shape[1])
            rows, columns = (torch.rand(shape, generator=generator) >= share / 2 for shape in whole)
            masks[name] = single & (rows & columns).view(*value.shape[:2], *[1] * (value.dim() - 2))
    return masks


def pruned(net: nn.Module, masks: dict[str, Tensor]) -> nn.Module:
    """The network with zeros where the masks say so; changed in place."""
    with torch.no_grad():
        for name, value in net.named_parameters():
            if name in masks:
                value *= masks[name]
    return net


def posterior_of(net: nn.Module, masks: dict[str, Tensor], *, spread: float = 0.01) -> kn.DiagonalNormal:
    """A posterior at the network's weights: narrow where the masks are True, as wide as can be elsewhere."""
    model = kn.Model(net, kn.Categorical(), random=list(masks))
    values = dict(net.named_parameters())
    loc = {name: values[name].detach() for name in masks}
    narrow = {name: spread * value.abs().mean().clamp_min(1e-3) for name, value in loc.items()}
    sure = {name: narrow[name].minimum(0.5 * value.abs()).clamp_min(1e-12) for name, value in loc.items()}
    scale = {name: torch.where(mask, sure[name], 100 * loc[name].abs() + 1) for name, mask in masks.items()}
    points = {name: value.detach() for name, value in values.items() if name not in masks}
    return kn.DiagonalNormal(model, loc, scale, points=points)
