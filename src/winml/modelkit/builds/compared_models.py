"""Compares two models: names, files or live modules. Names are resolved to files or requests here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.builds.found_models import part_files, refuse_unknown_parts, resolve_side
from winml.modelkit.errors import ConfigError, UsageError, opt
from winml.modelkit.file_names import ONLY_PART
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.options import unknown_key_message
from winml.modelkit.python_functions import python_function, refuse_wrong_type

if TYPE_CHECKING:
    from torch import nn

    from winml.modelkit.compare.comparing import CompareOptions, NamedSide
    from winml.modelkit.compare.records import ModelComparison
    from winml.modelkit.models.live_module import ExampleInputs
    from winml.modelkit.ort.execution_providers import Device


@python_function(shape_config="run.sizes")
def compare_models(
    reference: str | os.PathLike[str] | ModelRequest | nn.Module,
    candidate: str | os.PathLike[str] | ModelRequest | nn.Module,
    options: CompareOptions | None = None,
    *,
    inputs: ExampleInputs | None = None,
    submodel: Sequence[str] = (),
    ep: str | None = None,
    device: Device | None = None,
    ep_options: Mapping[str, str] | None = None,
    **changes: Any,
) -> ModelComparison:
    """Run two models on the same inputs and compare their outputs; with ``by_module``, module by module.

    Args:
        reference: The reference: an ONNX file, a build folder, a checkpoint or Hub id, or a module.
        candidate: The model that is compared with it.
        options: Inputs, and what is compared; None: the defaults.
        inputs: Example inputs of a module whose config does not determine them.
        submodel: Parts to compare, of a folder with several; empty: all.
        ep: Execution provider of the candidate; the reference runs on the CPU. None: the CPU, or that of ``options``.
        device: Kind of device of the candidate; None: that of the execution provider.
        ep_options: Options of the execution provider.
        **changes: Fields of :class:`CompareOptions`, on top of ``options``: ``by_module=True``.

    Returns:
        The differences of outputs and, by module, where they begin; with several parts, also of each part.

    Raises:
        UsageError: an unknown field, inputs or outputs that do not match, values that do not fit, no common module or
            part, or a model whose outputs change from run to run.
        InputError: a file is damaged.
        StageError: one of the models cannot be run.

    Example:
        ```python
        difference = compare_models("model.onnx", "int8.onnx", by_module=True)
        ```
    """
    from winml.modelkit.compare import comparing as flow

    types = {field.name: str(field.type) for field in fields(flow.CompareOptions)}
    for name, value in changes.items():
        if name not in types:
            raise ConfigError(unknown_key_message(name, [*types], "compare_models"))
        refuse_wrong_type(f"compare_models: {name}", value, types[name])
    merged_options = replace(options or flow.CompareOptions(), **changes)
    run = merged_options.run
    run = replace(
        run,
        ep=ep or run.ep,
        device=device or run.device,
        ep_options=run.ep_options if ep_options is None else ep_options,
    )
    merged_options = replace(merged_options, run=run)
    if isinstance(reference, (str, os.PathLike)) and isinstance(candidate, (str, os.PathLike)):
        return resolve_pairs(os.fspath(reference), os.fspath(candidate), submodel).compare(merged_options, inputs)
    if submodel:
        raise UsageError(f"submodel {submodel[0]}: selects a part of a build folder", hint="Remove it.")
    return flow.compare_models(_resolve_side(reference), _resolve_side(candidate), merged_options, inputs=inputs)


def _resolve_side(model: str | os.PathLike[str] | ModelRequest | nn.Module) -> NamedSide | nn.Module:
    """Resolve the name of a model to a file or request; requests and modules are returned unchanged."""
    return resolve_side(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else model


@dataclass(frozen=True)
class ModelPairs:
    """Two names resolved to a pair of models, or to a pair for each part."""

    names: tuple[str, str]
    """Reference and candidate, as the user wrote them."""
    parts: Mapping[str, tuple[NamedSide, NamedSide]]
    """Name of the part → reference and candidate; only ``model`` if neither name is a folder of several parts."""
    notes: tuple[str, ...] = ()
    """Sentences on parts that only one of the models has."""

    @property
    def are_several(self) -> bool:
        """True if several parts are compared."""
        return len(self.parts) > 1

    @property
    def sides(self) -> list[NamedSide]:
        """The models of all parts."""
        return [model for pair in self.parts.values() for model in pair]

    def refuse_values(self, options: Sequence[str]) -> None:
        """Refuse options of a single graph if several graphs are compared.

        Args:
            options: The stated options of that kind, as users write them.

        Raises:
            UsageError: several graphs are compared and an option is stated; names the first option.
        """
        if self.are_several and options:
            raise UsageError(
                f"{options[0]} applies to one graph, but several are compared: {', '.join(self.parts)}",
                hint=f"Compare one part: {opt.submodel} {list(self.parts)[-1]}.",
            )

    def compare(self, options: CompareOptions, inputs: ExampleInputs | None = None) -> ModelComparison:
        """Compare the pairs of models.

        Args:
            options: Inputs of both models, and kind of the comparison.
            inputs: Example inputs of two PyTorch models.

        Raises:
            WinMLError: see :func:`compare_models`.
        """
        from winml.modelkit.compare import comparing as flow

        single_inputs: dict[str, object] = {
            "step": options.step,
            "data_set": options.data_set,
            "input_data": options.run.input_data,
            "inputs": inputs,
        }
        self.refuse_values(
            [name for name, value in single_inputs.items() if value is not None] + (["names"] if options.names else [])
        )
        if self.are_several:
            return flow.compare_parts(self.parts, self.names, options, self.notes)
        (pair,) = self.parts.values()
        result = flow.compare_models(*pair, options, inputs=inputs)
        return replace(result, notes=(*result.notes, *self.notes))


def resolve_pairs(reference: str, candidate: str, submodel: Sequence[str] = ()) -> ModelPairs:
    """Resolve two names to pairs of models; part by part if a name is a folder of several parts.

    Args:
        reference: As passed by the user.
        candidate: As passed by the user.
        submodel: Names of the parts to compare; empty: all common parts.

    Raises:
        UsageError: a name is no usable model, a part does not exist, or the models have no common part.
        InputError: a file is damaged.
    """
    names = (reference, candidate)
    folders = [part_files(name, beside_weights=False) for name in names]
    if not any(folders):
        if submodel:
            raise UsageError(
                f"{opt.submodel} {submodel[0]}: neither {reference} nor {candidate} has several parts",
                hint="Remove it.",
            )
        return ModelPairs(names, {ONLY_PART: (resolve_side(reference), resolve_side(candidate))})
    parts = next(folder for folder in folders if folder)
    refuse_unknown_parts(submodel, parts, names[folders.index(parts)])
    requested = [part for part in parts if not submodel or part in submodel]
    baseline, candidates = (
        dict(folder) if folder else _find_counterparts(name, parts, requested)
        for folder, name in zip(folders, names, strict=True)
    )
    common = [part for part in requested if part in baseline and part in candidates]
    unmatched = [part for part in dict.fromkeys((*baseline, *candidates)) if (part in baseline) != (part in candidates)]
    if not common or (submodel and len(common) < len(requested)):
        raise UsageError(
            f"{reference} has the parts {', '.join(baseline)}, {candidate} {', '.join(candidates)}",
            hint="Only parts that both models have can be compared.",
        )
    notes = (f"Not compared, in one model only: {', '.join(unmatched)}.",) if unmatched and not submodel else ()
    return ModelPairs(names, {part: (baseline[part], candidates[part]) for part in common}, notes)


def _find_counterparts(name: str, parts: Mapping[str, Path], requested: Sequence[str]) -> dict[str, NamedSide]:
    """Return part → counterpart for a folder of parts: the PyTorch model for each part, a file for its own part.

    A file that does not state its part stands for the requested part, if only one is requested.

    Args:
        name: The model compared with the folder, as the user names it.
        parts: Parts of the folder.
        requested: Names of the parts to compare.

    Raises:
        UsageError: the name is no usable model, or the part of the file is unknown.
    """
    model = resolve_side(name)
    if isinstance(model, ModelRequest):
        return dict.fromkeys(parts, model)
    from winml.modelkit.onnx.bundle import read_part_description  # imports onnx

    description = read_part_description(model)
    if description is not None and description.is_one_of_several:
        return {description.name: model}
    if len(requested) == 1:
        return {requested[0]: model}
    raise UsageError(
        f"{name} is one graph, but would be compared with {', '.join(requested)}",
        hint=f"Select the part to compare it with: {opt.submodel} {requested[0]}.",
    )
