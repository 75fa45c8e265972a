"""Models run side by side: an ONNX file in ONNX Runtime, a checkpoint in PyTorch.

A side maps the named arrays of a batch to named output arrays, independent of samples and tasks. Batches are cached for
the next model with the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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

    def run(self, feeds: Arrays) -> Arrays:
        """Run the model once.

        Args:
            feeds: Input name → array; additional arrays are ignored.

        Raises:
            StageError: the model refuses the values, or fails.
        """
        dtypes = ((item.name, numpy_dtype(item.dtype)) for item in self.inputs)
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
    side = onnx_side(model.session, options.shown, provider.provider.name)
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
    own = {spec.name: graph_input(spec.name, spec.dtype, [None] * len(spec.shape)) for spec in part.inputs}
    if inputs is None:
        used = own
    else:
        # A graph may omit an input of the model; then the model runs without it, too.
        used = {item.name: own.get(item.name, item) for item in inputs if item.cache is None}
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
        for item in side.inputs:
            joined[item.name] = _joined(joined[item.name], item, side.name) if item.name in joined else item
    return tuple(
        item.model_copy(update={"dtype": "float32"}) if item.dtype in _HALVES else item for item in joined.values()
    )


def _joined(first: InputTensorSpec, second: InputTensorSpec, displayed: str) -> InputTensorSpec:
    pairs = list(zip(first.shape, second.shape, strict=False))
    clash = any(isinstance(left, int) and isinstance(right, int) and left != right for left, right in pairs)
    if clash or len(first.shape) != len(second.shape):
        raise UsageError(
            f"the model takes {first.name} {first.words}, the baseline {displayed} {second.words}: no sample "
            "fits both models",
            hint=f"Choose a {opt.baseline} with the same sizes or with dynamic dimensions.",
        )
    shape = tuple(left if isinstance(left, int) else right for left, right in pairs)
    return first.model_copy(update={"shape": shape})


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
        held = 0
        for batch in super().batches(samples, batch_size):
            held += _held_bytes(batch)
            if held <= _MAX_CACHED_BYTES:
                created.append(batch)
            else:
                created.clear()
            yield batch
        if held <= _MAX_CACHED_BYTES:
            self._cached_batches = created


def _yield_in_step(retained: Iterable[Batch], samples: Iterator[Sample]) -> Iterator[Batch]:
    """Yield cached batches in step with the samples, which the caller records as they are read."""
    taken = -1
    for batch in retained:
        while taken < batch.rows[-1].number:
            next(samples, None)
            taken += 1
        yield batch


def _held_bytes(batch: Batch) -> int:
    """Bytes of a batch: its arrays, and its images with four bytes a pixel."""
    sizes = (row.image_size for row in batch.rows if row.image_size is not None)
    return sum(array.nbytes for array in batch.feeds.values()) + sum(4 * height * width for height, width in sizes)
