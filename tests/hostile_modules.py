"""Small modules in which the module of a computation is hard to find. Input and output are tensors (2, 6, 8).

One export contains a group of modules side by side; modules get different inputs, and so compute no equal values by
chance.
"""

# mypy: disable-error-code="no-any-return,operator"
# ruff: noqa: E501 - a module to a line
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

SHAPE = (2, 6, 8)
SIZE = 8


class Leaf(nn.Module):
    """A linear layer and an activation function."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, values: Tensor) -> Tensor:
        return torch.tanh(self.linear(values))


class Calls(nn.Module):
    """Calls its modules through a method, by number or name."""

    def __init__(self, forward: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self._function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._function(self, x)


def leaves(count: int) -> nn.ModuleList:
    return nn.ModuleList(Leaf() for _ in range(count))


class Scale(nn.Module):
    """A parameter and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Norm(nn.Module):
    """A root mean square norm made of plain operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.8, 1.2, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    """Attention by hand, by ``scaled_dot_product_attention`` or by einsum."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.query, self.key, self.value, self.out = (nn.Linear(SIZE, SIZE) for _ in range(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.view(2, 6, 2, 4).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
        if self.kind == "fused":
            mixed = F.scaled_dot_product_attention(query, key, value)
        elif self.kind == "causal":
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        elif self.kind == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / 2
            mixed = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), value)
        else:
            mixed = (query @ key.transpose(-1, -2) / math.sqrt(4)).softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(2, 6, 8))


class Residual(nn.Module):
    """The output of the inner modules, plus the input added by this module."""

    def __init__(self, inner: nn.Module, activation: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        total = self.inner(x) + x
        return total if self.activation is None else self.activation(total)


class ConvBlock(nn.Module):
    """A convolution with its norm."""

    def __init__(self, channels: int = 6, *, bend: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm1d(channels)
        self.bend = bend
        assert isinstance(self.norm.running_mean, Tensor)
        assert isinstance(self.norm.running_var, Tensor)
        self.norm.running_mean.normal_(std=0.1)
        self.norm.running_var.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return F.relu(x) if self.bend else x


class Image(nn.Module):
    """Reads the tensor as an image of 16 channels, for which ONNX Runtime uses a blocked layout."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x.reshape(1, 6, 4, 4), x.reshape(1, 6, 4, 4) * 2, x.reshape(1, 6, 4, 4)[:, :4] + 1], 1)
        for module in self.inner:
            x = module(x)
        return x


class ImageBlock(nn.Module):
    """Convolution, norm and activation."""

    def __init__(self, *, bend: bool = True, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.bend = nn.ReLU() if bend else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.bend(self.norm(self.conv(x)))


class Bottleneck(nn.Module):
    """The sum and the activation belong to this module, the convolutions to the blocks."""

    def __init__(self, *, shortcut: bool, bend: bool = True) -> None:
        super().__init__()
        self.first, self.second = ImageBlock(), ImageBlock(bend=False)
        self.shortcut = ImageBlock(bend=False) if shortcut else nn.Identity()
        self.bend = nn.ReLU() if bend else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.bend(self.second(self.first(x)) + self.shortcut(x))


class Buffers(nn.Module):
    """A table of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.sin(torch.arange(48.0)).reshape(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table * 2


class Rotary(nn.Module):
    """Angles computed in a module and used in another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", 1.0 / (100 ** (torch.arange(0, 4) / 4)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * self.rates
        doubled = torch.cat([angles, angles], -1)
        return doubled.cos(), doubled.sin()


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.leaf = Rotary(), Leaf()

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.rotary(x)
        x = self.leaf(x)
        turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
        return x * cos + turned * sin


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Tied(nn.Module):
    """Two modules that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Leaf(), Leaf()
        self.second.linear.weight = self.first.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Inherited(Leaf):
    """Calls an inherited method."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.7


class Subclassed(nn.Linear):
    """A subclass of a torch layer under its own name."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid()


class Delegating(nn.Module):
    """Calls a method of its child instead of the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Leaf()

    def forward(self, x: Tensor) -> Tensor:
        return self.child.forward(x) + self.child.linear(x).exp()


class Functional(nn.Module):
    """Uses the weight of a child without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Leaf()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.child.linear.weight).cos()


class Recursive(nn.Module):
    """Calls itself a level deeper."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.leaf = Leaf()
        self.deeper = Recursive(depth - 1) if depth else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.leaf(x)
        return x.sin() if self.deeper is None else self.deeper(x) + x


class Branching(nn.Module):
    """A Python branch decided by a size."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = Leaf(), Leaf()

    def forward(self, x: Tensor) -> Tensor:
        return self.even(x) * 3 if x.shape[1] % 2 == 0 else self.odd(x)


class Looping(nn.Module):
    """One layer called once a step, with a state from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Leaf()

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        states = []
        for step in range(x.shape[1]):
            state = self.cell(state + x[:, step])
            states.append(state)
        return torch.stack(states, 1)


class InPlace(nn.Module):
    """Writes into its child's output."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = Leaf()

    def forward(self, x: Tensor) -> Tensor:
        y = self.leaf(x).clone()
        y.mul_(1.3).add_(x)
        y[:, 0] = x[:, 1] * 2.2
        return y.relu_() + 0.1


class Experts(nn.Module):
    """A router that weighs the outputs of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(SIZE, 3), leaves(3)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return torch.stack([expert(x) for expert in self.experts], -1).mul(weights[..., None, :]).sum(-1)


class Packed(nn.Module):
    """One packed layer for query, key and value, split afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.leaf = nn.Linear(SIZE, 3 * SIZE), Leaf()

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.qkv(x).chunk(3, -1)
        return self.leaf(first) * second.sigmoid() - third


class LayerScaled(nn.Module):
    """A scale that tools fold into the preceding layer."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.ModuleList([Subdense()])
        self.scale = nn.Parameter(torch.linspace(0.1, 0.4, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return self.leaf[0](x) * self.scale + x


class Subdense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x)


def hooked(module: nn.Module, *, before: bool = False) -> nn.Module:
    """Give a module a hook that computes."""
    if before:
        module.register_forward_pre_hook(lambda _module, args: (args[0] * 1.25 + 0.5,))
    else:
        module.register_forward_hook(lambda _module, _args, output: output * 0.75 + output.abs().sqrt())
    return module


def _shared(self: Any, x: Tensor) -> Tensor:
    return self.left(x) + self.right(x * 1.1)


def _lists(self: Any, x: Tensor) -> Tensor:
    for module in self.layers:
        x = module(x)
    return x


MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "leaf": Leaf,
    "two leaves": lambda: nn.Sequential(Leaf(), Leaf()),
    "nested sequential": lambda: nn.Sequential(nn.Sequential(nn.Sequential(Leaf()), nn.ReLU()), Leaf()),
    "plain layers": lambda: Calls(_lists, layers=nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))),
    "module list": lambda: Calls(_lists, layers=leaves(3)),
    "module dict": lambda: Calls(lambda self, x: self.parts["b"](self.parts["a"](x)),
                                 parts=nn.ModuleDict({"a": Leaf(), "b": Leaf()})),
    "same module twice": lambda: Calls(lambda self, x: self.leaf(self.leaf(x)), leaf=Leaf()),
    "same module in two lists": lambda: (lambda leaf: Calls(_shared, left=nn.Sequential(leaf), right=nn.Sequential(leaf)))(Leaf()),
    "tied weights": Tied,
    "reused with work between": lambda: Calls(lambda self, x: self.leaf(self.leaf(x).exp() * 0.3), leaf=Leaf()),
    "residual": lambda: Residual(Leaf()),
    "residual of residual": lambda: Residual(Residual(Leaf()), torch.tanh),
    "residual and relu": lambda: Residual(Subdense(), F.relu),
    "residual of a parameter": lambda: Residual(Scale()),
    "convolution": ConvBlock,
    "convolution, residual, relu": lambda: Residual(ConvBlock(bend=False), F.relu),
    "convolution and functional relu": lambda: Calls(lambda self, x: F.relu(self.conv(x)), conv=nn.Conv1d(6, 6, 1)),
    "image block": lambda: Image(ImageBlock()),
    "image blocks": lambda: Image(ImageBlock(), ImageBlock(groups=4)),
    "bottleneck": lambda: Image(Bottleneck(shortcut=False)),
    "bottleneck with shortcut": lambda: Image(Bottleneck(shortcut=True)),
    "bottlenecks": lambda: Image(Bottleneck(shortcut=True), Bottleneck(shortcut=False), Bottleneck(shortcut=True)),
    "bottleneck without relu": lambda: Image(Bottleneck(shortcut=False, bend=False)),
    "image and pooling": lambda: Image(ImageBlock(), nn.MaxPool2d(2), ImageBlock(bend=False), nn.AdaptiveAvgPool2d(1)),
    "batch norm first": lambda: Image(nn.BatchNorm2d(16), nn.ReLU(), ImageBlock()),
    "attention": lambda: Attention("by hand"),
    "fused attention": lambda: Attention("fused"),
    "causal attention": lambda: Attention("causal"),
    "einsum attention": lambda: Attention("einsum"),
    "attention of torch": lambda: Calls(lambda self, x: self.attention(x, x, x)[0],
                                        attention=nn.MultiheadAttention(SIZE, 2, batch_first=True)),
    "transformer layer": lambda: nn.TransformerEncoderLayer(SIZE, 2, 16, batch_first=True),
    "einsum": lambda: Calls(lambda self, x: torch.einsum("bsd,btd->bst", self.left(x), self.right(x)), left=Leaf(), right=Leaf()),
    "norm by hand": Norm,
    "norm, layer, norm": lambda: nn.Sequential(Norm(), Leaf(), nn.LayerNorm(SIZE)),
    "layer norm around": lambda: Calls(lambda self, x: self.norm(self.leaf(x) + x), leaf=Leaf(), norm=nn.LayerNorm(SIZE)),
    "functional norm": lambda: Calls(lambda self, x: F.layer_norm(self.leaf(x), (SIZE,)), leaf=Leaf()),
    "group norm": lambda: Calls(lambda self, x: self.norm(x), norm=nn.GroupNorm(3, 6)),
    "softmax outside": lambda: Calls(lambda self, x: F.softmax(self.leaf(x), -1), leaf=Leaf()),
    "gelu by hand": lambda: Calls(lambda self, x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x.pow(3)))) + self.leaf(x), leaf=Leaf()),
    "gelu after bias": lambda: Calls(lambda self, x: F.gelu(self.dense(x)), dense=Subdense()),
    "erf by hand": lambda: Calls(lambda self, x: (lambda y: y * 0.5 * (1.0 + torch.erf(y / math.sqrt(2.0))))(self.dense(x)), dense=Subdense()),
    "gated": Gated,
    "layer scale": LayerScaled,
    "scales in a row": lambda: nn.Sequential(Scale(), Scale(), Leaf(), Scale()),
    "buffers": Buffers,
    "buffers of siblings": lambda: nn.Sequential(Buffers(), Leaf(), Buffers()),
    "rotary": Rotated,
    "constant of the forward": lambda: Calls(lambda self, x: self.leaf(x) + torch.linspace(0, 1, SIZE), leaf=Leaf()),
    "shape arithmetic": lambda: Calls(lambda self, x: self.leaf(x.reshape(x.shape[0] * x.shape[1], -1)).view(*x.shape) / x.shape[-1], leaf=Leaf()),
    "views around": lambda: Calls(lambda self, x: self.leaf(x.transpose(1, 2).flip(1).transpose(1, 2)).flatten(1), leaf=Leaf()),
    "slices and cat": lambda: Calls(lambda self, x: torch.cat([self.left(x[:, :3]), self.right(x[:, 3:])], 1), left=Leaf(), right=Leaf()),
    "packed": Packed,
    "experts": Experts,
    "loop over time": Looping,
    "recurrent": lambda: Calls(lambda self, x: self.rnn(x)[0] * 1.5, rnn=nn.GRU(SIZE, SIZE, batch_first=True)),
    "recursive": lambda: Recursive(3),
    "branch by size": Branching,
    "in place": InPlace,
    "identity": lambda: nn.Sequential(nn.Identity(), Leaf(), nn.Identity(), nn.Dropout(0.5)),
    "identity module of its own": lambda: Calls(lambda self, x: self.same(self.leaf(x)) + 1, leaf=Leaf(), same=Calls(lambda _self, x: x)),
    "inherited": Inherited,
    "subclass of a layer": lambda: Calls(lambda self, x: self.layer(x) * x, layer=Subclassed(SIZE, SIZE)),
    "forward of a child": Delegating,
    "weight of a child": Functional,
    "hook": lambda: Calls(lambda self, x: self.leaf(x) + 1, leaf=hooked(Leaf())),
    "hook before": lambda: Calls(lambda self, x: self.leaf(x) + 1, leaf=hooked(Leaf(), before=True)),
    "hooks on the way": lambda: hooked(Calls(_lists, layers=nn.Sequential(hooked(Leaf()), hooked(Leaf(), before=True)))),
    "hook on a plain layer": lambda: Calls(lambda self, x: self.layer(x).neg(), layer=hooked(nn.Linear(SIZE, SIZE))),
    "embedding": lambda: Calls(lambda self, x: self.table((x * 3).abs().long().clamp(max=9)[..., 0]) + x, table=nn.Embedding(10, SIZE)),
    "gather": lambda: Calls(lambda self, x: self.leaf(x)[torch.arange(2), torch.tensor([1, 4])], leaf=Leaf()),
    "where": lambda: Calls(lambda self, x: torch.where(x > 0, self.left(x), self.right(x)), left=Leaf(), right=Leaf()),
    "masked": lambda: Calls(lambda self, x: self.leaf(x).masked_fill(x < 0, -2.5), leaf=Leaf()),
    "topk": lambda: Calls(lambda self, x: self.leaf(x).topk(3, -1)[0] * 2, leaf=Leaf()),
    "equal siblings": lambda: Calls(lambda self, x: self.left(x) + self.right(x) * 2, left=Calls(lambda _self, x: x.sin()), right=Calls(lambda _self, x: x.sin())),
    "padding": lambda: Calls(lambda self, x: self.conv(F.pad(x, (2, 2), value=0.5)), conv=nn.Conv1d(6, 6, 3)),
    "transposed convolution": lambda: Calls(lambda self, x: self.conv(x).clamp(-1, 1), conv=nn.ConvTranspose1d(6, 4, 3)),
    "interpolation": lambda: Calls(lambda self, x: F.interpolate(self.leaf(x), scale_factor=2.0, mode="nearest"), leaf=Leaf()),
    "weights made in the forward": lambda: Calls(lambda self, x: x @ (self.leaf.linear.weight * 2).t() + self.leaf(x), leaf=Leaf()),
    "weight norm": lambda: Calls(lambda self, x: self.layer(x).tanh(), layer=nn.utils.parametrizations.weight_norm(nn.Linear(SIZE, SIZE))),
}  # fmt: skip

GROUPS: Mapping[str, tuple[str, ...]] = {
    f"{first}": tuple(list(MODULES)[first : first + 20]) for first in range(0, len(MODULES), 20)
}
"""Groups of modules that are exported together."""


class Group(nn.Module):
    """Modules side by side."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules.values())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(torch.roll(x, number, -1) * (1 + number / 7)) for number, part in enumerate(self.parts))


def make_group(name: str) -> Group:
    """Build the modules of a group with distinct weights."""
    torch.manual_seed(int(name))
    return Group({member: MODULES[member]() for member in GROUPS[name]}).eval()


def group_inputs() -> list[Tensor]:
    """Return the input of every group."""
    return [torch.randn(SHAPE, generator=torch.Generator().manual_seed(7))]
