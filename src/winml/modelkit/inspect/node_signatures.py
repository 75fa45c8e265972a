"""What does a node compute, apart from what it reads? Its operator with its attributes, in a form to compare."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping

import onnx

from winml.modelkit.inspect.onnx_contents import PlacedNode

__all__ = ["node_signature"]


def node_signature(node: PlacedNode) -> str:
    """Return the operator with a digest of its attributes; graphs count by the nodes in them, defaults not at all."""
    digest = hashlib.blake2b(digest_size=8)
    defaults = _default_attributes(node.proto.op_type, node.proto.domain)
    for attribute in sorted(node.proto.attribute, key=lambda item: item.name):
        if attribute.HasField("g") or attribute.graphs:
            digest.update(attribute.name.encode())
        elif defaults.get(attribute.name) != (text := _attribute_bytes(attribute)):
            digest.update(text)
    return f"{node.operator} {digest.hexdigest()}"


@functools.cache
def _default_attributes(operator: str, domain: str) -> Mapping[str, bytes]:
    """Return the attributes of an operator that may be left out, as they are then."""
    try:
        schema = onnx.defs.get_schema(operator, domain=domain)
    except onnx.defs.SchemaError:
        return {}
    return {name: _attribute_bytes(attribute.default_value) for name, attribute in schema.attributes.items()}


def _attribute_bytes(attribute: onnx.AttributeProto) -> bytes:
    plain = onnx.AttributeProto()
    plain.CopyFrom(attribute)
    plain.ClearField("doc_string")
    content: bytes = plain.SerializeToString(deterministic=True)
    return content
