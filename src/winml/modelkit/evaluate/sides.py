"""The models that are run side by side: an ONNX file in ONNX Runtime, a checkpoint in PyTorch.

Each takes the arrays of a batch by name and returns arrays by name. Which samples are in them, and what the answers
mean, is not known here. Inputs of a batch are kept for the next model that takes the same.
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
    """Runs the model on one array per input, each of the type that the input has."""
    provider: str | None = None
    """Execution provider of an ONNX file."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of an ONNX file."""

    def run(self, feeds: Arrays) -> Arrays:
        """Run the model once.

        Args:
            feeds: One array per input, and perhaps further ones.

        Raises:
            StageError: it refuses the values, or fails.
        """
        dtypes = ((item.name, numpy_dtype(item.dtype)) for item in self.inputs)
        return self.call({name: feeds[name].astype(dtype, copy=False) for name, dtype in dtypes})


def onnx_side(session: Session, name: str, provider: str) -> Side:
    """Return the side of an ONNX graph in an open session."""
    return Side("onnx", name, graph_inputs(session), session.run, provider, session.metadata)


def open_onnx_side(path: Path, options: RunOptions) -> Side:
    """Open an ONNX file.

    Raises:
        UsageError: the execution provider is not there, or needs fixed sizes.
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
        loaded: What :func:`~winml.modelkit.models.model.load_model` returned.
        inputs: What the other side is fed, of which a cache is left out; None: the model's own inputs, with all sizes
            open.
        shown: The model, for people.

    Raises:
        UsageError: it takes an input that the other side does not.
    """
    from winml.modelkit.compare.verification.reference_run import prepared_part, run_on_arrays

    part = loaded.only_part
    own = {spec.name: graph_input(spec.name, spec.dtype, [None] * len(spec.shape)) for spec in part.inputs}
    if inputs is None:
        used = own
    else:
        # A graph may do without an input that the model takes; then the model does without it, too.
        used = {item.name: own.get(item.name, item) for item in inputs if item.cache is None}
    hint = (
        f"The PyTorch code of the model fails on these samples. Evaluate the ONNX file alone with {opt.baseline} none."
    )
    with prepared_part(part, list(used), plain_attention=False) as prepared:
        yield Side("pytorch", shown, tuple(used.values()), lambda feeds: run_on_arrays(prepared, feeds, shown, hint))


def joined_inputs(sides: Sequence[Side]) -> tuple[InputTensorSpec, ...]:
    """Return inputs whose arrays all sides take: a size that one of them fixes is fixed.

    Numbers of 16 bits are left to each side to round, so that the other is not fed what this one rounded.

    Raises:
        UsageError: two fix a size differently.
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


RETAINED_BYTES = 512_000_000
"""Arrays and pictures that are kept. Chosen: small beside the forms that are judged on them."""


class CachedBatches(Preprocessor):
    """A preprocessor for one list of samples: the second run over them takes what the first one made."""

    _kept: list[Batch] | None = None

    @classmethod
    def keeping(cls, preprocessor: Preprocessor) -> CachedBatches:
        """Return one that makes what another makes.

        Args:
            preprocessor: It stays as it is.
        """
        created = cls.__new__(cls)
        vars(created).update(vars(preprocessor))
        return created

    def batches(self, samples: Iterable[Sample], batch_size: int | None = None) -> Iterator[Batch]:
        """Yield what each run takes; see :meth:`Preprocessor.batches`. Samples and batch size are those of each time.

        Raises:
            UsageError: another batch size than the graph takes, a role is missing, or the arrays are not what the
                graph takes.
            InputError: a processor fails on a sample.
        """
        if self._kept is not None:
            yield from _in_step(self._kept, iter(samples))
            return
        created: list[Batch] = []
        held = 0
        for batch in super().batches(samples, batch_size):
            held += _held_bytes(batch)
            if held <= RETAINED_BYTES:
                created.append(batch)
            else:
                created.clear()
            yield batch
        if held <= RETAINED_BYTES:
            self._kept = created


def _in_step(retained: Iterable[Batch], samples: Iterator[Sample]) -> Iterator[Batch]:
    """Yield batches, each when its samples were read: who gives them waits for that."""
    taken = -1
    for batch in retained:
        while taken < batch.rows[-1].number:
            next(samples, None)
            taken += 1
        yield batch


def _held_bytes(batch: Batch) -> int:
    """Return what a batch takes: its arrays, and its pictures with four bytes a pixel."""
    sizes = (row.image_size for row in batch.rows if row.image_size is not None)
    return sum(array.nbytes for array in batch.feeds.values()) + sum(4 * height * width for height, width in sizes)
