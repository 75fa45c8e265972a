"""What would optimizing an ONNX file do? Does it in memory, with open sizes and with fixed ones, and writes nothing."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from winml.modelkit.errors import StageError
from winml.modelkit.flows.graph_file import read_plain
from winml.modelkit.flows.graph_modules import optimize_within
from winml.modelkit.graph.pinning import open_dimensions, pin_dimensions
from winml.modelkit.graph.specs import stated_sums, summed_sizes
from winml.modelkit.hierarchy.tagging import all_nodes
from winml.modelkit.normalize.pipeline import NormalizeOptions, normalize
from winml.modelkit.optimize.capabilities import CAPABILITIES, Capability
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.options import options_of
from winml.modelkit.results.transformed_file import BlockedFusion, CheckedCapability, OptimizationCheck
from winml.modelkit.runtime.default_sizes import default_size

__all__ = ["check_optimization"]

_OTHER_SIZE = 16
"""Chosen: a size for a dimension that no convention names."""

_OTHER_THAN_ONE = 2
"""Chosen: with a size of 1, axes broadcast that do not with any other."""

_FiredIn = Mapping[str, Mapping[str, int]]
"""Capability → tag → how often it fired."""


def check_optimization(
    model: str | os.PathLike[str], *, options: OptimizeOptions | None = None, **flags: Any
) -> OptimizationCheck:
    """Find out what optimizing a file would do; nothing is written and no result compared.

    Args:
        model: The file.
        options: What is to be done; None: as ``flags`` say. Where nothing is, what the level ``full`` does.
        **flags: As for :func:`~winml.modelkit.optimize_onnx`.

    Raises:
        UsageError: a flag nobody knows or that goes with no other, or a selector names no module.
        InputError: the file is no ONNX model, its data is missing, or it is compiled already.
        NormalizeError: the graph could not be brought into its plain form.
        OptimizeError: an engine could not read the graph, or failed.
    """
    options = options_of(OptimizeOptions, options, flags, "check_optimization")
    notes = []
    if options.is_empty:
        options = options.model_copy(update={"level": "full"})
        notes.append("No level was given and nothing enabled: this is what --level full would do.")
    options.refuse_whole_graph_options()
    path = Path(model)
    plain, read_notes = read_plain(path, folds_constants=options.folds_constants)
    result = optimize_within(plain.clone(), options)
    blocked, blocked_notes = _blocked(plain, options, result.fired_in)
    return OptimizationCheck(
        source=path,
        nodes_before=_node_count(plain),
        nodes_after=_node_count(result.model),
        capabilities=tuple(
            _counted(entry, result.fired[entry.name], result.fired_in, blocked)
            if entry.name in result.fired
            else _removing(entry, plain, options)
            for entry in options.enabled()
        ),
        notes=(*notes, *read_notes, *result.notes, *blocked_notes),
    )


def _node_count(model: ir.Model) -> int:
    return sum(1 for _ in all_nodes(model))


def _counted(
    entry: Capability, count: int, fired_in: _FiredIn, blocked: Mapping[str, tuple[BlockedFusion, ...]]
) -> CheckedCapability:
    return CheckedCapability(entry.name, count, None, fired_in.get(entry.name, {}), blocked.get(entry.name, ()))


def _removing(entry: Capability, plain: ir.Model, options: OptimizeOptions) -> CheckedCapability:
    """Run a capability by itself, since what it removes bears no mark."""
    alone = {
        **dict.fromkeys(CAPABILITIES),
        "level": "none",
        "opset": None,
        entry.name: True,
    }
    result = optimize_within(plain.clone(), options.model_copy(update=alone))
    removed = _node_count(plain) - _node_count(result.model)
    return CheckedCapability(entry.name, None, max(0, removed), result.fired_in.get(entry.name, {}))


def _blocked(
    plain: ir.Model, options: OptimizeOptions, open_fired: _FiredIn
) -> tuple[dict[str, tuple[BlockedFusion, ...]], tuple[str, ...]]:
    """Return what fires with fixed sizes only, by capability, and why that is unknown where it is."""
    dimensions = open_dimensions(plain.graph)
    if not dimensions:
        return {}, ()
    sizes = _usual_sizes(plain, dimensions)
    words = ", ".join(f"{name} {size}" for name, size in sizes.items())
    try:
        missing = _more_fired(_fired_at(plain, options, sizes), open_fired)
        larger = _with_sums(plain, {name: _OTHER_THAN_ONE if size == 1 else size for name, size in sizes.items()})
        is_larger = bool(missing) and larger != sizes
        lasting = _more_fired(_fired_at(plain, options, larger), open_fired) if is_larger else missing
        by_dimension = {
            name: _more_fired(_fired_at(plain, options, {name: size}), open_fired) if missing else {}
            for name, size in sizes.items()
        }
    except StageError as error:
        return {}, (f"What fixed sizes would change is unknown: {error.message}",)
    blocked: defaultdict[str, list[BlockedFusion]] = defaultdict(list)
    for (capability, tag), count in missing.items():
        alone = [name for name in dimensions if (capability, tag) in by_dimension[name]]
        causes = alone or list(dimensions)
        places = {name: tuple(dimensions[name]) for name in causes}
        if retained := min(count, lasting.get((capability, tag), 0)):
            blocked[capability].append(BlockedFusion(tag, retained, places, only_at_one=False))
        if count > retained:
            blocked[capability].append(BlockedFusion(tag, count - retained, places, only_at_one=True))
    note = f"What open sizes keep from firing was found by fixing them: {words}; and those of 1 to {_OTHER_THAN_ONE}."
    return {name: tuple(items) for name, items in blocked.items()}, (note,)


def _fired_at(plain: ir.Model, options: OptimizeOptions, sizes: Mapping[str, int]) -> _FiredIn:
    """Return what fires once some dimensions are fixed."""
    pinned = plain.clone()
    pin_dimensions(pinned, sizes)
    normalize(pinned, NormalizeOptions(fold_constants=options.folds_constants))
    return optimize_within(pinned, options).fired_in


def _usual_sizes(plain: ir.Model, names: Iterable[str]) -> dict[str, int]:
    """Return the sizes that an export fixes where nobody asks for others."""
    sizes = {name: default_size(name) or _OTHER_SIZE for name in names}
    return _with_sums(plain, sizes)


def _with_sums(plain: ir.Model, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return sizes in which those that the file states as sums of others are right."""
    sums = summed_sizes(stated_sums(plain.metadata_props), sizes)
    return {**sizes, **{name: size for name, size in sums.items() if name in sizes}}


def _more_fired(fixed: _FiredIn, opened: _FiredIn) -> dict[tuple[str, str], int]:
    counted = [name for name in fixed if CAPABILITIES[name].makes or CAPABILITIES[name].marks]
    more = {
        (name, tag): count - opened.get(name, {}).get(tag, 0) for name in counted for tag, count in fixed[name].items()
    }
    return {key: count for key, count in more.items() if count > 0}
