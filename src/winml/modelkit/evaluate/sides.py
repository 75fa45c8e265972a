"""Models run side by side: an ONNX file in ONNX Runtime, a checkpoint in PyTorch.

A side maps the named arrays of a batch to named output arrays, independent of samples and tasks. Batches are cached for
the next model with the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from winml.modelkit.arrays import Arrays, numpy_dtype
from winml.modelkit.errors import UsageError, opt
from winml.modelkit.onnx.specs import InputTensorSpec, graph_input
from winml.modelkit.ort.graph_inputs import graph_inputs
from winml.modelkit.ort.opened_model import RunOptions, open_model, refuse_dynamic_inputs
from winml.modelkit.ort.sessions import Session
from winml.modelkit.samples.preprocessing import Batch, Preprocessor, Sample

if TYPE_CHECKING:
    from winml.modelkit.models.parts import LoadedModel

SideKind = Literal["onnx", "pytorch"]
_HALVES = frozenset({"float16", "bfloat16"})


@dataclass(frozen=True)
class Side:
    """One of the models."""

    kind: SideKind
    name: str
    inputs: tuple[InputTensorSpec, ...]
    call: Callable[[Arrays], Arrays]
    """Runs the model on one array per input, each with the type of the input."""
    provider: str | None = None
    """Execution provider of an ONNX file."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of an ONNX file."""
    simulated_on: str = ""
    """Kind of device on which the provider simulates its device; empty without simulation."""

    def run(self, feeds: Arrays) -> Arrays:
        """Run the model once.

        Args:
            feeds: Input name → array; additional arrays are ignored.

        Raises:
            StageError: the model refuses the values, or fails.
        """
        dtypes = ((spec.name, numpy_dtype(spec.dtype)) for spec in self.inputs)
        return self.call({name: feeds[name].astype(dtype, copy=False) for name, dtype in dtypes})


def onnx_side(session: Session, name: str, provider: str) -> Side:
    """Create the side of an ONNX graph in an open session."""
    return Side("onnx", name, graph_inputs(session), session.run, provider, session.metadata)


def open_onnx_side(path: Path, options: RunOptions) -> Side:
    """Open an ONNX file.

    Raises:
        UsageError: the execution provider is missing, or requires static sizes.
        StageError: ONNX Runtime cannot load the file.
    """
    provider = options.choose_provider()
    model = open_model(path, options, provider)
    side = replace(onnx_side(model.session, options.shown, provider.provider.name), simulated_on=provider.stand_in)
    refuse_dynamic_inputs(provider, side.inputs, options)
    return side


@contextmanager
def opened_torch_side(loaded: LoadedModel, inputs: Sequence[InputTensorSpec] | None, *, shown: str) -> Iterator[Side]:
    """Prepare a loaded PyTorch model, for the time of the block.

    Args:
        loaded: Result of :func:`~winml.modelkit.models.model.load_model`.
        inputs: Inputs of the other side, whose KV cache is ignored; ``None``: the model's inputs, with all sizes
            dynamic.
        shown: Name of the model in messages.

    Raises:
        UsageError: the model requires an input that the other side lacks.
    """
    from winml.modelkit.compare.verification.reference_run import prepared_part, run_on_arrays

    part = loaded.only_part
    specs = {spec.name: graph_input(spec.name, spec.dtype, [None] * len(spec.shape)) for spec in part.inputs}
    if inputs is None:
        used = specs
    else:
        # A graph may omit an input of the model; then the model runs without it, too.
        used = {spec.name: specs.get(spec.name, spec) for spec in inputs if spec.cache is None}
    hint = (
        f"The PyTorch code of the model fails on these samples. Evaluate the ONNX file alone with {opt.baseline} none."
    )
    with prepared_part(part, list(used), plain_attention=False) as prepared:
        yield Side("pytorch", shown, tuple(used.values()), lambda feeds: run_on_arrays(prepared, feeds, shown, hint))


def joined_inputs(sides: Sequence[Side]) -> tuple[InputTensorSpec, ...]:
    """Return inputs whose arrays all sides take: a size that one of them fixes is fixed.

    16-bit floats are passed as float32, so that each side rounds separately.

    Raises:
        UsageError: static sizes of two sides differ.
    """
    joined: dict[str, InputTensorSpec] = {}
    for side in sides:
        for spec in side.inputs:
            joined[spec.name] = _join_inputs(joined[spec.name], spec, side.name) if spec.name in joined else spec
    return tuple(
        spec.model_copy(update={"dtype": "float32"}) if spec.dtype in _HALVES else spec for spec in joined.values()
    )


def _join_inputs(ours: InputTensorSpec, theirs: InputTensorSpec, name: str) -> InputTensorSpec:
    """Return an input with the static sizes of both sides.

    Raises:
        UsageError: the static sizes differ.
    """
    pairs = list(zip(ours.shape, theirs.shape, strict=False))
    clash = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
    if clash or len(ours.shape) != len(theirs.shape):
        raise UsageError(
            f"the model takes {ours.name} {ours.words}, the baseline {name} {theirs.words}: no sample fits both models",
            hint=f"Choose a {opt.baseline} with the same sizes or with dynamic dimensions.",
        )
    shape = tuple(a if isinstance(a, int) else b for a, b in pairs)
    return ours.model_copy(update={"shape": shape})


_MAX_CACHED_BYTES = 512_000_000
"""Maximum bytes of cached arrays and images. Chosen: small relative to the variants judged on them."""


class CachedBatches(Preprocessor):
    """A preprocessor for one list of samples, whose batches are reused in later runs."""

    _cached_batches: list[Batch] | None = None

    @classmethod
    def keeping(cls, preprocessor: Preprocessor) -> CachedBatches:
        """Create a caching copy of a preprocessor.

        Args:
            preprocessor: It is not changed.
        """
        created = cls.__new__(cls)
        vars(created).update(vars(preprocessor))
        return created

    def batches(self, samples: Iterable[Sample], batch_size: int | None = None) -> Iterator[Batch]:
        """Yield the batches of a run; see :meth:`Preprocessor.batches`. All runs must pass equal arguments.

        Raises:
            UsageError: the graph requires a different batch size, a role is missing, or the arrays do not fit the
                graph.
            InputError: a processor fails on a sample.
        """
        if self._cached_batches is not None:
            yield from _yield_in_step(self._cached_batches, iter(samples))
            return
        created: list[Batch] = []
        size = 0
        for batch in super().batches(samples, batch_size):
            size += _batch_bytes(batch)
            if size <= _MAX_CACHED_BYTES:
                created.append(batch)
            else:
                created.clear()
            yield batch
        if size <= _MAX_CACHED_BYTES:
            self._cached_batches = created


def _yield_in_step(batches: Iterable[Batch], samples: Iterator[Sample]) -> Iterator[Batch]:
    """Yield cached batches in step with the samples, which the caller records as they are read."""
    last_read = -1
    for batch in batches:
        while last_read < batch.rows[-1].number:
            next(samples, None)
            last_read += 1
        yield batch


def _batch_bytes(batch: Batch) -> int:
    """Bytes of a batch: its arrays, and its images with four bytes a pixel."""
    sizes = (row.image_size for row in batch.rows if row.image_size is not None)
    return sum(array.nbytes for array in batch.feeds.values()) + sum(4 * height * width for height, width in sizes)
