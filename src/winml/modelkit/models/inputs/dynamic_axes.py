"""Dynamic axes of the inputs, and their names.

Converts the user's request – by meaning (``--dynamic-batch``), by key (``--shape-config``), by position
(``--dynamic-axes``) or in shapes (``--input-specs``) – into names in the shapes of the inputs. The config tells only in
part whether the model supports these sizes; the rest is verified after the export.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.models.inputs import axis_names
from winml.modelkit.models.inputs.decision import InputDecision
from winml.modelkit.models.inputs.modalities.modality import BATCH_KEY
from winml.modelkit.models.inputs.modalities.pipeline import SHAPE_KEYS
from winml.modelkit.models.inputs.sizes import SizeWish, choose_trace_sizes
from winml.modelkit.onnx import specs
from winml.modelkit.options import suggest

_TRACE_SIZE = 16
"""Chosen: size at tracing for a dimension of unknown meaning, large enough to differ from channel counts."""


def open_axes(
    decision: InputDecision,
    request: specs.DynamicRequest,
    left_open: Mapping[str, specs.OpenSize] | None = None,
    *,
    by_default: Collection[str] = (),
    firm_keys: frozenset[str] = frozenset(),
    are_sizes_firm: bool = False,
    accepts: axis_names.AcceptsShapes | None = None,
) -> InputDecision:
    """Name the dynamic axes of the inputs.

    Args:
        decision: The inputs. Names already in their shapes are kept.
        request: Further dynamic axes.
        left_open: Keys of ``--shape-config`` with a name or a range, and keys that are dynamic without a request.
        by_default: The keys without a request.
        firm_keys: Keys with a number from the user; this size is traced.
        are_sizes_firm: Whether all sizes come from the user's own example.
        accepts: Runs the forward on other shapes; with it, axes of unknown inputs are added if the forward only accepts
            them together.

    Returns:
        The decision with names in the shapes, their dimensions, and notes on added axes. The decision itself if
        there are neither requests nor names.

    Raises:
        UsageError: an input or axis that does not exist, two names or two sizes for one dimension, or a size that this
            model does not have or cannot vary.
    """
    sizes = decision.meanings.sizes
    open_sizes = left_open or {}
    resolved_sizes = {size_key: size for key, size in open_sizes.items() for size_key in specs.names_among(key, sizes)}
    left_open = {**resolved_sizes, **{key: size for key, size in open_sizes.items() if key in sizes}}
    firm_keys = frozenset(size_key for key in firm_keys for size_key in specs.names_among(key, sizes))
    naming = axis_names.AxisNames(axis_names.AxisKeys(decision))
    naming.take_names_in_shapes()
    output_axes = naming.take_axes(request)
    naming.take_keys(left_open)
    naming.take_meanings(request)
    if not naming.names and not naming.unnamed:
        _refuse_outputs_alone(decision, output_axes)
    axis_names.name_the_unnamed(naming)
    if not naming.names:
        return decision
    notes = [*naming.bring_along(), *axis_names.bring_along_by_size(naming, accepts)]
    requested_sizes = _RequestedSizes(left_open, _bounds_by_name(request, naming.symbols()), firm_keys, are_sizes_firm)
    wishes = [_make_size_wish(name, naming, requested_sizes) for name in naming.symbols()]
    sizes = choose_trace_sizes(wishes)
    dimensions = tuple(
        specs.DynamicDimension(name=wish.name, min=wish.min, max=wish.max, example=sizes[wish.name]) for wish in wishes
    )
    notes += [
        f"{wish.name} is traced with {sizes[wish.name]}: a size of 1 would be traced as a constant."
        for wish in wishes
        if wish.is_firm and wish.preferred == 1
    ]
    return replace(
        decision,
        inputs=naming.named_inputs(),
        dimensions=dimensions,
        open_by_default=_find_default_names(naming, request, left_open, by_default),
        notes=(*decision.notes, *notes),
        output_axes=output_axes,
    )


def _find_default_names(
    naming: axis_names.AxisNames,
    request: specs.DynamicRequest,
    left_open: Mapping[str, specs.OpenSize],
    by_default: Collection[str],
) -> dict[str, str]:
    """Return the names that no option requested: name → key of its size; `{}` without default keys.

    Args:
        naming: All names.
        request: The user's request for dynamic axes.
        left_open: Dynamic keys.
        by_default: Keys among them without a request.
    """
    if not by_default:
        return {}
    requested_names = axis_names.AxisNames(naming.axis_keys)
    requested_names.take_names_in_shapes()
    requested_names.take_axes(request)
    requested_names.take_keys({key: size for key, size in left_open.items() if key not in by_default})
    requested_names.take_meanings(request)
    bounded_names = _bounds_by_name(request, naming.symbols())
    names = {naming.names[axis] for axis in (*requested_names.names, *requested_names.unnamed) if axis in naming.names}
    default_names = {naming.names[axis]: key for key in by_default for axis in naming.axis_keys.axes_of(key)}
    return {name: key for name, key in default_names.items() if name not in names and name not in bounded_names}


def _refuse_outputs_alone(decision: InputDecision, output_axes: Sequence[specs.OutputAxis]) -> None:
    """Refuse axes of unknown inputs if no axis of an input is dynamic: output axes depend on dynamic input axes.

    Raises:
        UsageError: names the first such axis.
    """
    for axis in output_axes:
        inputs = ", ".join(f"{spec.name} ({len(spec.shape)} axes)" for spec in decision.inputs)
        hint = suggest(axis.output, [spec.name for spec in decision.inputs], also=f"Its inputs: {inputs}.")
        raise UsageError(f"{axis.requested_by}: the model has no input {axis.output!r}", hint=hint)


def fitting_example(
    example: Mapping[str, torch.Tensor] | None, decision: InputDecision
) -> Mapping[str, torch.Tensor] | None:
    """Return the user's example if it has the traced sizes; `None`: values are drawn."""
    if example is None:
        return None
    sizes = {dimension.name: dimension.example for dimension in decision.dimensions}
    shapes = {
        spec.name: tuple(sizes[size] if isinstance(size, str) else size for size in spec.shape)
        for spec in decision.inputs
    }
    return example if all(shapes[name] == tuple(tensor.shape) for name, tensor in example.items()) else None


def _bounds_by_name(request: specs.DynamicRequest, symbols: Sequence[str]) -> dict[str, specs.DynamicDimension]:
    """Return the bounds the user gave by name.

    Raises:
        UsageError: no axis has such a name.
    """
    dimensions = {name: bound for bound in request.dimensions for name in specs.names_among(bound.name, symbols)}
    refuse_unknown_dimensions(dimensions, symbols)
    return dimensions


def refuse_unknown_dimensions(names: Iterable[str], known: Sequence[str]) -> None:
    """Refuse bounds of dimensions that no axis has.

    Raises:
        UsageError: names the first unknown name, and the nearest or all known names.
    """
    for name in names:
        if name not in known:
            hint = suggest(name, known, otherwise=f"Names: {', '.join(known)}.")
            raise UsageError(f"dynamic_dimensions: no axis is named {name!r}", hint=hint)


@dataclass(frozen=True)
class _RequestedSizes:
    """Sizes in the user's request."""

    by_key: Mapping[str, specs.OpenSize]
    by_name: Mapping[str, specs.DynamicDimension]
    firm_keys: frozenset[str]
    are_sizes_firm: bool

    def of(self, name: str, keys: Sequence[str]) -> list[specs.OpenSize]:
        """Return the requested sizes of one dimension, by key and by name."""
        bounds = [self.by_name[name]] if name in self.by_name else []
        return [*(self.by_key[key] for key in keys if key in self.by_key), *bounds]


def _make_size_wish(name: str, naming: axis_names.AxisNames, requested: _RequestedSizes) -> SizeWish:
    """Return the bounds of a dimension, and its preferred size at tracing.

    Args:
        name: Name of the dimension.
        naming: Names of the axes of the model.
        requested: Sizes in the user's request.

    Raises:
        UsageError: the requested sizes contradict each other, or the limits of the model.
    """
    keys = naming.keys_named(name)
    low, high = _combine_bounds(name, naming, requested)
    example, is_firm = _preferred_size(name, naming, requested)
    if is_firm and not low <= example <= (high or example):
        raise UsageError(
            f"{name}: example size {example} is not between {low} and {high or 'any'}", hint="Set a size in this range."
        )
    shape_keys = (SHAPE_KEYS[key] for key in (*keys, specs.current_name(name)) if key in SHAPE_KEYS)
    step = max((key.trace_step for key in shape_keys), default=1)
    return SizeWish(name, example, is_firm, low, high, step, naming.sizes_beside(name))


def _combine_bounds(name: str, naming: axis_names.AxisNames, requested: _RequestedSizes) -> tuple[int, int | None]:
    """Return the smallest and the largest size, within the bounds of user and model; `None` without a largest.

    Raises:
        UsageError: the user's limit exceeds the model's, or only one size remains.
    """
    requests = requested.of(name, naming.keys_named(name))
    bounds = [naming.axis_keys.bounds_of(key) for key in naming.keys_named(name)]
    # A default min is no request: a cache may be empty, and has size 0 in an example.
    default_low = 0 if 0 in naming.sizes_named(name) else 1
    low = max(
        (*(size.min for size in requests if "min" in size.model_fields_set), *(size.min for size in bounds)),
        default=default_low,
    )
    high = _smallest_limit([size.max for size in requests])
    limit = _smallest_limit([size.max for size in bounds])
    if limit is not None and high is not None and high > limit:
        raise UsageError(
            f"{opt.shape_config}: {name} up to {high}: the model takes {limit} at most", hint=f"Set max {limit}."
        )
    high = high if high is not None else limit
    if high is not None and low >= high:
        raise UsageError(f"{name} cannot be dynamic: {low} to {high} is a single size", hint="Widen min and max.")
    return low, high


def _preferred_size(name: str, naming: axis_names.AxisNames, requested: _RequestedSizes) -> tuple[int, bool]:
    """Return the size to trace with, and True if the user requested it.

    Raises:
        UsageError: the user requested two sizes.
    """
    keys = naming.keys_named(name)
    sizes = naming.decision.meanings.sizes
    firm_sizes = {size.example for size in requested.of(name, keys) if size.example is not None}
    if not firm_sizes:
        firm_sizes |= {sizes[key] for key in keys if key in requested.firm_keys and key in sizes}
        # A trace with size 0 would contain no values.
        firm_sizes |= naming.sizes_named(name) - {0} if requested.are_sizes_firm else set()
    if len(firm_sizes) > 1:
        raise UsageError(
            f"{name}: one dimension, but two example sizes, {' and '.join(map(str, sorted(firm_sizes)))}",
            hint="Set one size, or use two names.",
        )
    if firm_sizes:
        return firm_sizes.pop(), True
    model_sizes = [sizes[key] for key in keys if key in sizes]
    return (model_sizes[0] if model_sizes else _usual_size(name, naming)), False


def _usual_size(name: str, naming: axis_names.AxisNames) -> int:
    """Return a size for a dimension by its name or position."""
    key = SHAPE_KEYS.get(specs.current_name(name))
    is_first = all(axis == 0 for _, axis in naming.axes_named(name))
    return (key and key.trace_size) or (BATCH_KEY.trace_size if is_first else None) or _TRACE_SIZE


def _smallest_limit(limits: Sequence[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
