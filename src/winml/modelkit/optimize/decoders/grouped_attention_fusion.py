"""Fuses the attention of a decoder with a cache into one GroupQueryAttention."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from winml.modelkit.onnx.operators import is_operator, producer_of
from winml.modelkit.onnx.stage import GraphPass
from winml.modelkit.optimize.decoders.causal_masks import CausalMask, MaskWriter, find_mask, is_blind
from winml.modelkit.optimize.decoders.interface import DecoderInterface
from winml.modelkit.optimize.decoders.rotations import Rotation, RotationFinder, RotationTables
from winml.modelkit.optimize.graph_matching import (
    CONTRIB_DOMAIN,
    SWAPPED,
    TO_HEADS,
    HeadJoin,
    NodeBuilder,
    constant_number,
    constant_numbers,
    fixed_size,
    match_head_join,
    match_scores,
    rank_of,
    same_shape,
    scope_of,
    skip_full_slices,
    skip_nan_guard,
    split_scale,
    tag_like,
    take_over,
    transpose_input,
)
from winml.modelkit.ort.sessions import is_onnxruntime_at_least

_REPEATED_AXIS = 2
"""Axis of [batch, heads, ·, sequence, size] along which heads are repeated."""


@dataclass(frozen=True)
class CacheUpdate:
    """Concatenation of cached keys or values with new keys or values."""

    past: ir.Value
    """Input of the graph: batch × heads × past × size."""
    new: ir.Value
    """Batch × heads × sequence × size."""
    present: ir.Value
    """Output of the graph: the two joined."""
    heads: int
    """Number of heads of keys and values."""
    size: int
    """Size of a head."""


@dataclass(frozen=True)
class _CachedAttention:
    """The parts of one attention."""

    query: ir.Value
    """Batch × heads × sequence × size, before any factor."""
    heads: int
    """Number of heads of the queries, a multiple of that of the keys."""
    key: CacheUpdate
    value: CacheUpdate
    scale: float
    added: ir.Value
    """The value added to the scores."""
    is_guarded: bool
    """True if tokens that attend to nothing are set to zero."""
    join: HeadJoin
    """Join of the heads.

    Its condition, batch × 1 × sequence × 1, marks tokens set to zero; without a condition, tokens with NaN
    probabilities. The output is batch × sequence × heads · size.
    """


def _match_cached_attention(softmax: ir.Node) -> _CachedAttention | None:
    """Match the attention over a cache around a softmax; `None` if unknown."""
    scores = softmax.inputs[0]
    if scores is None or rank_of(scores) != 4 or softmax.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    probabilities, is_guarded = skip_nan_guard(softmax.outputs[0])
    join = match_head_join(probabilities, only_computing_user, keeps_heads)
    parts = match_scores(scores)
    if join is None or parts is None or rank_of(join.output.outputs[0]) != 3:
        return None
    product, added, scale = parts
    if added is None or product.inputs[0] is None or product.inputs[1] is None or join.product.inputs[1] is None:
        return None
    query, query_scale = split_scale(product.inputs[0])
    keys, key_scale = find_untransposed(product.inputs[1])
    if keys is None:
        return None
    key, value = match_update(keys), match_update(join.product.inputs[1])
    heads = fixed_size(product.outputs[0], 1)
    if key is None or value is None or heads is None or rank_of(query) != 4:
        return None
    if (key.heads, key.size) != (value.heads, value.size) or heads % key.heads:
        return None
    scale, is_guarded = scale * query_scale * key_scale, is_guarded or join.zeroed is not None
    return _CachedAttention(query, heads, key, value, scale, added, is_guarded, join)


def only_computing_user(value: ir.Value) -> ir.Node | None:
    """Return the only reader of a value's elements, apart from readers of the shape; `None` for several readers."""
    users = [user for user, _ in value.uses() if not is_operator(user, "Shape")]
    return users[0] if len(users) == 1 and not value.is_graph_output() else None


def keeps_heads(reshape: ir.Node) -> bool:
    """Return True if a reshape leaves [batch, heads, sequence, size] unchanged."""
    before, after = reshape.inputs[0], reshape.outputs[0]
    if before is None or rank_of(before) != 4 or rank_of(after) != 4:
        return False
    size = fixed_size(before, 3)
    return size is not None and fixed_size(after, 3) == size and fixed_size(after, 1) in (None, fixed_size(before, 1))


def find_untransposed(value: ir.Value) -> tuple[ir.Value | None, float]:
    """Return the keys before the transposition for the product, and a constant factor."""
    value, outer = split_scale(value)
    transposed = transpose_input(value, SWAPPED)
    if transposed is not None:
        inner, scale = split_scale(transposed)
        return inner, outer * scale
    return _find_flat_untransposed(value), outer


def _find_flat_untransposed(value: ir.Value) -> ir.Value | None:
    """Return the value before a transposition with batch and heads as one axis; `None` without such a transposition."""
    spread = producer_of(value, "Reshape")
    flat = producer_of(transpose_input(spread.inputs[0], (0, 2, 1)), "Reshape") if spread is not None else None
    source = flat.inputs[0] if flat is not None else None
    if source is None or rank_of(source) != 4 or rank_of(value) != 4:
        return None
    heads, size = fixed_size(source, 1), fixed_size(source, 3)
    is_same = heads is not None and size is not None and (fixed_size(value, 1), fixed_size(value, 2)) == (heads, size)
    return source if is_same else None


def match_update(value: ir.Value) -> CacheUpdate | None:
    """Match the cache update that computes keys or values, heads repeated or not; `None` without an update."""
    node = producer_of(skip_full_slices(find_unrepeated(value)), "Concat")
    if node is None or node.attributes.get_int("axis", 0) not in (2, -2) or len(node.inputs) != 2:
        return None
    past, new = node.inputs
    if past is None or new is None or not past.is_graph_input() or not node.outputs[0].is_graph_output():
        return None
    heads, size = fixed_size(past, 1), fixed_size(past, 3)
    if rank_of(past) != 4 or heads is None or size is None:
        return None
    return CacheUpdate(past, new, node.outputs[0], heads, size)


def find_unrepeated(value: ir.Value) -> ir.Value:
    """Return keys or values before each head was repeated for several of the queries."""
    reshape = producer_of(value, "Reshape")
    expand = producer_of(reshape.inputs[0], "Expand") if reshape is not None else None
    single = skip_full_slices(expand.inputs[0]) if expand is not None and expand.inputs[0] is not None else None
    unsqueeze = producer_of(single, "Unsqueeze")
    if unsqueeze is None or len(unsqueeze.inputs) < 2 or rank_of(value) != 4 or unsqueeze.inputs[0] is None:
        return value
    return unsqueeze.inputs[0] if constant_numbers(unsqueeze.inputs[1]) == [_REPEATED_AXIS] else value


_OF_BOTH = ("Add", "Sub", "Mul", "Div")
_OF_FIRST = (
    "Sigmoid", "Tanh", "Gelu", "Relu", "Neg", "Cast", "Identity", "LayerNormalization",
    "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "RotaryEmbedding",
)  # fmt: skip
"""Specified: operators whose first output has the shape of their first input."""


def _propagate_shapes(graph: ir.Graph) -> None:
    """Propagate shapes from predecessors, in place; underivable shapes stay.

    Exporters split and join heads by shapes computed at run time, where shape inference loses the token sizes. After a
    fused attention, sizes are known again.
    """
    for node in graph:
        shape = _derive_shape(node)
        output = node.outputs[0]
        if shape is not None and rank_of(output) in (None, len(shape)):
            output.shape = ir.Shape(shape)


def _derive_shape(node: ir.Node) -> list[int | ir.SymbolicDim] | None:
    """Return the shape of the first output, derived from the input shapes; `None` for unknown operators or shapes."""
    first_input = node.inputs[0] if node.inputs else None
    if first_input is None or first_input.shape is None:
        return None
    if node.op_type in _OF_FIRST:
        return list(first_input.shape)
    second_input = node.inputs[1] if len(node.inputs) > 1 else None
    if second_input is None or second_input.shape is None:
        return None
    if node.op_type in _OF_BOTH:
        if same_shape(first_input, second_input) or _broadcasts_along_last_axis(second_input, first_input):
            return list(first_input.shape)
        return list(second_input.shape) if _broadcasts_along_last_axis(first_input, second_input) else None
    is_product = node.op_type == "MatMul" and second_input.const_value is not None and rank_of(second_input) == 2
    return [*first_input.shape[:-1], second_input.shape[1]] if is_product and rank_of(first_input) == 3 else None


def _broadcasts_along_last_axis(value: ir.Value, tensor: ir.Value) -> bool:
    """Return True if a value is a scalar, or has an element for each element of a tensor's last axis."""
    assert value.shape is not None
    assert tensor.shape is not None
    sizes = list(value.shape)
    if len(sizes) > 1 or len(tensor.shape) == 0:
        return False
    return not sizes or sizes == [1] or sizes == [tensor.shape[-1]]


_OPERATOR, _NORM = "GroupQueryAttention", "SimplifiedLayerNormalization"
_HEAD_MULTIPLE = 8
"""Specified by ONNX Runtime's kernel: head sizes it takes."""
_ROTARY_MULTIPLE = 16
"""Specified by ONNX Runtime's kernel: sizes of heads, and of their rotated elements, that it rotates itself."""
_LEAST_OPSET = 15
"""Specified: the version from which ``Shape`` has a start and an end."""


class GroupQueryAttentionFusionPass(GraphPass):
    """Replace an attention over a cache by ONNX Runtime's ``GroupQueryAttention``. Works in place.

    Before / After::

        q → heads → rotation ────────────────────── Mul ┐
        k → heads → rotation → Concat(past) → [repeat] ─┴ MatMul → Add(mask) → Softmax → [zero] ┐
        v → heads ───────────→ Concat(past) → [repeat] ──────────────────────────────────────── MatMul → join → y

        q → RotaryEmbedding ┐
        k → RotaryEmbedding ┼ GroupQueryAttention → [zero] → y, present
        v, past, mask ──────┘

    Must not fire when:
        1. the mask differs from: no later token, no token hidden by ``attention_mask``, no token before the window;
        2. keys or values do not end in an output of the graph, or heads of values and keys differ in size;
        3. the sizes of heads are not fixed, or not supported by the kernel;
        4. operators other than a mask and a factor change the scores, such as a limit by ``Tanh``;
        5. values are not float32.

    Tags: creates. The new nodes have the tag of the last node of the attention; nodes on mask and lengths, shared by
        all layers, have the tag of the producer of the mask.

    Why it is safe: mask and rotation are identified by their results, at several sizes and at every position. The
    operator computes the same product, softmax and product. Positions come from ``position_ids``, and hidden tokens
    from ``attention_mask``, so padding on either side has the same effect. Several tokens after a cache require a
    single row; ONNX Runtime refuses more rows.

    With ``rotates``, the operator itself rotates queries and keys, and ``position_ids`` is not read. It counts
    positions in the cache: scores depend on the distance of two tokens only, so outputs are equal for consecutive
    tokens, with or without padding before them. Outputs of padding are unspecified, so no node sets them to zero.

    With ``pads_right``, the number of tokens visible in ``attention_mask`` is the length of a row, as in
    onnxruntime-genai: tokens of a row are consecutive in the cache, and padding comes after them. No mask is computed.
    It has no effect on a decoder with a window before ONNX Runtime 1.24.
    """

    tags = "creates"

    def __init__(self, *, rotates: bool = False, pads_right: bool = False) -> None:
        """Store the variant of the operator; see the class."""
        super().__init__()
        self._variant = _Variant(rotates, pads_right)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuse every attention over a cache."""
        interface = DecoderInterface.of(model)
        if interface is None or model.opset_imports.get("", 0) < _LEAST_OPSET:
            return ir.passes.PassResult(model, modified=False)
        # ONNX Runtime before 1.24, the newest for Python 3.10, computes a window beside lengths wrongly (measured).
        pads_right = self._variant.pads_right and (not interface.windows or is_onnxruntime_at_least("1.24"))
        fusion = _Fusion(model.graph, interface, replace(self._variant, pads_right=pads_right))
        for node in [node for node in model.graph if is_operator(node, "Softmax")]:
            fusion.fuse(node)
        fusion.writer.insert()
        if fusion.count:
            _propagate_shapes(model.graph)
            model.opset_imports.setdefault(CONTRIB_DOMAIN, 1)
        return ir.passes.PassResult(model, bool(fusion.count))


@dataclass(frozen=True)
class _Variant:
    """Variant of the operator: see :class:`GroupQueryAttentionFusionPass`."""

    rotates: bool
    pads_right: bool


@dataclass
class _Fusion:
    """The attentions of one graph."""

    graph: ir.Graph
    interface: DecoderInterface
    variant: _Variant
    count: int = 0
    _masks: dict[tuple[tuple[object, ...], int | None], CausalMask | None] = field(default_factory=dict)
    _blind: dict[tuple[ir.Value, CausalMask], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rotations = RotationFinder(self.interface.positions, self.interface.position_count)
        self._tables = RotationTables(self.graph)
        self.writer = MaskWriter(self.graph, self.interface, self.variant.rotates)

    def fuse(self, softmax: ir.Node) -> None:
        """Fuse the attention around a softmax, if it matches."""
        match = _match_cached_attention(softmax)
        if match is None or softmax.outputs[0].dtype != ir.DataType.FLOAT or match.key.size % _HEAD_MULTIPLE:
            return
        mask = self._find_mask(match)
        is_clear = match.join.zeroed is None or (mask is not None and self._is_blind(match.join.zeroed, mask))
        if mask is not None and is_clear:
            self.writer.tag_as(_find_mask_producer(match.added))
            self._replace_attention(match, mask)
            self.count += 1

    def _find_mask(self, match: _CachedAttention) -> CausalMask | None:
        """Return the mask of an attention, identified once for all layers; `None` if unknown."""
        window = self.interface.windows.get(str(match.key.past.name))
        # Every layer converts the mask to floats separately; the condition is the same.
        key = (_computation_key(match.added), window)
        if key not in self._masks:
            self._masks[key] = find_mask(match.added, self.interface, window)
        return self._masks[key]

    def _is_blind(self, value: ir.Value, mask: CausalMask) -> bool:
        """Return True if a value marks the tokens without a visible token; computed once for a value and a mask."""
        key = (value, mask)
        if key not in self._blind:
            self._blind[key] = is_blind(value, self.interface, mask)
        return self._blind[key]

    def _replace_attention(self, match: _CachedAttention, mask: CausalMask) -> None:
        """Replace an attention by GroupQueryAttention, in place; nodes for rotation, mask and lengths are added."""
        output = match.join.output
        query, key, rotation = self._rotations.find_both(
            match.query, match.heads, match.key.new, match.key.heads, match.key.size
        )
        builder = NodeBuilder(f"{scope_of(output)}/{_OPERATOR}/")
        flat = [
            join_heads(builder, query, match.heads, match.key.size, "query"),
            join_heads(builder, key, match.key.heads, match.key.size, "key"),
            join_heads(builder, match.value.new, match.value.heads, match.value.size, "value"),
        ]
        attributes = {"num_heads": match.heads, "kv_num_heads": match.key.heads, "scale": match.scale}
        tables: list[ir.Value | None] = [None, None]
        rotates = self.variant.rotates and rotation is not None and _is_rotated_by_kernel(rotation)
        if rotation is not None and rotates:
            tables = [*self._tables.of(rotation)]
            attributes |= {"do_rotary": 1, "rotary_interleaved": int(rotation.is_interleaved)}
        elif rotation is not None:
            # Not by the operator itself, which counts positions in the cache.
            by_position = (self.interface.positions, *self._tables.of(rotation))
            flat[0] = add_rotation(builder, flat[0], by_position, rotation, match.heads, "query", CONTRIB_DOMAIN)
            flat[1] = add_rotation(builder, flat[1], by_position, rotation, match.key.heads, "key", CONTRIB_DOMAIN)
        hiding = [*self.writer.lengths(), *tables, None, self.writer.bias(mask)]
        if self.variant.pads_right:
            hiding = [*self.writer.row_lengths(), *tables]
            attributes |= {} if mask.window is None else {"local_window_size": mask.window}
        attention = ir.node(
            _OPERATOR,
            [*flat, match.key.past, match.value.past, *hiding],
            attributes,
            domain=CONTRIB_DOMAIN,
            num_outputs=3,
            name=f"{scope_of(output)}/{_OPERATOR}",
        )
        result, present_key, present_value = attention.outputs
        for number, value in enumerate(attention.outputs):
            value.name = f"{attention.name}_output_{number}"
        builder.nodes.append(attention)
        old, tokens = output.outputs[0], self.interface.tokens.shape
        assert tokens is not None  # an input of two or three axes
        old.shape = ir.Shape([tokens[0], tokens[1], match.heads * match.value.size])
        result.type, result.shape = old.type, old.shape
        if match.is_guarded and not (rotates or self.variant.pads_right):
            # Zero if a token attends to no other token.
            chosen = [self.writer.sees_any(mask), result, self.writer.zero()]
            result = builder.add("Where", chosen, "attended", result.dtype, result.shape)
        builder.tag(output)
        self.graph.insert_after(output, builder.nodes)
        take_over(match.key.present, present_key)
        take_over(match.value.present, present_value)
        take_over(old, result)


def _is_rotated_by_kernel(rotation: Rotation) -> bool:
    """Return True if the kernel of the attention supports the sizes of a rotation."""
    return rotation.size % _ROTARY_MULTIPLE == 0 and rotation.turned % _ROTARY_MULTIPLE == 0


def join_heads(builder: NodeBuilder, value: ir.Value, heads: int, size: int, role: str) -> ir.Value:
    """Add nodes that turn batch × heads × sequence × size into batch × sequence × heads · size; return their output.

    If ``value`` was split from such a tensor by these operators alone, that tensor is returned, without new nodes.
    """
    split = transpose_input(value, TO_HEADS) or _normalize_before_transpose(builder, value, role)
    if split is None:
        split = builder.add("Transpose", [value], f"{role}_tokens", value.dtype, perm=TO_HEADS)
    else:
        # The input of the split into heads, unless further operators are in between.
        reshape = producer_of(split, "Reshape")
        hidden = reshape.inputs[0] if reshape is not None else None
        if hidden is not None and rank_of(hidden) == 3 and fixed_size(hidden, 2) == heads * size:
            return hidden
    sizes = builder.constant(np.array([0, 0, heads * size], np.int64), f"{role}_sizes")
    return builder.add("Reshape", [split, sizes], f"{role}_joined", value.dtype)


def _normalize_before_transpose(builder: NodeBuilder, value: ir.Value, role: str) -> ir.Value | None:
    """Add a normalization of the heads that ``value`` normalizes after a transposition; return its output.

    The normalization is along the last axis, which the transposition does not move. `None` for other values.
    """
    norm = producer_of(value, _NORM)
    split = transpose_input(norm.inputs[0], TO_HEADS) if norm is not None else None
    if norm is None or split is None or norm.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    attributes = {name: item.value for name, item in norm.attributes.items()}
    output = builder.add(_NORM, [split, *norm.inputs[1:]], f"{role}_normalized", value.dtype, split.shape, **attributes)
    tag_like(builder.nodes[-1], norm, "merged")
    return output


def add_rotation(
    builder: NodeBuilder,
    value: ir.Value,
    tables: tuple[ir.Value | None, ...],
    rotation: Rotation,
    heads: int,
    role: str,
    domain: str,
) -> ir.Value:
    """Add a RotaryEmbedding; return its output: batch × sequence × heads · size.

    Args:
        builder: Adds the node.
        value: Queries or keys of the shape of the output.
        tables: Positions, cosines and sines, in the order of the operator's inputs.
        rotation: The rotation.
        heads: Number of heads.
        role: End of the node's name.
        domain: Domain of the operator.
    """
    attributes = {"interleaved": int(rotation.is_interleaved), "num_heads": heads}
    if rotation.turned != rotation.size:
        attributes["rotary_embedding_dim"] = rotation.turned
    return builder.add(
        "RotaryEmbedding", [value, *tables], f"{role}_turned", value.dtype, value.shape, domain=domain, **attributes
    )


def _computation_key(value: ir.Value) -> tuple[object, ...]:
    """Return a key equal for values with equal computation: for a Where of numbers, condition and numbers."""
    node = producer_of(value, "Where")
    if node is None:
        return (value,)
    return (node.inputs[0], constant_number(node.inputs[1]), constant_number(node.inputs[2]))


def _find_mask_producer(mask: ir.Value) -> ir.Node | None:
    """Return the producer of a mask shared by all layers:

    of the condition, if each layer converts the mask to floats.
    """
    node = producer_of(mask, "Where")
    condition = node.inputs[0] if node is not None else None
    return condition.producer() if condition is not None else mask.producer()
