"""Reads the module path from the name of a node that has no tag.

Exporters name a node after its scope and operator, ``/encoder/layer.0/MatMul_1``. Tools that fuse nodes append to such
names, ``/encoder/layer.0/MatMul_1/MatMulAddFusion``. Reads names only; tags are read by ``tagging`` and restored by
``carry``.
"""

from __future__ import annotations

import re
from functools import lru_cache

import onnx

__all__ = ["name_scope", "scope_path"]

SEPARATOR = "/"

_COUNTER = re.compile(r"_\d+$")
_FUSED_PREFIX = re.compile(r"^fused (?=/)")
"""What ONNX Runtime puts before the name of the first node it fuses with an activation."""


def name_scope(name: str, op_type: str) -> tuple[str, ...]:
    """Return the segments of a node's name that stand for modules, outermost first; none where it is no path.

    A segment that names an operator stands for a node; the segments after it were added by a tool.

    Args:
        name: The node's name.
        op_type: Its operator.

    >>> name_scope("/encoder/layer.0/Gelu_1", "Gelu")
    ('encoder', 'layer.0')
    >>> name_scope("/encoder/layer.0/MatMul/MatMulAddFusion", "Gemm")
    ('encoder', 'layer.0')
    >>> name_scope("Gemm_7", "Gemm")
    ()
    """
    name = _FUSED_PREFIX.sub("", name)
    if SEPARATOR not in name:
        return ()
    *scope, label = [segment for segment in name.split(SEPARATOR) if segment] or [""]
    # A last segment equal to the operator shows that no tool changed the name: a module may then be called Conv.
    if _COUNTER.sub("", label) != op_type and scope and _is_operator(_COUNTER.sub("", scope[-1])):
        scope.pop()
    return tuple(scope)


def scope_path(scope: tuple[str, ...]) -> str:
    """Return the dotted module path of a scope.

    >>> scope_path(("encoder", "layer.0"))
    'encoder.layer.0'
    """
    return ".".join(scope)


@lru_cache(maxsize=4096)
def _is_operator(name: str) -> bool:
    return bool(onnx.defs.has(name))
