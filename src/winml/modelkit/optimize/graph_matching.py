"""Small matchers and builders for patterns of nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.metadata_keys import MODULES_KEY
from winml.modelkit.onnx.operators import is_operator, producer_of
from winml.modelkit.tags.tagging import Source, read_tag, write_tag

CONTRIB_DOMAIN = "com.microsoft"
"""Specified by ONNX Runtime: the domain of its own operators."""
TO_HEADS = (0, 2, 1, 3)
"""Permutation of [batch, sequence, heads, size] that moves the heads before the sequence, and back."""
SWAPPED = (0, 1, 3, 2)
"""Permutation that exchanges sequence and size for the product of queries and keys."""
_SMALL = 16
"""Chosen: maximum number of values of a constant in a pattern."""
_WHOLE = 2**62
"""Chosen: exporters write an end this large for a slice without an end."""


def contrib_result(model: ir.Model, count: int) -> ir.passes.PassResult:
    """Return the result of a fusion into ``count`` operators of ONNX Runtime, and import their domain."""
    if count:
        model.opset_imports.setdefault(CONTRIB_DOMAIN, 1)
    return ir.passes.PassResult(model, bool(count))


def rank_of(value: ir.Value) -> int | None:
    """Return the number of axes; `None` if unknown."""
    return len(value.shape) if value.shape is not None else None


def shape_of(value: ir.Value | None, rank: int) -> ir.Shape | None:
    """Return the shape of a value; `None` if its rank differs or is unknown."""
    shape = value.shape if value is not None else None
    return shape if shape is not None and len(shape) == rank else None


def fixed_size(value: ir.Value, axis: int) -> int | None:
    """Return the size of an axis; `None` if dynamic, unknown or missing."""
    size = value.shape[axis] if value.shape is not None and len(value.shape) > axis else None
    return size if isinstance(size, int) else None


def _permutation_of(node: ir.Node) -> tuple[int, ...]:
    """Return the permutation of a Transpose; ``()`` without one."""
    return tuple(node.attributes.get_ints("perm", ()))


def transpose_input(value: ir.Value | None, permutation: tuple[int, ...]) -> ir.Value | None:
    """Return the input of a Transpose with the permutation; `None` if the value has another producer."""
    node = producer_of(value, "Transpose")
    return node.inputs[0] if node is not None and _permutation_of(node) == permutation else None


def scope_of(node: ir.Node) -> str:
    """Return the name of a node up to the last ``/``, which names its module."""
    return (node.name or "").rpartition("/")[0]


def constant_numbers(value: ir.Value | None) -> list[float] | None:
    """Return the elements of a constant; `None` for large constants, strings and computed values."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    if tensor is None or tensor.size > _SMALL or tensor.dtype == ir.DataType.STRING:
        return None
    return [float(number) for number in tensor.numpy().reshape(-1)]


def constant_number(value: ir.Value | None) -> float | None:
    """Return the element of a constant with one element, otherwise `None`."""
    numbers = constant_numbers(value)
    return numbers[0] if numbers is not None and len(numbers) == 1 else None


def split_scale(value: ir.Value) -> tuple[ir.Value, float]:
    """Return the value before a multiplication or division by a constant, and the factor; factor 1 without one."""
    node = producer_of(value, "Mul", "Div")
    if node is None:
        return value, 1.0
    operand, factor_value = node.inputs
    factor = constant_number(factor_value)
    if factor is None and node.op_type == "Mul":
        operand, factor = factor_value, constant_number(operand)
    if factor is None or operand is None or factor == 0.0:
        return value, 1.0
    return operand, 1.0 / factor if node.op_type == "Div" else factor


def skip_full_slices(value: ir.Value) -> ir.Value:
    """Return the value before slices without effect."""
    while (node := producer_of(value, "Slice")) is not None and node.inputs[0] is not None:
        starts, ends, steps = (
            constant_numbers(node.inputs[index]) if len(node.inputs) > index else [1] for index in (1, 2, 4)
        )
        if starts != [0] or steps != [1] or ends is None or min(ends) < _WHOLE:
            return value
        value = node.inputs[0]
    return value


def has_one_use(value: ir.Value) -> bool:
    """Return True if a single node reads a value, and the value is no output of the graph."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def only_user(value: ir.Value, *operators: str) -> ir.Node | None:
    """Return the only reader of a value; `None` for several readers, or if the value is an output of the graph.

    Args:
        value: The value.
        *operators: Permitted operators of the node; without any, all are permitted.
    """
    node = next(iter(value.consumers())) if has_one_use(value) else None
    return node if node is None or not operators or is_operator(node, *operators) else None


def same_shape(left: ir.Value, right: ir.Value) -> bool:
    """Return True if two shapes are known to be equal."""
    if left.shape is None or right.shape is None or len(left.shape) != len(right.shape):
        return False
    return all(same_size(left_size, right_size) for left_size, right_size in zip(left.shape, right.shape, strict=True))


def same_size(left: int | ir.SymbolicDim, right: int | ir.SymbolicDim) -> bool:
    """Return True if two sizes are known to be equal; a size without a name is unknown."""
    return left == right and (isinstance(left, int) or left.value is not None)


def tag_like(node: ir.Node, original: ir.Node, source: Source) -> None:
    """Copy the tag of a replaced node to a new node, in place; an untagged node is not copied."""
    tag = read_tag(original)
    if tag is None:
        return
    node.metadata_props.update(original.metadata_props)
    node.metadata_props.pop(MODULES_KEY, None)
    write_tag(node, replace(tag, source=source))


def skip_nan_guard(value: ir.Value) -> tuple[ir.Value, bool]:
    """Return the output of ``Where(IsNaN(x), 0, x)`` and True, or the value itself and False without such a guard."""
    users = list(value.consumers())
    nan = next((user for user in users if is_operator(user, "IsNaN")), None)
    where = next((user for user in users if is_operator(user, "Where")), None)
    if len(users) != 2 or nan is None or where is None or value.is_graph_output():
        return value, False
    is_zero = constant_number(where.inputs[1]) == 0.0
    if where.inputs[0] is nan.outputs[0] and where.inputs[2] is value and is_zero and has_one_use(nan.outputs[0]):
        return where.outputs[0], True
    return value, False


@dataclass(frozen=True)
class HeadJoin:
    """The product of probabilities and values, and the nodes up to the join of heads."""

    product: ir.Node
    zeroed: ir.Value | None
    """Condition for setting the product to zero; None without one."""
    output: ir.Node
    """The reshape that joins the heads."""


def match_head_join(
    probabilities: ir.Value,
    find_user: Callable[[ir.Value], ir.Node | None],
    keeps_heads: Callable[[ir.Node], bool],
) -> HeadJoin | None:
    """Match the operators after the probabilities of an attention; `None` for unknown operators.

    Args:
        probabilities: The probabilities.
        find_user: Returns the only node that reads a value.
        keeps_heads: Returns True if a reshape between product and transposition leaves its input unchanged.
    """
    product = find_user(probabilities)
    if product is None or not is_operator(product, "MatMul") or product.inputs[0] is not probabilities:
        return None
    user, zeroed = find_user(product.outputs[0]), None
    if user is not None and is_operator(user, "Where"):
        if user.inputs[2] is not product.outputs[0] or constant_number(user.inputs[1]) != 0.0:
            return None
        zeroed, user = user.inputs[0], find_user(user.outputs[0])
    if user is not None and is_operator(user, "Reshape") and keeps_heads(user):
        user = find_user(user.outputs[0])
    if user is None or not is_operator(user, "Transpose") or _permutation_of(user) != TO_HEADS:
        return None
    output = find_user(user.outputs[0])
    return HeadJoin(product, zeroed, output) if output is not None and is_operator(output, "Reshape") else None


def match_scores(scores: ir.Value) -> tuple[ir.Node, ir.Value | None, float] | None:
    """Return the product of queries and keys, the added mask if any, and the factor; `None` for other operators."""
    mask: ir.Value | None = None
    node = producer_of(scores, "Add")
    if node is not None and has_one_use(scores):
        product_terms = [
            addend for addend in node.inputs if addend is not None and producer_of(split_scale(addend)[0], "MatMul")
        ]
        if len(product_terms) != 1:
            return None
        mask = next((addend for addend in node.inputs if addend is not product_terms[0]), None)
        scores = product_terms[0]
    if not has_one_use(scores):
        return None
    scores, scale = split_scale(scores)
    product = producer_of(scores, "MatMul")
    return None if product is None or not has_one_use(scores) else (product, mask, scale)


def take_over(old: ir.Value, new: ir.Value) -> None:
    """Replace all uses of a value; the new value gets type, shape and name, and the old value is renamed."""
    new.type, new.shape, name = old.type, old.shape, old.name
    old.replace_all_uses_with(new, replace_graph_outputs=old.is_graph_output())
    old.name, new.name = f"{name}_unfused", name


class NodeBuilder:
    """Creates nodes with one output each, under a common name prefix."""

    def __init__(self, prefix: str) -> None:
        """Begin with no node."""
        self.nodes: list[ir.Node] = []
        self._prefix = prefix

    def add(
        self,
        operator: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        dtype: ir.DataType | None,
        shape: ir.Shape | None = None,
        *,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """Append a node, and return its output."""
        node = ir.node(operator, inputs, attributes, domain=domain, name=f"{self._prefix}{name}")
        output = node.outputs[0]
        output.name, output.shape = f"{node.name}_output", shape
        output.type = None if dtype is None else ir.TensorType(dtype)
        self.nodes.append(node)
        return output

    def tag(self, original: ir.Node) -> None:
        """Copy the tag of a replaced node to the nodes without a tag."""
        for node in self.nodes:
            if read_tag(node) is None:
                tag_like(node, original, "merged")

    def constant(self, array: Array, name: str) -> ir.Value:
        """Append a Constant, and return its output."""
        tensor = ir.tensor(array)
        return self.add("Constant", [], name, tensor.dtype, ir.Shape(tensor.shape.numpy()), value=tensor)
