"""Fuses mixtures of experts: a router and the gated products of the experts that it selects.

The exported operators sort tokens by expert and differ by exporter and version. They run on random values, and the
result must be that of the operator.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.errors import StageError
from winml.modelkit.metadata_keys import MODULES_KEY
from winml.modelkit.onnx.coded_weights import CodedTensor
from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.onnx.operators import is_operator
from winml.modelkit.onnx.stage import GraphPass
from winml.modelkit.onnx.weights import add_initializer, computed_tensor, constant_tensor, read_once
from winml.modelkit.optimize.decoders.probing import Probe, probe_between
from winml.modelkit.optimize.graph_matching import (
    CONTRIB_DOMAIN,
    constant_number,
    contrib_result,
    fixed_size,
    rank_of,
    scope_of,
    tag_like,
    take_over,
)
from winml.modelkit.tags.tagging import read_tag

EXPERTS_OPERATOR = "MoE"
_MOST_NODES = 1 << 14
"""Chosen: exporters write up to 12 nodes for each expert, and models have up to 512 experts."""
_TOKENS = 6
"""Chosen: several tokens share an expert."""
_PROBED_CHANNELS = 8
"""Inner channels whose weights are not zero. Chosen: the remaining pages of a large weight are not written."""
_CLOSE = 1e-4
"""Chosen: relative to the largest output. Sums of few float32 products differ by less; wrong routing by 1e-1."""
_SEED = 0
_LARGE, _SMALL = 1e3, 1e-2
_DRAWS = ((1.0, 1.0), (_LARGE, 1e-3), (_SMALL, 10.0))
"""Factors of tokens and of scores. Chosen: large tokens exceed a limit in the experts, small ones show their biases,
scores that are nearly equal show a bias of the selection, and scores far apart show a limit of the scores."""
_PREFERENCE = 10.0
"""Added to the scores of experts that a token has to select. Chosen: larger than differences between random scores."""


class MixtureOfExpertsFusionPass(GraphPass):
    """Replace router and experts of a mixture by ``MoE`` of ONNX Runtime. Works in place.

    Before / After::

        x → MatMul(router) → p → Softmax → TopK ┐
        x ──────────────────────────────────── expert products, sorted by expert → ReduceSum → y

        x → MatMul(router) → p ┐
        x ──────────────────── MoE(gate and up, down) → y

    Must not fire when:
        1. the result on random values, small or large, is not that of SiLU-gated experts whose weights are the softmax
           of the router's scores, over all experts or over the selected ones;
        2. the experts have biases, a limit or another activation, or weights of a quantized checkpoint;
        3. an intermediate value is an output of the graph.

    Tags: creates. The new node has the tag of the experts and names the module of the router as well.

    Why it is safe: outputs are compared for each structure of a mixture. Rows of gate and up alternate in the first
    weight, the only order that all providers take. Weights are read when the file is written.
    """

    tags = "creates"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuse every mixture of experts."""
        fresh, count = FreshNames.of_graph(model.graph), 0
        known: dict[object, _Form | None] = {}
        for node in [node for node in model.graph if is_operator(node, "ReduceSum")]:
            mixture = _find_mixture(node.outputs[0]) if rank_of(node.outputs[0]) == 2 else None
            if mixture is None:
                continue
            if mixture.structure not in known:
                known[mixture.structure] = mixture.find_form()
            form = known[mixture.structure]
            if form is not None:
                _replace_mixture(model.graph, node, mixture, form, fresh)
                count += 1
        return contrib_result(model, count)


@dataclass(frozen=True)
class _Form:
    """Meaning of the weights and of the router's scores."""

    selected: int
    """Number of experts for each token."""
    is_normalized: bool
    """True if the weights of the selected experts have the sum 1."""
    gate_up: str
    """Order of the rows of gate and up: ``gate first``, ``up first`` or ``alternating``."""
    is_turned: tuple[bool, bool]
    """True if a weight is experts × inputs × outputs: that of gate and up, and that of the down projection."""

    def gates_and_ups(self, weight: Array) -> tuple[Array, Array]:
        """Return both parts of the first weight, each experts × outputs × inputs."""
        rows = weight.swapaxes(1, 2) if self.is_turned[0] else weight
        if self.gate_up == "alternating":
            return rows[:, 0::2], rows[:, 1::2]
        first_half, second_half = np.split(rows, 2, axis=1)
        return (first_half, second_half) if self.gate_up == "gate first" else (second_half, first_half)

    def downs(self, weight: Array) -> Array:
        """Return the second weight as experts × outputs × inputs."""
        return weight.swapaxes(1, 2) if self.is_turned[1] else weight

    def compute(self, tokens: Array, scores: Array, gate_up: Array, down: Array) -> Array:
        """Return the output of the operator for tokens × hidden size."""
        exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares = exponentials / exponentials.sum(axis=-1, keepdims=True)
        gates, ups = self.gates_and_ups(gate_up)
        downs, output = self.downs(down), np.zeros_like(tokens)
        for number, token in enumerate(tokens):
            experts = np.argsort(-shares[number])[: self.selected]
            total = shares[number, experts].sum() if self.is_normalized else 1.0
            for expert in experts:
                gate = gates[expert] @ token
                with np.errstate(over="ignore"):  # x / infinity is 0
                    hidden = gate / (1 + np.exp(-gate)) * (ups[expert] @ token)
                output[number] += shares[number, expert] / total * (downs[expert] @ hidden)
        return output


@dataclass(frozen=True)
class _Mixture:
    """Operators that may compute a mixture of experts."""

    probe: Probe
    tokens: ir.Value
    scores: ir.Value
    """Output of the router, tokens × experts."""
    gate_up: ir.Value
    down: ir.Value
    selected: int

    @property
    def structure(self) -> object:
        """Key equal for mixtures whose operators, attributes and constants are equal."""
        numbers: dict[ir.Value | None, object] = {None: -1}
        for value in (self.tokens, self.scores, self.gate_up, self.down, *self.probe.leaves):
            numbers.setdefault(value, (len(numbers), str(value.shape)))
        for constant in self.probe.constants:
            tensor = constant_tensor(constant)
            content = tensor.tobytes() if tensor is not None else len(numbers)
            numbers.setdefault(constant, (str(constant.dtype), str(constant.shape), content))
        key = []
        for node in self.probe.nodes:
            attributes = sorted((name, str(item.value)) for name, item in node.attributes.items())
            key.append((node.op_type, tuple(attributes), tuple(numbers[value] for value in node.inputs)))
            for value in node.outputs:
                numbers[value] = len(numbers)
        return tuple(key)

    def find_form(self) -> _Form | None:
        """Return the form whose result is that of the operators on random values; `None` for other operators."""
        width, experts = fixed_size(self.tokens, 1), fixed_size(self.scores, 1)
        forms = list(self._forms())
        if width is None or experts is None or not forms:
            return None
        generator = np.random.default_rng(_SEED)
        count = fixed_size(self.tokens, 0) or _TOKENS
        inner = self.down.const_value.size // (experts * width)  # type: ignore[union-attr]
        weights = [_draw_sparse(weight, inner, generator) for weight in (self.gate_up, self.down)]
        for token_factor, score_factor in _DRAWS:
            tokens = (token_factor * generator.standard_normal((count, width))).astype(np.float32)
            scores = (score_factor * generator.standard_normal((count, experts))).astype(np.float32)
            expected = self._run(tokens, scores, *weights)
            if expected is None:
                return None
            forms = [form for form in forms if _is_close(form, expected, tokens, scores, *weights)]
        is_form = len(forms) == 1 and self._agrees_for_all_experts(forms[0], weights, generator)
        return forms[0] if is_form else None

    def _agrees_for_all_experts(self, form: _Form, weights: list[Array], generator: np.random.Generator) -> bool:
        """Return True if a form has the result of the operators for large and small tokens that select each expert."""
        experts, width = weights[1].shape[0], fixed_size(self.tokens, 1) or 0
        visits = -(-experts // self.selected)
        count = fixed_size(self.tokens, 0) or visits
        for factor, first in itertools.product((_LARGE, _SMALL), range(0, visits, count)):
            tokens = (factor * generator.standard_normal((count, width))).astype(np.float32)
            scores = generator.standard_normal((count, experts)).astype(np.float32)
            selected = (np.arange(count * self.selected) + first * self.selected).reshape(count, -1) % experts
            np.put_along_axis(scores, selected, np.take_along_axis(scores, selected, 1) + _PREFERENCE, 1)
            expected = self._run(tokens, scores, *weights)
            if expected is None or not _is_close(form, expected, tokens, scores, *weights, most=visits):
                return False
        return True

    def _run(self, tokens: Array, scores: Array, gate_up: Array, down: Array) -> Array | None:
        """Return the result of the operators; `None` if they do not run, or if it is zero or not finite."""
        # The other leaves are read for their sizes, the number of tokens.
        sized = {
            leaf: np.zeros((fixed_size(leaf, 0) or 1, fixed_size(leaf, 1) or len(tokens)), np.int64)
            for leaf in self.probe.leaves
        }
        feeds = {self.tokens: tokens, self.scores: scores, self.gate_up: gate_up, self.down: down}
        try:
            result = self.probe.run({**sized, **feeds})
        except StageError:
            return None
        largest = float(np.abs(result).max())
        return result if result.shape == tokens.shape and np.isfinite(largest) and largest > 0 else None

    def _forms(self) -> Iterator[_Form]:
        """Yield the forms that suit the sizes of the weights."""
        width, experts = fixed_size(self.tokens, 1), fixed_size(self.scores, 1)
        gate_up, down = (tuple(fixed_size(weight, axis) for axis in range(3)) for weight in (self.gate_up, self.down))
        # The shares of all experts have the sum 1.
        sums = (True,) if self.selected == experts else (True, False)
        for gate_up_turned, down_turned, is_normalized in itertools.product((True, False), (True, False), sums):
            turned = (gate_up_turned, down_turned)
            inner = down[1] if turned[1] else down[2]
            rows = (2 * inner, width) if inner is not None else (None, None)
            sizes = (experts, *(rows[::-1] if turned[0] else rows))
            if (
                inner is None
                or sizes != gate_up
                or down != (experts, *((inner, width) if turned[1] else (width, inner)))
            ):
                continue
            for order in ("gate first", "up first", "alternating"):
                yield _Form(self.selected, is_normalized, order, turned)


def _is_close(
    form: _Form, expected: Array, tokens: Array, scores: Array, gate_up: Array, down: Array, *, most: int = _TOKENS
) -> bool:
    """Return True if a form has the expected result for at most the first ``most`` tokens."""
    limit = _CLOSE * float(np.abs(expected).max())
    # Token by token: the first one tells most forms apart, and weights may be large.
    rows = (slice(number, number + 1) for number in range(min(len(tokens), most)))
    return all(
        np.abs(form.compute(tokens[row], scores[row], gate_up, down) - expected[row]).max() <= limit for row in rows
    )


def _draw_sparse(weight: ir.Value, inner: int, generator: np.random.Generator) -> Array:
    """Draw a weight of experts with values in a few channels of each axis.

    Args:
        weight: The weight.
        inner: Number of inner channels. Gate and up of some of them have values, whatever their order.
        generator: Random values.
    """
    experts, first_size, second_size = (fixed_size(weight, axis) or 0 for axis in range(3))
    values = np.zeros((experts, first_size, second_size), np.float32)
    chosen = np.linspace(0, inner - 1, _PROBED_CHANNELS).astype(int)
    places = np.unique(np.concatenate([chosen, chosen + inner, 2 * chosen, 2 * chosen + 1]))
    channels = [np.union1d(places[places < size], [size - 1]) for size in (first_size, second_size)]
    grid = np.ix_(np.arange(experts), *channels)
    values[grid] = generator.standard_normal((experts, *map(len, channels)))
    return values


def _find_mixture(result: ir.Value) -> _Mixture | None:
    """Find the operators between a router and a sum; `None` for a sum of other values."""
    router = _find_router(result)
    tokens, scores = (None, None) if router is None else (router.inputs[0], router.outputs[0])
    if tokens is None or scores is None or rank_of(tokens) != 2 or tokens.dtype != ir.DataType.FLOAT:
        return None
    ends = {tokens, scores}
    probe = probe_between(result, lambda value: value in ends or _is_expert_weight(value), _MOST_NODES)
    inner_values = [] if probe is None else [output for node in probe.nodes for output in node.outputs]
    if probe is None or any(value.is_graph_output() for value in inner_values if value is not result):
        return None
    weights = [leaf for leaf in probe.leaves if _is_expert_weight(leaf)]
    others = [leaf for leaf in probe.leaves if leaf not in ends and leaf not in weights]
    counts = {
        constant_number(node.inputs[1])
        for node in probe.nodes
        if is_operator(node, "TopK") and node.outputs[0].shape is not None and rank_of(node.outputs[0]) == 2
    }
    selected = counts.pop() if len(counts) == 1 else None
    readers = [node for node in probe.nodes if not set(others).isdisjoint(node.inputs)]
    reads_sizes = all(map(_has_tokens, others)) and all(is_operator(node, "Shape") for node in readers)
    if len(weights) != 2 or selected is None or not ends.issubset(probe.leaves) or not reads_sizes:
        return None
    # Gate and up together have twice the values of the down projection.
    down, gate_up = sorted(weights, key=lambda weight: weight.const_value.size)  # type: ignore[union-attr]
    return _Mixture(probe, tokens, scores, gate_up, down, int(selected))


def _find_router(result: ir.Value) -> ir.Node | None:
    """Find the nearest product of rows with a constant matrix that a value depends on; `None` without one."""
    waiting, visited = deque([result]), {result}
    while waiting and len(visited) < _MOST_NODES:
        node = waiting.popleft().producer()
        if node is None:
            continue
        if is_operator(node, "MatMul", "Gemm") and rank_of(node.outputs[0]) == 2:
            weight = node.inputs[1]
            if weight is not None and weight.is_initializer() and rank_of(weight) == 2:
                return node
        found = [value for value in node.inputs if value is not None and value not in visited]
        visited.update(found)
        waiting.extend(found)
    return None


def _is_expert_weight(value: ir.Value) -> bool:
    """Return True for a float initializer with one matrix for each expert."""
    tensor = constant_tensor(value)
    is_float = tensor is not None and tensor.dtype == ir.DataType.FLOAT and not isinstance(tensor, CodedTensor)
    return is_float and rank_of(value) == 3


def _has_tokens(value: ir.Value) -> bool:
    """Return True for an input of integers, batch × sequence, of which a mixture reads the sizes."""
    return value.is_graph_input() and rank_of(value) == 2 and value.dtype == ir.DataType.INT64


def _replace_mixture(graph: ir.Graph, total: ir.Node, mixture: _Mixture, form: _Form, fresh: FreshNames) -> None:
    """Replace a sum over experts by the operator, in place."""
    gate_up, down = constant_tensor(mixture.gate_up), constant_tensor(mixture.down)
    assert gate_up is not None
    assert down is not None
    experts, hidden, width = down.shape.numpy() if form.is_turned[1] else np.take(down.shape.numpy(), (0, 2, 1))

    def alternate() -> Array:
        return np.stack(form.gates_and_ups(read_once(gate_up)), axis=2).reshape(experts, 2 * hidden, width)

    first_name, second_name = (fresh.take(f"{value.name}_experts") for value in (mixture.gate_up, mixture.down))
    first = computed_tensor(alternate, gate_up.dtype, (experts, 2 * hidden, width), first_name)
    second = computed_tensor(lambda: form.downs(read_once(down)), down.dtype, (experts, width, hidden), second_name)
    weights = [add_initializer(graph, first), None, add_initializer(graph, second)]
    attributes: dict[str, Any] = {
        "k": form.selected,
        "normalize_routing_weights": int(form.is_normalized),
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
    }
    node = ir.node(
        EXPERTS_OPERATOR,
        [mixture.tokens, mixture.scores, *weights],
        attributes,
        domain=CONTRIB_DOMAIN,
        name=f"{scope_of(total)}/{EXPERTS_OPERATOR}",
    )
    tag_like(node, total, "merged")
    owner = read_tag(total)
    modules = {tag.module for replaced in mixture.probe.nodes if (tag := read_tag(replaced)) is not None}
    # Modules inside the experts, such as the activation, have no weights of their own.
    modules = {name for name in modules if owner is None or not name.startswith(f"{owner.module}.")}
    if len(modules) > 1:
        node.metadata_props[MODULES_KEY] = json.dumps(sorted(modules), ensure_ascii=False)
    graph.insert_after(total, node)
    take_over(total.outputs[0], node.outputs[0])
