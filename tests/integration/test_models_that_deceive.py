"""Models made to deceive: their traced graphs depend on hidden constants.

Each model computes correctly in PyTorch, and its trace freezes a size, a value or the state of an earlier call. A
verified file is correct at every size and value tried here or bounded to valid sizes; else the model is refused, or a
note names the line or the attribute. No file is wrong silently.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.errors import ExportError, UsageError, VerificationError, WinMLError
from winml.modelkit.export.records import ExportedPart
from winml.modelkit.ort.sessions import Session

Outcome = Literal["right", "bounded", "refused", "noted", "silent"]
Tensors = Mapping[str, torch.Tensor]

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 50, 64, 65, 101, 130)
TOKENS = {"x": {1: "tokens"}}


class Record:
    """An object that a module holds."""

    last: Any = 1.0


class Deceiver(nn.Module):
    """State that the deceiving models keep between calls."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.other, self.conv = nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv1d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("is_set", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(4))
        self.cached: Any = None
        self.tables: dict[Any, torch.Tensor] = {}
        self.seen: list[Any] = []
        self.record = Record()
        self.eval()


@dataclass(frozen=True)
class Case:
    """A model, its export options, and the expected outcomes."""

    forward: Callable[..., torch.Tensor]
    outcomes: tuple[Outcome, ...]
    inputs: Tensors
    axes: Mapping[str, Mapping[int, str]]
    exporter: str
    values: tuple[Tensors, ...] = field(default=())
    """Inputs at which the file must be correct as well, beside other sizes."""


CASES: list[Case] = []


def deceives(
    *outcomes: Outcome,
    exporter: str = "torchscript",
    axes: Mapping[str, Mapping[int, str]] | None = None,
    values: tuple[Tensors, ...] = (),
    **inputs: torch.Tensor,
) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    """Register a forward as a case; any of its outcomes is accepted, and none is silent."""

    def add(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        torch.manual_seed(1)
        passed = inputs or {"x": torch.randn(2, 6, 4)}
        CASES.append(Case(forward, outcomes, passed, TOKENS if axes is None else axes, exporter, values))
        return forward

    return add


# --- Sizes that Python takes for numbers.


@deceives("refused")
def pieces_by_split(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Cuts a row into pieces; the trace contains only one piece."""
    return torch.cat([self.linear(piece) + piece.mean(1, keepdim=True) for piece in x.split(32, 1)], 1)


@deceives("bounded")
def pieces_by_range(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Cuts a row into pieces by index."""
    pieces = [x[:, at : at + 32] for at in range(0, x.shape[1], 32)]
    return torch.cat([self.linear(piece) + piece.mean(1, keepdim=True) for piece in pieces], 1)


@deceives("bounded", exporter="dynamo")
def pieces_by_split_in_dynamo(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Cuts a row into pieces, with a bound known to torch.export."""
    return torch.cat([self.linear(piece) + piece.mean(1, keepdim=True) for piece in x.split(32, 1)], 1)


@deceives("bounded", exporter="dynamo")
def other_way_for_long_rows_in_dynamo(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches on a size, which torch.export turns into a constraint."""
    return self.linear(x) if x.shape[1] <= 20 else self.other(x)


@deceives("bounded", "right", exporter="auto")
def other_way_for_long_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches on a size."""
    return self.linear(x) if x.shape[1] <= 20 else self.other(x)


@deceives("bounded", "noted")
def other_way_for_rows_just_longer(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches on a size just above the traced one."""
    return self.linear(x) if x.shape[1] < 8 else self.other(x)


@deceives("bounded", "refused")
def other_way_for_short_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches on a size below the traced one."""
    return self.linear(x) if x.shape[1] > 4 else self.other(x)


@deceives("bounded", "noted")
def window_of_sixteen(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Counts the tokens beyond a window in Python, which is a constant in the trace."""
    overhang = max(0, int(x.shape[1]) - 16)
    return self.linear(x[:, overhang:].mean(1))


@deceives("refused", "bounded")
def average_by_hand(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Divides by a size."""
    return self.linear(x).sum(1) / float(x.shape[1])


@deceives("refused", "bounded")
def scale_by_logarithm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes a factor from a size with ``math``."""
    return self.linear(x) * math.log(x.shape[1] + 1)


@deceives("bounded", "noted")
def factor_by_power_of_two(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Uses the number of bits of a size, equal for sizes near the traced one."""
    return self.linear(x) * (1 + int(x.shape[1]) // 16)


@deceives("bounded", "refused", "noted")
def pooled_pyramid(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Halves a row as often as its size allows."""
    while x.shape[1] > 32:
        x = functional.avg_pool1d(x.transpose(1, 2), 2, ceil_mode=True).transpose(1, 2)
    return self.linear(x).mean(1)


@deceives("bounded", "refused", "noted")
def rounds_per_piece(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Loops without pieces; the number of iterations depends on a size."""
    for _ in range(-(-x.shape[1] // 24)):
        x = torch.tanh(self.linear(x))
    return x


@deceives("bounded", "refused", "noted")
def table_of_twenty(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Uses the last row of a table for all positions beyond it."""
    table = torch.arange(20.0).repeat_interleave(4).view(20, 4)
    places = [min(at, 19) for at in range(x.shape[1])]
    return self.linear(x) + table[places]


@deceives("bounded", "right", "refused")
def chunks_by_count(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Cuts a row into three chunks, or into two if there are few tokens."""
    return torch.cat([self.linear(piece) - piece.amax(1, keepdim=True) for piece in x.chunk(3, 1)], 1)


@deceives("refused", "bounded", "noted")
def token_by_token(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes a recurrence over tokens in Python."""
    state = torch.zeros_like(x[:, 0])
    for token in x.unbind(1):
        state = torch.tanh(self.linear(token) + state)
    return state


@deceives("refused", "bounded", "noted", axes={"x": {0: "rows"}})
def row_by_row(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Loops over the rows of a batch in Python."""
    return torch.stack([self.linear(row).softmax(0).sum(0) for row in x])


@deceives("bounded", "right", axes={"x": {0: "rows"}})
def batches_of_eight(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Cuts large batches."""
    return torch.cat([self.linear(x[at : at + 8]) - x[at : at + 8].mean(0) for at in range(0, len(x), 8)])


@deceives("bounded", "refused", "noted", axes={"x": {0: "rows"}})
def statistics_of_groups(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes minibatch statistics of a group as in StyleGAN: all rows, up to four."""
    group = min(4, x.shape[0])
    return self.linear(x) + x[:group].std(0, unbiased=False).mean()


@deceives("bounded", "refused", "noted", x=torch.randn(2, 4, 12), axes={"x": {2: "length"}})
def padded_to_multiples(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Pads by a length computed in Python."""
    pad = -int(x.shape[2]) % 4
    return self.conv(functional.pad(x, (0, pad))).mean(2)


@deceives("bounded", "right", "refused", x=torch.randn(2, 9, 4), y=torch.randn(2, 5, 4),
          axes={"x": {1: "long"}, "y": {1: "short"}})  # fmt: skip
def the_longer_first(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Orders its inputs by their sizes."""
    first, second = (x, y) if x.shape[1] >= y.shape[1] else (y, x)
    return self.linear(first).mean(1) - self.other(second).mean(1)


@deceives("refused", axes={"x": {0: "rows", 1: "tokens"}})
def large_pictures_in_pieces(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has a threshold on a product of two sizes, each of which alone stays below it."""
    return self.linear(x) if x.shape[0] * x.shape[1] <= 256 else self.other(x)


@deceives("bounded", "refused", exporter="dynamo", axes={"x": {0: "rows", 1: "tokens"}})
def large_pictures_in_pieces_in_dynamo(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has the same threshold as a constraint that no bound of one size expresses."""
    return self.linear(x) if x.shape[0] * x.shape[1] <= 256 else self.other(x)


@deceives("refused", "bounded")
def padded_to_forty(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Pads short rows."""
    return self.linear(functional.pad(x, (0, 0, 0, max(0, 40 - int(x.shape[1]))))).cumsum(1)[:, -1]


@deceives("refused", "bounded", "right", "noted")
def levels_by_logarithm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Runs a doubling scan, one iteration per bit of the size."""
    shift = 1
    while shift < x.shape[1]:
        x = x + functional.pad(x, (0, 0, shift, 0))[:, : x.shape[1]] / 2
        shift *= 2
    return self.linear(x)


@deceives("refused", "bounded", "right", "noted", x=torch.randn(2, 4, 12), axes={"x": {2: "length"}})
def positions_interpolated(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Interpolates learned positions if the length differs from that of training."""
    positions = self.conv.weight.flatten(1)[None]
    if x.shape[2] != positions.shape[2]:
        positions = functional.interpolate(positions, size=x.shape[2], mode="linear")
    return self.conv(x + positions)


@deceives("bounded", "refused", "noted")
def every_nth_of_many(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Uses a stride that depends on a size."""
    return self.linear(x[:, :: 1 + int(x.shape[1]) // 30]).mean(1)


@deceives("bounded", "refused", "noted")
def window_by_unfold(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Unfolds windows, which a short row lacks."""
    step = 8 if x.shape[1] > 24 else 1
    return self.linear(x)[:, ::step].amax(1)


@deceives("bounded", "refused", "noted")
def table_of_powers(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Multiplies a list by a size, which calls __index__."""
    weights = torch.tensor([0.5] * x.shape[1])
    return self.linear(x) * weights[:, None]


@deceives("bounded", "refused", "noted")
def names_of_sizes(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Uses a size as a key."""
    return self.linear(x) * {True: 1.0, False: 2.0}[x.size(1) < 40]


@deceives("refused", "bounded")
def attention_in_blocks(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Attends in blocks of queries, each over the preceding tokens."""
    blocks = []
    for at in range(0, x.shape[1], 16):
        query = self.linear(x[:, at : at + 16])
        blocks.append(functional.scaled_dot_product_attention(query, x[:, : at + 16], x[:, : at + 16]))
    return torch.cat(blocks, 1)


@deceives("bounded", "refused", "right", exporter="dynamo")
def attention_in_blocks_in_dynamo(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Attends in blocks, with a bound known to torch."""
    blocks = [functional.scaled_dot_product_attention(self.linear(q), x, x) for q in x.split(16, 1)]
    return torch.cat(blocks, 1)


@deceives("refused")
def size_beside_large_columns(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has a column with an error that depends on a size, beside far larger columns."""
    rows = self.linear(x).sum(1)
    return torch.cat([rows * 1e6, rows[:, :1] * len(x[0])], 1)


@deceives("refused")
def size_in_another_plane(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has such an error along the second of four axes."""
    rows = self.linear(x)
    return torch.stack([rows * 1e6, rows * len(x[0])], 1)


@deceives("refused")
def size_in_another_stack(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has such an error along the first axis."""
    rows = self.linear(x)
    return torch.stack([rows * 1e6, rows * 1e6, rows * len(x[0])])


@deceives("refused", axes={})
def frozen_beside_large_planes(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has a plane of traced values beside far larger planes."""
    rows = self.linear(x)
    return torch.stack([rows * 1e6, torch.from_numpy(rows.detach().numpy().copy())], 1)


@deceives("right")
def mean_by_shape(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes a mean by a size of 1; the graph is correct."""
    return self.linear(x).sum(1) / x.shape[1]


@deceives("bounded", "refused", "noted")
def band_of_sizes(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches in a band between the checked sizes."""
    return self.other(x) if x.shape[1] > 100 and x.shape[1] < 120 else self.linear(x)


@deceives("bounded", "refused", "noted", axes={"x": {0: "rows"}})
def every_seventh_batch(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches on a remainder of ``len()``."""
    return self.other(x) if len(x) % 7 == 0 else self.linear(x)


@deceives("bounded", "refused", "noted")
def one_size_matched(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Uses ``match`` on a size."""
    match x.shape[1]:
        case 33:
            return self.other(x)
        case _:
            return self.linear(x)


@deceives("bounded", "refused", "noted")
def many_elements(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches on the number of elements, a product of sizes."""
    return self.linear(x) * (1 if x.numel() < 900 else 2)


@deceives("bounded", "refused", "noted")
def digits_of_a_size(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Converts a size to text."""
    return self.linear(x) * len(str(int(x.shape[1])))


@deceives("bounded", "refused", "noted")
def rows_of_one_shape(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compares a shape with a tuple."""
    return self.other(x) if tuple(x.shape) == (2, 65, 4) else self.linear(x)


@deceives("bounded", "refused", "noted")
def table_that_may_be_short(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Takes another branch if PyTorch raises an error."""
    try:
        return self.linear(x) + torch.ones(1, 31, 4)[:, : x.shape[1]].expand(1, x.shape[1], 4)
    except RuntimeError:
        return self.other(x)


@deceives("noted", exporter="dynamo")
def factor_of_some_sizes(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Scales rows of a multiple of eight tokens, and rows of five."""
    return self.linear(x) * (2 if x.shape[1] % 8 == 0 else 1) + (3 if x.shape[1] == 5 else 0)


# --- What a forward keeps from an earlier call.


@deceives("right", "noted", "refused")
def cached_table(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Builds a table of positions for the length of the first call."""
    if self.cached is None:
        self.cached = torch.arange(x.shape[1], dtype=x.dtype)[None, :, None]
    return self.linear(x) + self.cached[:, : x.shape[1]]


@deceives("right", "noted", axes={})
def first_input_stored(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Stores the values of the first call."""
    if self.cached is None:
        self.cached = x.mean(1, keepdim=True)
    return self.linear(x - self.cached)


@deceives("right", "noted")
def masks_by_length(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Stores masks by size in a dict."""
    length = int(x.shape[1])
    if length not in self.tables:
        self.tables[length] = torch.ones(x.shape[1], x.shape[1]).tril()
    return self.tables[length] @ self.linear(x)


@deceives("noted", "refused", axes={})
def scale_set_by_first_input(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Initialises a parameter by the first input as ActNorm, past autograd and its version counter."""
    if not self.is_set:
        self.scale.data.copy_(1 / (x.std((0, 1)) + 1))
        self.is_set.fill_(1)
    return self.linear(x) * self.scale


@deceives("noted", axes={})
def calls_counted(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Counts its calls, and uses the count."""
    self.calls += 1
    return self.linear(x) * self.calls


@deceives("noted", axes={})
def calls_counted_in_a_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Counts its calls in a tensor."""
    self.is_set += 1
    return self.linear(x) * self.is_set


@deceives("noted", axes={})
def running_mean(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Updates statistics in evaluation mode."""
    self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
    return self.linear(x - self.mean)


@deceives("noted", "refused", axes={})
def running_mean_replaced(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Replaces the tensor of its statistics."""
    self.mean = 0.9 * self.mean + 0.1 * x.mean((0, 1))
    return self.linear(x - self.mean)


@deceives("noted", axes={})
def history_stored(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Appends to a list."""
    self.seen.append(x.mean())
    return self.linear(x) + sum(self.seen)


@deceives("noted", axes={})
def prompt_stored(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Prepends the tokens of earlier calls."""
    before = self.tables.get("prompt", x[:, :0])
    self.tables["prompt"] = torch.cat([before, x], 1)[:, -8:]
    return self.linear(torch.cat([before, x], 1)).mean(1)


_MEMORY: dict[str, torch.Tensor] = {}


@deceives("noted", "refused", axes={})
def stored_in_a_global(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Stores values in a global mapping."""
    first = _MEMORY.setdefault("first", x.mean(1, keepdim=True).detach())
    return self.linear(x - first)


@deceives("noted", "refused", axes={})
def counted_on_the_class(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Counts on the class instead of the object."""
    type(self).calls += 1
    return self.linear(x) * type(self).calls


@deceives("noted", "refused", axes={})
def stored_in_a_default(self: Any, x: torch.Tensor, *, memory: list = []) -> torch.Tensor:  # noqa: B006 - what this is
    """Stores values in a default argument."""
    memory.append(1)
    return self.linear(x) * len(memory)


@deceives("noted", axes={})
def first_stored_in_a_default(self: Any, x: torch.Tensor, memory: list = []) -> torch.Tensor:  # noqa: B006 - what this is
    """Stores a value of the first call in a default argument, which all calls read."""
    if not memory:
        memory.append(x.mean().detach())
    return self.linear(x - memory[0])


def make_stateful_forward() -> Callable[..., torch.Tensor]:
    """Return a forward with a closure variable."""
    memory: dict[str, torch.Tensor] = {}

    def stored_in_a_closure(self: Any, x: torch.Tensor) -> torch.Tensor:
        memory.setdefault("first", x.mean(1, keepdim=True).detach())
        return self.linear(x - memory["first"])

    return stored_in_a_closure


deceives("noted", axes={})(make_stateful_forward())


def make_forward_replacing_state() -> Callable[..., torch.Tensor]:
    """Return a forward that replaces its closure variable by one of the same size after each call."""
    memory = {"last": torch.zeros(4)}

    def replaced_in_a_closure(self: Any, x: torch.Tensor) -> torch.Tensor:
        result = self.linear(x) + 1e-5 * memory["last"]
        memory["last"] = x.mean((0, 1)).detach()
        return result

    return replaced_in_a_closure


deceives("noted", axes={})(make_forward_replacing_state())


_RECORD = Record()


def remembered(x: torch.Tensor) -> torch.Tensor:
    """Store the first values in a global."""
    if _RECORD.last is not None and not isinstance(_RECORD.last, torch.Tensor):
        _RECORD.last = x.mean().detach()
    return x - _RECORD.last


@deceives("noted", axes={})
def stored_by_a_helper(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Writes into a global object through a function."""
    return self.linear(remembered(x))


@deceives("noted", axes={})
def stored_in_a_record(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Writes into an object on the module."""
    self.record.last = x.mean() + self.record.last
    return self.linear(x) * self.record.last


@deceives("noted", axes={})
def weight_decayed(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Writes into a parameter past autograd."""
    with torch.no_grad():
        self.scale.mul_(0.5)
    return self.linear(x) * self.scale


@deceives("noted", "refused", axes={})
def trained_from_now_on(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Changes the mode of the model."""
    result = self.linear(x) * (2 if self.training else 1)
    self.training = not self.training
    return result


@deceives("noted", "refused", axes={})
def layer_added(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Adds a layer at each call."""
    self.add_module(f"layer_{len(list(self.children()))}", nn.Tanh())
    return self.linear(x) * len(list(self.children()))


@deceives("noted", axes={})
def noise_in_evaluation(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Draws random numbers in evaluation mode."""
    return self.linear(x) + torch.randn(4)


@deceives("refused", "noted", axes={})
def noise_stored(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Stores random numbers of the first call."""
    if self.cached is None:
        self.cached = torch.randn(4)
    return self.linear(x) + self.cached


@deceives("bounded", exporter="dynamo")
def cached_table_in_dynamo(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Builds a table once, with a length known to torch.export."""
    if self.cached is None:
        self.cached = torch.arange(64, dtype=x.dtype)[None, :, None]
    return self.linear(x) + self.cached[:, : x.shape[1]]


class LessMean(nn.Module):
    """A layer's replacement for short rows, as attention without blocks in BigBird."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Subtract the mean of a row."""
        return self.layer(x) - x.mean(1, keepdim=True)


@deceives("bounded")
def layer_replaced_for_short_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Replaces a layer for good at the first call."""
    if x.shape[1] <= 40 and isinstance(self.linear, nn.Linear):
        self.linear = LessMean(self.linear)
    return self.linear(x)


# --- What Python decides by values.


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4), y=torch.randn(2, 4))
def equal_inputs(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Calls torch.equal, of which a trace records nothing."""
    return self.linear(x) if torch.equal(x, y) else self.other(x - y)


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4), y=torch.randn(2, 4))
def close_inputs(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Calls torch.allclose, of which a trace records nothing."""
    return self.linear(x) if torch.allclose(x, y) else self.other(x - y)


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4))
def branch_on_zeros(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches on an input of zeros."""
    return self.linear(x) if not torch.equal(x, torch.zeros_like(x)) else self.other(x) * 2


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4))
def any_value(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Calls bool() of a tensor."""
    return self.linear(x) if x.any() else self.other(x) * 2


@deceives("noted", "refused", axes={}, x=torch.rand(2, 4))
def loud_inputs(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has a threshold that random draws do not reach."""
    return self.linear(x) if x.abs().max().item() < 8 else self.other(x / x.abs().max())


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4))
def peak_as_a_number(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Reads a value in C."""
    return self.linear(x) * max(1.0, float(x.abs().max()) // 10)


@deceives("noted", "refused", exporter="dynamo", axes={}, x=torch.rand(2, 4))
def loud_inputs_in_dynamo(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has a threshold that dynamo evaluates for the example inputs."""
    return self.linear(x) if x.abs().max().item() < 8 else self.other(x / x.abs().max())


@deceives("noted", "refused", exporter="dynamo", axes={}, x=torch.randn(2, 4), n=torch.tensor(3))
def rounds_by_input_in_dynamo(self: Any, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Calls range() of a number of the example inputs."""
    for _ in range(n):
        x = torch.tanh(self.linear(x))
    return x


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4), n=torch.tensor(3))
def rounds_by_input(self: Any, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Calls range() of a tensor, which calls __index__."""
    for _ in range(n):
        x = torch.tanh(self.linear(x))
    return x


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4), mode=torch.tensor(0))
def third_mode(self: Any, x: torch.Tensor, mode: torch.Tensor) -> torch.Tensor:
    """Branches on a mode; modes 0 and 1 give equal outputs."""
    return self.other(x) if int(mode) > 1 else self.linear(x)


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4), mode=torch.tensor([0]))
def mode_from_a_list(self: Any, x: torch.Tensor, mode: torch.Tensor) -> torch.Tensor:
    """Calls tolist(), which reads values in C."""
    return self.other(x) if mode.tolist()[0] == 3 else self.linear(x)


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4))
def sorted_by_numpy(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes in NumPy, unseen by the trace."""
    return self.linear(x) * float(np.median(x.detach().numpy()) > 5)


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4))
def missing_values(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches on NaN."""
    return self.other(x.nan_to_num()) if torch.isnan(x).any() else self.linear(x)


@deceives("noted", "refused", "right", axes={}, ids=torch.tensor([[3, 1, 2, 0]]))
def branch_on_padding(self: Any, ids: torch.Tensor) -> torch.Tensor:
    """Branches on the presence of an id."""
    x = functional.one_hot(ids.clamp(0, 3), 4).float()
    return self.linear(x) if bool((ids == 0).any()) else self.other(x)


@deceives("noted", "refused", "right", axes={}, x=torch.randn(3, 4))
def unique_values(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Calls unique(); its number of rows depends on values."""
    return self.linear(x).sum() * len(torch.unique(x.round()))


@deceives("right", "refused", "noted", exporter="auto", axes={}, x=-torch.rand(6, 4))
def module_of_rows_chosen(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Calls a module that the first inputs do not reach."""
    chosen = (x.sum(1) > 0).nonzero().squeeze(1)
    result = self.linear(x)
    if chosen.numel() > 0:
        result = result.index_add(0, chosen, self.other(x[chosen]))
    return result


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4))
def equal_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compares rows of one input."""
    return self.linear(x) if not torch.equal(x[0], x[1]) else self.other(x)


@deceives("noted", "refused", axes={}, ids=torch.tensor([[3, 1, 2, 0]]),
          values=({"ids": torch.tensor([[3, 9, 2, 0]])},))  # fmt: skip
def id_contained(self: Any, ids: torch.Tensor) -> torch.Tensor:
    """Uses ``in`` with a tensor."""
    x = functional.one_hot(ids.clamp(0, 3), 4).float()
    return self.linear(x) if 9 in ids else self.other(x)


@deceives("noted", "refused", axes={}, x=torch.rand(2, 4))
def until_small(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Loops until a value is small."""
    while x.abs().max() > 1:
        x = x / 2
    return self.linear(x)


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4))
def row_of_the_largest(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Indexes by a computed number."""
    return self.linear(x[int(x[:, 0].argmax())])


@deceives("right", "noted", "refused", axes={}, x=torch.randn(2, 6, 4), n=torch.tensor(3))
def cut_at_a_value(self: Any, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Cuts at a value, which a trace follows; the graph is correct."""
    return self.linear(x[:, :n]).sum(1)


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4), flags=torch.tensor([True, False]))
def flags_counted(self: Any, x: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    """Calls Python's sum() of flags."""
    return self.linear(x) * sum(bool(flag) for flag in flags)


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4), step=torch.tensor(0.5))
def step_as_a_number(self: Any, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Converts a float tensor to a Python number."""
    return self.linear(x) * (float(step) + 1)


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4))
def norm_compared(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches on a norm near zero."""
    return x if torch.linalg.vector_norm(x) < 1e-6 else self.linear(x / torch.linalg.vector_norm(x))


@deceives("right", "refused", "noted", exporter="auto", axes={}, x=-torch.rand(6, 4))
def module_of_places(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Calls a module that only the trace reaches."""
    places = torch.where(x.sum(1) > 0)[0]
    result = self.linear(x)
    if places.numel() > 0:
        result = result.index_add(0, places, self.other(x[places]))
    return result


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4), mask=torch.ones(2, 4, dtype=torch.bool))
def mask_dropped(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Skips a mask that hides nothing."""
    return self.linear(x) if mask.all() else self.linear(x * mask) * 2


@deceives("refused", axes={}, x=torch.randn(2, 4), t=torch.tensor([1, 2, 3]))
def list_of_an_input_without_use(self: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Makes a list of an input that no node reads."""
    return self.linear(x) * (1 + len([value for value in t.tolist() if value > 20]))


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4))
def small_sum(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Calls torch.is_nonzero, of which a trace records nothing."""
    return self.linear(x) if torch.is_nonzero(x.sum() < 900) else self.other(x)


@deceives("noted", "refused", axes={}, x=torch.rand(2, 4))
def values_beyond_fifty(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has a threshold that ten times the values do not reach."""
    return self.other(x) if x.abs().max() > 50 else self.linear(x)


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4))
def array_by_protocol(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Exports values through DLPack, without a warning of the tracer."""
    return self.linear(x) * (1 + float(np.from_dlpack(x.detach()).max() > 30))


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4))
def read_as_text(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Prints values and searches the text."""
    return self.linear(x) * (1 + ("nan" in str(x)))


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4))
def read_in_memory(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Reads bytes of the memory."""
    return self.linear(x) * (1 + int(x.untyped_storage().tolist()[3] > 190))


class HalvedWhereLarge(torch.autograd.Function):
    """An autograd function with its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - torch's signature
        """Branch on a value."""
        return x / 2 if x.abs().sum() > 100 else x


@deceives("noted", "refused", axes={}, x=torch.randn(2, 4))
def function_with_a_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches inside torch.autograd.Function."""
    return self.linear(HalvedWhereLarge.apply(x))


@deceives("right", "noted", "refused", axes={}, x=torch.randn(2, 4))
def dtype_by_value(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Rounds small values to half precision."""
    return self.linear(x.half().float() if x.abs().max() < 60 else x)


@deceives("right", "refused", axes={}, x=torch.randn(2, 4))
def input_written(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Changes an input in place."""
    x.mul_(2)
    x[0] = x[1]
    return self.linear(x)


@deceives("right", "refused", axes={}, x=torch.randn(2, 4))
def input_written_through_views(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Changes views of an input in place."""
    x.view(-1)[3] = 0
    x.t()[1].add_(5)
    return self.linear(x)


@deceives("right", "refused", axes={}, x=torch.randn(2, 4))
def windows_by_stride(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Views rows that overlap in memory."""
    return self.linear(x.as_strided((2, 2, 4), (2, 2, 1)))


@deceives("right", "refused", axes={}, x=torch.tensor([[1.0, 2.0, 2.0, 3.0], [1.0, 1.0, 0.0, 5.0]]))
def counts_of_values(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Calls torch.unique with counts."""
    return self.linear(x) * torch.unique(x, return_counts=True)[1].max()


@deceives("right", "refused", axes={}, x=torch.tensor([[1.5, 2.5, -0.5, 0.5], [3.5, -1.5, -2.5, 4.5]]))
def halves_rounded(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Rounds halves, which go to even numbers."""
    return torch.round(x) + torch.round(x / 4, decimals=1) + self.linear(x)


@deceives("right", "refused", axes={}, ids=torch.tensor([[100, 120, 3, 7]], dtype=torch.int8))
def short_integers_overflow(self: Any, ids: torch.Tensor) -> torch.Tensor:
    """Multiplies 8-bit integers with overflow."""
    return self.linear((ids * ids).float()) + (ids + ids).float()


@deceives("right", "refused", axes={}, ids=torch.tensor([[200, 120, 3, 7]], dtype=torch.uint8))
def unsigned_below_zero(self: Any, ids: torch.Tensor) -> torch.Tensor:
    """Subtracts unsigned integers below zero."""
    return self.linear((ids - 201).float() / 256)


@deceives("right", "refused", axes={}, x=torch.rand(2, 4))
def half_precision_overflows(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Overflows to infinity in float16."""
    return (self.linear(x) * 70000).half().isinf().float() + self.linear(x)


@deceives("right", "refused", axes={}, x=torch.randn(2, 4))
def random_numbers_with_a_seed(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Draws seeded noise, equal at each call."""
    torch.manual_seed(0)
    return self.linear(functional.dropout(x, 0.5))


@deceives("right", "noted", "refused", axes={}, x=torch.randn(2, 4))
def hook_added(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Hooks its module at the first call."""
    if not self.linear._forward_hooks:
        self.linear.register_forward_hook(lambda _module, _inputs, output: output * 2)
    return self.linear(x)


@deceives("noted", "refused", exporter="dynamo", axes={}, x=torch.randn(2, 4))
def number_of_selected_in_dynamo(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Has a size that depends on values."""
    return self.other(x) * 2 if x[x > 5].numel() else self.linear(x)


@deceives("noted", "refused", exporter="dynamo", axes={}, x=torch.randn(2, 4))
def loop_over_selected_in_dynamo(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Loops over a number of rows that depends on values."""
    result = self.linear(x)
    for row in x[x[:, 0].abs() > 5]:
        result = result + row
    return result


@deceives("right", axes={}, x=torch.randn(2, 4))
def chosen_by_where(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes both branches; the graph is correct."""
    return torch.where(x.abs().max() < 8, self.linear(x), self.other(x))


@deceives("refused", x=torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1)))
def lost_write_beside_a_blocked_action(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Writes into a view, which TorchScript drops; a constant of -1e9 is the largest value of the output."""
    y = self.linear(x)
    y.view(-1)[::2].mul_(3)
    return torch.cat([y, torch.full_like(y[..., :1], -1e9)], -1)


# --- The judgement.


def sized(case: Case, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return inputs of other sizes."""
    generator = torch.Generator().manual_seed(7)
    inputs = {}
    for name, value in case.inputs.items():
        names = case.axes.get(name, {})
        shape = [sizes.get(names.get(axis, ""), size) for axis, size in enumerate(value.shape)]
        inputs[name] = torch.randn(shape, generator=generator) if shape != list(value.shape) else value
    return inputs


def change_branches(inputs: Tensors) -> Iterator[dict[str, torch.Tensor]]:
    """Yield inputs that take other branches."""
    yield (
        dict.fromkeys(inputs, next(iter(inputs.values())))
        if len({v.shape for v in inputs.values()}) == 1
        else {**inputs}
    )
    for name, value in inputs.items():
        if value.is_floating_point():
            others = [value * factor for factor in (0, 1e-3, -1, 10, 100)] + [value.abs(), torch.ones_like(value)]
            others.append(torch.where(value == value.flatten()[0], torch.nan, value))
        else:
            others = [torch.full_like(value, number) for number in range(6)]
        yield from ({**inputs, name: other} for other in others)


def is_right(model: nn.Module, session: Session, inputs: Tensors) -> bool:
    """Return True if a file agrees with the first call of PyTorch."""
    _MEMORY.clear()
    with torch.no_grad():
        expected = copy.deepcopy(model)(*(value.clone() for value in inputs.values())).numpy()
    try:
        (actual,) = session.run({name: value.numpy() for name, value in inputs.items()}).values()
    except WinMLError:
        return False
    return expected.shape == actual.shape and np.allclose(expected, actual, rtol=1e-3, atol=1e-4, equal_nan=True)


def is_first_call_like_the_second(model: nn.Module, inputs: Tensors) -> bool:
    """Return True if the second call of PyTorch equals the first call of a new model."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model(*(value.clone() for value in move_floats(inputs).values()))
        second = model(*(value.clone() for value in inputs.values()))
    models = (copy.deepcopy(model), type(model)())
    return all(torch.allclose(second, one(*(value.clone() for value in inputs.values())), atol=1e-5) for one in models)


def move_floats(inputs: Tensors) -> dict[str, torch.Tensor]:
    """Return inputs with other floats."""
    return {name: value + 0.5 if value.is_floating_point() else value for name, value in inputs.items()}


def judged(case: Case, model: nn.Module, part: ExportedPart) -> Outcome:
    """Classify a verified file by its outputs, bounds and notes."""
    if any(words in note for note in part.notes for words in ("memory of", "_RECORD")):
        # State outside of modules persists for the reference, too.
        return "noted"
    session = Session(part.model_path)
    ranges = {item.name: (item.min, item.max or max(SIZES)) for item in part.dimensions}
    draws = [case.inputs, *case.values]
    for name, (least, most) in ranges.items():
        traced = part.only_sizes if hasattr(part, "only_sizes") else {}
        draws += [sized(case, {**traced, name: size}) for size in {*SIZES, least, most} if least <= size <= most]
    if not case.axes:
        draws += change_branches(case.inputs)
    is_everywhere_right = all(is_right(model, session, inputs) for inputs in draws)
    if is_everywhere_right and (case.axes or is_first_call_like_the_second(model, case.inputs)):
        return "bounded" if any(item.max is not None or item.min > 1 for item in part.dimensions) else "right"
    assert part.verification is not None
    return "noted" if part.verification.assumed or part.verification.fixes_numbers else "silent"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.forward.__name__)
def test_verified_file_is_correct_bounded_or_noted(case: Case, tmp_path: Path) -> None:
    """Each case has an expected outcome, and no file is silently wrong."""
    model = type("Deceiver", (Deceiver,), {"forward": case.forward})()
    config = WinMLExportConfig.model_validate({"exporter": case.exporter, "dynamic_axes": dict(case.axes)})
    outcome: Outcome = "refused"
    text = ""
    try:
        part = HTPExporter(config).export(model, tmp_path / "model.onnx", dict(case.inputs)).only_part
    except (UsageError, ExportError, VerificationError) as error:
        text = str(error)
    else:
        outcome = judged(case, model, part)
        text = f"{part.dimensions} {part.notes}"
    print("OUTCOME", case.forward.__name__, outcome, text.replace("\n", " ")[:400])
    assert outcome in case.outcomes, text


class RecurrentPieces(nn.Module):
    """Cuts a row into pieces for a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all pieces."""
        return torch.cat([self.layer(piece)[0] for piece in x.split(100, 1)], 1)


def test_hint_names_kernels_only_if_a_kernel_is_missing(tmp_path: Path) -> None:
    """A graph with a size frozen as a number is no fault of ONNX Runtime."""
    config = WinMLExportConfig.model_validate({"exporter": "torchscript", "dynamic_axes": TOKENS})
    with pytest.raises(VerificationError) as raised:
        HTPExporter(config).export(RecurrentPieces().eval(), tmp_path / "model.onnx", {"x": torch.randn(2, 120, 4)})
    assert "kernel" not in str(raised.value)
    assert "recorded as a constant" in (raised.value.hint or "")


class SmallMean(nn.Module):
    """A mean that a trace freezes, beside channels 3,000 times as large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Divide the second half of the channels by the number of tokens."""
        return torch.cat([3000 * x[..., :2], x[..., 2:] / int(x.shape[1])], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_frozen_size_of_small_channels_is_refused_in_each_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """In float16, rounding of the large channels exceeds the values of the small ones."""
    sample = torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    config = WinMLExportConfig(exporter="torchscript", dynamic_axes=TOKENS)
    with pytest.raises(VerificationError, match="tokens"):
        HTPExporter(config).export(SmallMean(), tmp_path / "mean.onnx", {"x": sample})
