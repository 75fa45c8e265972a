"""Contract of graph stages, and the runner that checks the declared effect of each pass of a stage.

A stage takes a model and frozen options, and returns a :class:`StageResult` or a subclass of it. Independent of passes
and files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedOpsetsPass

from winml.modelkit.errors import StageError
from winml.modelkit.onnx.operator_schemas import nodes_against_schema
from winml.modelkit.tags.tagging import Coverage, NodeTag, all_nodes, read_tag

TagPolicy = Literal["keeps", "merges", "creates", "drops"]
"""Effect of a pass on tags. ``keeps``: nodes are unchanged or removed; no node is new and no tag changes. ``merges``: a
new node gets the common ancestor of the replaced nodes. ``creates``: a new node inherits from its neighbours.
``drops``: tags may be lost.
"""


_NEW = object()
"""Marks the missing tag of a new node."""


@dataclass(frozen=True)
class StageResult:
    """The result of any stage."""

    model: ir.Model
    changed: bool
    """True if the stage changed the model."""
    notes: tuple[str, ...]
    """Sentences for the user: skipped work, and the reason why that is acceptable."""
    coverage: Coverage
    """Tag coverage of the model."""


class GraphPass(ir.passes.InPlacePass):
    """A pass that works in place and declares its effect on tags on its class.

    Subclasses define ``tags`` and ``call(model)``, which returns an ``onnx_ir.passes.PassResult``.
    """

    tags: ClassVar[TagPolicy]
    """Declared effect on tags; checked after the pass."""


@dataclass(frozen=True)
class DeclaredPass:
    """A pass with its declared effect on tags; for library passes without a declaration."""

    effect: ir.passes.PassBase
    tags: TagPolicy
    """Declared effect on tags; checked after the pass."""

    @property
    def name(self) -> str:
        """The name of the pass."""
        return type(self.effect).__name__


def run_passes(model: ir.Model, passes: Sequence[DeclaredPass], failure: type[StageError]) -> bool:
    """Run passes in order on a model, in place.

    Args:
        model: The model.
        passes: The passes.
        failure: The error of the stage they belong to.

    Returns:
        True if a pass changed the model.

    Raises:
        StageError: of type ``failure``: a pass failed, or violated its declaration. Names the pass and the completed
            passes.
    """
    changed = False
    before = _Promise.of(model)
    invalid = nodes_against_schema(model)

    def failure_of(position: int, problem: str) -> StageError:
        error = failure(_failure_words(passes, position, problem))
        error.failed_pass = passes[position].name
        return error

    for position, declared in enumerate(passes):
        try:
            result = declared.effect(model)
        except Exception as error:
            # A library pass may raise anything; the cause is chained.
            raise failure_of(position, f"failed: {type(error).__name__}: {error}") from error
        if result.model is not model:
            raise failure_of(position, "returned a different model; passes must work in place")
        if not result.modified and declared.tags == "keeps":
            continue
        # Folding by onnxscript may write an If again and report no change.
        after = _Promise.of(model)
        if broken := before.broken_by(after, declared.tags):
            raise failure_of(position, broken)
        before = after
        changed |= result.modified
        if result.modified and (new_violations := nodes_against_schema(model).items() - invalid.items()):
            raise failure_of(position, f"made {min(reason for _, reason in new_violations)}")
    return changed


def _failure_words(passes: Sequence[DeclaredPass], position: int, problem: str) -> str:
    """Describe a failed pass: its position, name and problem, and the completed passes."""
    completed = ", ".join(declared.name for declared in passes[:position]) or "none"
    return f"step {position + 1} of {len(passes)}, {passes[position].name}, {problem} (done before: {completed})"


@dataclass(frozen=True)
class _Promise:
    """Inputs, outputs and tags before a pass, which the pass must preserve."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tags: dict[ir.Node, NodeTag | None]

    @classmethod
    def of(cls, model: ir.Model) -> _Promise:
        """Record inputs, outputs and tags of a model."""
        return cls(
            inputs=tuple(f"{value.name} {value.type}" for value in model.graph.inputs),
            # A pass may learn the type of an output; the type of an input is fixed.
            outputs=tuple(str(value.name) for value in model.graph.outputs),
            tags={node: read_tag(node) for node in all_nodes(model)},
        )

    def broken_by(self, after: _Promise, policy: TagPolicy) -> str | None:
        """Describe the violation of the declared effect by a pass; `None` without a violation.

        Args:
            after: The model after the pass.
            policy: Declared effect on tags.
        """
        for kind, old, new in (("inputs", self.inputs, after.inputs), ("outputs", self.outputs, after.outputs)):
            if old != new:
                return f"changed the graph {kind} from {', '.join(old)} to {', '.join(new)}"
        if policy == "drops":
            return None
        lost = [node for node, tag in after.tags.items() if tag is None and self.tags.get(node, _NEW) is not None]
        # A graph without tags has none to lose.
        if lost and any(self.tags.values()):
            return (
                f"left {len(lost)} nodes without a tag, {lost[0].op_type} {lost[0].name or ''} first, but {policy} tags"
            )
        if policy == "keeps":
            changed = [node for node, tag in after.tags.items() if self.tags.get(node, _NEW) != tag]
            if changed:
                return f"made or retagged node {changed[0].op_type} {changed[0].name or ''}, but keeps tags"
        return None


def restore_description(rewritten: ir.Model, original: ir.Model) -> None:
    """Restore metadata and description changed by a foreign tool, and remove unused opsets; in place.

    Args:
        rewritten: The model made by the tool.
        original: The model before the tool.
    """
    rewritten.metadata_props.clear()
    rewritten.metadata_props.update(original.metadata_props)
    rewritten.producer_name, rewritten.producer_version = original.producer_name, original.producer_version
    rewritten.doc_string, rewritten.domain = original.doc_string, original.domain
    rewritten.model_version = original.model_version
    rewritten.graph.name, rewritten.graph.doc_string = original.graph.name, original.graph.doc_string
    rewritten.graph.metadata_props.clear()
    rewritten.graph.metadata_props.update(original.graph.metadata_props)
    described = {value.name: value for value in (*original.graph.inputs, *original.graph.outputs)}
    for value in (*rewritten.graph.inputs, *rewritten.graph.outputs):
        if (source := described.get(value.name)) is not None:
            value.doc_string = source.doc_string
            value.metadata_props.update(source.metadata_props)
    RemoveUnusedOpsetsPass()(rewritten)
