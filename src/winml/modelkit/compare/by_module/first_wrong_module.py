"""Names the first wrong module in the error of a failed verification.

Runs only after a failure, in bounded time and memory, and never replaces the failure by another one: where modules
cannot be compared, the error says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.compare.by_module.module_comparison import TOLERANCE, compare_modules, unchanged_modules
from winml.modelkit.compare.by_module.onnx_side import OnnxSide
from winml.modelkit.compare.by_module.sides import GROUP_BYTES, SidePair
from winml.modelkit.compare.by_module.value_matching import MatchedBoundary, match_files, match_with_torch
from winml.modelkit.compare.records import ComparedModule
from winml.modelkit.compare.verification.single_rows import feeds_by_rows, takes_single_rows
from winml.modelkit.errors import VerificationError, first_line
from winml.modelkit.onnx.files.graph_reading import graph_of
from winml.modelkit.onnx.files.placing import external_files
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.ort.devices import ChosenProvider
from winml.modelkit.ort.host import available_bytes
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    from winml.modelkit.compare.verification.reference_run import PreparedPart

_MOST_SECONDS = 60.0
"""Chosen: who waits for an answer that is a failure waits a minute longer at most."""
_FINEST = 0.01
"""Chosen: where no module is off by more than the tolerance, a hundredth of it is looked for."""


def name_first_wrong_module(
    error: VerificationError,
    reference: Path | PreparedPart,
    candidate: Path,
    provider: ChosenProvider | None = None,
) -> None:
    """Add to an error which module is the first to be wrong, or why that cannot be said; in place.

    Nothing is added where the error does not come from different answers.

    Args:
        error: The failure.
        reference: What is right: a file, or a model in PyTorch.
        candidate: The file that answers otherwise.
        provider: The provider that ``candidate`` is compiled for. What was compiled cannot be looked into: the
            provider runs ``reference`` with the outputs of its modules as further outputs, beside the CPU.
    """
    if error.inputs is None:
        return
    try:
        if reason := _reason_against(reference, candidate):
            error.hint += f" The first wrong module was not searched for: {reason}."
            return
        module = _first_wrong_module(reference, candidate, _as_arrays(error.inputs), provider)
    except Exception as problem:
        # A file that is removed at the end is not named.
        reason = first_line(problem).replace(str(candidate), "the file").rstrip(".")
        error.hint += f" The first wrong module was not found: {reason}."
        return
    error.message += f"; {_words(module)}"


def _words(module: ComparedModule | None) -> str:
    if module is None or module.fidelity is None:
        return "no single module diverges, as far as modules can be compared"
    identity = module.identity
    name = f"{identity.words} ({identity.tag})" if identity.module else "the root"
    if module.fidelity.problem:
        return f"first wrong module: {name}, {module.fidelity.problem}"
    fed = "" if module.input_error is None else f"; error of its inputs {module.input_error:.1e}"
    return f"first wrong module: {name}, relative error {module.fidelity.relative_error:.1e}{fed}"


def _reason_against(reference: Path | PreparedPart, candidate: Path) -> str:
    """Return why two models should not be run beside each other; empty where they may."""
    # A model in PyTorch is there with its weights, or reads them as it goes.
    models = [candidate, *([reference] if isinstance(reference, Path) else [])]
    needed = GROUP_BYTES + sum(file.stat().st_size for path in models for file in (path, *external_files(path)))
    available = available_bytes()
    if needed <= available:
        return ""
    return f"both models and a group of their values need {size_words(needed)}; {size_words(available)} are available"


def _as_arrays(values: Mapping[str, Any]) -> dict[str, Array]:
    """Return arrays; of tensors, their values."""
    if all(isinstance(value, np.ndarray) for value in values.values()):
        return dict(values)
    from winml.modelkit.models.tensors import to_numpy  # loads torch, whose tensors are here

    return {name: to_numpy(value) for name, value in values.items()}


def _first_wrong_module(
    reference: Path | PreparedPart, candidate: Path, feeds: Mapping[str, Array], provider: ChosenProvider | None
) -> ComparedModule | None:
    path = reference if provider is not None and isinstance(reference, Path) else candidate
    file = OnnxSide(path, by_module=True, shown="the result", provider=provider)
    if takes_single_rows(graph_of(read_structure(path), path)):
        feeds = feeds_by_rows(feeds)[0]
    if isinstance(reference, Path):
        side = OnnxSide(reference, by_module=True)
        matched = match_files(side, file)
        side.session([name for item in matched for name, _ in item.taps])
        unchanged = unchanged_modules(side, file) if provider is None else None
        return _first_of(SidePair(side, file, (feeds,)), file, matched, unchanged)
    from winml.modelkit.compare.by_module.torch_side import TorchSide
    from winml.modelkit.compare.verification.streamed_reference import with_streamed_values

    with with_streamed_values(reference) as weighted:
        pair = SidePair(TorchSide(weighted, "the model in PyTorch"), file, (feeds,))
        return _first_of(pair, file, match_with_torch(pair), None)


def _first_of(
    pair: SidePair, file: OnnxSide, matched: Sequence[MatchedBoundary], unchanged: frozenset[str] | None
) -> ComparedModule | None:
    file.session([name for item in matched for _, name in item.taps])
    outputs, _ = pair.compared_outputs()
    complete = min((output.fidelity for output in outputs), key=lambda item: (not item.problem, item.sqnr_db))
    compared = compare_modules(pair, matched, complete, unchanged=unchanged, seconds=_MOST_SECONDS)
    found = (compared.divergence(tolerance) for tolerance in (TOLERANCE, TOLERANCE * _FINEST))
    return next((compared.modules[position] for position in found if position is not None), None)
