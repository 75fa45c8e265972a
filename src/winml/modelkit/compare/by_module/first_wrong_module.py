"""Search for the first wrong module after a failed verification, for the error message.

Runs only after a failure, in bounded time and memory, and never replaces the failure by another error: if modules
cannot be compared, the error states the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.compare.by_module.module_comparison import FINEST, TOLERANCE, compare_modules, unchanged_modules
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
"""Chosen: a failure is reported at most a minute later."""


def name_first_wrong_module(
    error: VerificationError,
    reference: Path | PreparedPart,
    candidate: Path,
    provider: ChosenProvider | None = None,
) -> None:
    """Add the first wrong module to an error, or the reason why it is unknown; in place.

    Errors without different outputs are not changed.

    Args:
        error: The failure.
        reference: The reference: a file, or a model in PyTorch.
        candidate: The file with different outputs.
        provider: The provider that ``candidate`` is compiled for. Compiled graphs have no inner values: the provider
            runs ``reference`` with the outputs of its modules as additional outputs, compared with the CPU provider.
    """
    if error.inputs is None:
        return
    try:
        if reason := _memory_problem(reference, candidate):
            error.hint += f" The first wrong module was not searched for: {reason}."
            return
        module = _find_wrong_module(reference, candidate, _as_arrays(error.inputs), provider)
    except Exception as problem:
        # The file is temporary and not named.
        reason = first_line(problem).replace(str(candidate), "the file").rstrip(".")
        error.hint += f" The first wrong module was not found: {reason}."
        return
    error.message += f"; {_module_words(module)}"


def _module_words(module: ComparedModule | None) -> str:
    """Describe the first wrong module for a message, or that no module diverges."""
    if module is None or module.fidelity is None:
        return "no single module diverges, as far as modules can be compared"
    identity = module.identity
    name = f"{identity.words} ({identity.tag})" if identity.module else "the root"
    if module.fidelity.problem:
        return f"first wrong module: {name}, {module.fidelity.problem}"
    fed = "" if module.input_error is None else f"; error of its inputs {module.input_error:.1e}"
    return f"first wrong module: {name}, relative error {module.fidelity.relative_error:.1e}{fed}"


def _memory_problem(reference: Path | PreparedPart, candidate: Path) -> str:
    """Reason not to run two models at once; empty if possible."""
    # A PyTorch model is already in memory with its weights, or streams them.
    models = [candidate, *([reference] if isinstance(reference, Path) else [])]
    needed = GROUP_BYTES + sum(file.stat().st_size for path in models for file in (path, *external_files(path)))
    available = available_bytes()
    if needed <= available:
        return ""
    return f"both models and a group of their values need {size_words(needed)}; {size_words(available)} are available"


def _as_arrays(values: Mapping[str, Any]) -> dict[str, Array]:
    """Convert tensors to arrays."""
    if all(isinstance(value, np.ndarray) for value in values.values()):
        return dict(values)
    from winml.modelkit.models.tensors import to_numpy  # loads torch, already loaded for tensors

    return {name: to_numpy(value) for name, value in values.items()}


def _find_wrong_module(
    reference: Path | PreparedPart, candidate: Path, feeds: Mapping[str, Array], provider: ChosenProvider | None
) -> ComparedModule | None:
    """Run both models on one sample and compare their modules; ``None`` if no module diverges.

    Args:
        reference: The source file, or the part in PyTorch.
        candidate: The written file.
        feeds: The sample.
        provider: Provider that the candidate is compiled for; it runs the reference in place of the candidate.
    """
    path = reference if provider is not None and isinstance(reference, Path) else candidate
    file = OnnxSide(path, by_module=True, shown="the result", provider=provider)
    if takes_single_rows(graph_of(read_structure(path), path)):
        feeds = feeds_by_rows(feeds)[0]
    if isinstance(reference, Path):
        side = OnnxSide(reference, by_module=True)
        matched = match_files(side, file)
        side.session([name for match in matched for name, _ in match.taps])
        unchanged = unchanged_modules(side, file) if provider is None else None
        return _find_divergence(SidePair(side, file, (feeds,), counts_padding=True), file, matched, unchanged)
    from winml.modelkit.compare.by_module.torch_side import TorchSide
    from winml.modelkit.compare.verification.streamed_reference import with_streamed_values

    with with_streamed_values(reference) as weighted:
        pair = SidePair(TorchSide(weighted, "the model in PyTorch"), file, (feeds,), counts_padding=True)
        return _find_divergence(pair, file, match_with_torch(pair), None)


def _find_divergence(
    pair: SidePair, file: OnnxSide, matched: Sequence[MatchedBoundary], unchanged: frozenset[str] | None
) -> ComparedModule | None:
    """Return the first diverging module, at the tolerance and then at a finer tolerance; ``None`` without one."""
    file.session([name for match in matched for _, name in match.taps])
    outputs, _ = pair.compared_outputs()
    worst = min((output.fidelity for output in outputs), key=lambda fidelity: (not fidelity.problem, fidelity.sqnr_db))
    compared = compare_modules(pair, matched, worst, unchanged=unchanged, seconds=_MOST_SECONDS)
    positions = (compared.divergence(tolerance) for tolerance in (TOLERANCE, TOLERANCE * FINEST))
    return next((compared.modules[position] for position in positions if position is not None), None)
