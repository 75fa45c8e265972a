"""Which modules compute the same in two files, if they are fed the same?

Compares the nodes of each module, those of modules inside it left out: operators, attributes, the names of what they
read and hand on, and the content of weights. A module that has other names counts as changed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import onnx

from winml.modelkit.graph.files.initializer_bytes import WeightEquality, locate_initializers
from winml.modelkit.graph.files.reading import VALUE_FIELDS
from winml.modelkit.inspect.node_signatures import node_signature
from winml.modelkit.inspect.onnx_contents import PlacedNode
from winml.modelkit.verify.by_module.onnx_side import OnnxSide

__all__ = ["unchanged_modules"]

_Forms = Mapping[str, Counter[tuple[object, ...]]]
"""Tag of a module → its nodes, each as what tells it from others."""


def unchanged_modules(reference: OnnxSide, candidate: OnnxSide) -> frozenset[str]:
    """Return the tags of the modules whose nodes are the same in both files.

    Raises:
        InputError: data of a file is missing.
    """
    weights = [{tensor.name: tensor for tensor in side.structure.graph.initializer} for side in (reference, candidate)]
    places = [locate_initializers(side.path) for side in (reference, candidate)]
    equality = WeightEquality(*places)

    def is_same_weight(name: str) -> bool:
        left, right = (tensors[name] for tensors in weights)
        if (left.data_type, list(left.dims)) != (right.data_type, list(right.dims)):
            return False
        return equality.are_equal(name, name)

    forms = _forms_of(reference), _forms_of(candidate)
    read = _initializers_read(reference, weights[0]), _initializers_read(candidate, weights[1])
    tags = [module.tag for side in (reference, candidate) if side.tree is not None for module in side.tree.modules]
    return frozenset(
        tag
        for tag in dict.fromkeys(tags)
        if forms[0].get(tag) == forms[1].get(tag)
        and read[0][tag] == read[1][tag]
        and all(map(is_same_weight, read[0][tag]))
    )


def _forms_of(side: OnnxSide) -> _Forms:
    forms: defaultdict[str, Counter[tuple[object, ...]]] = defaultdict(Counter)
    for number, (item, tag) in enumerate(_tagged(side)):
        node = item.proto
        # The values of a large constant are not read, so that nobody knows whether it is the same.
        unknown = (id(side), number) if any(map(_is_without_values, node.attribute)) else ()
        forms[tag][node_signature(item), tuple(node.input), tuple(node.output), unknown] += 1
    return forms


def _is_without_values(attribute: onnx.AttributeProto) -> bool:
    tensor = attribute.t
    has_values = any(getattr(tensor, field) for field in (*VALUE_FIELDS, "string_data"))
    return attribute.HasField("t") and 0 not in tensor.dims and not has_values


def _initializers_read(side: OnnxSide, weights: Mapping[str, onnx.TensorProto]) -> defaultdict[str, frozenset[str]]:
    names: defaultdict[str, set[str]] = defaultdict(set)
    for item, tag in _tagged(side):
        names[tag].update(name for name in item.proto.input if name in weights)
    return defaultdict(frozenset, {tag: frozenset(found) for tag, found in names.items()})


def _tagged(side: OnnxSide) -> list[tuple[PlacedNode, str]]:
    return [] if side.tree is None else list(zip(side.nodes, side.tree.tags, strict=True))
