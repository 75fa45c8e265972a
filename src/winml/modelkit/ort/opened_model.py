"""Opening of an ONNX file on an execution provider, with its input values, for all commands that run a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from winml.modelkit.arrays import Arrays
from winml.modelkit.errors import MeasureError, NoInputsError, StageError, UsageError, opt, spell
from winml.modelkit.onnx.specs import InputTensorSpec, damaged_bounds_notes
from winml.modelkit.ort.accepted_inputs import accepted_inputs, may_refuse_values, notes_on_inputs, run_generated
from winml.modelkit.ort.decoding.inputs import DecoderRun, decoder_feeds, decoder_tokens
from winml.modelkit.ort.default_sizes import fixing_command
from winml.modelkit.ort.devices import ChosenProvider, choose_provider, missing_option_hint
from winml.modelkit.ort.execution_providers import Device
from winml.modelkit.ort.graph_inputs import draw_feeds, graph_inputs, load_feeds, settle_sizes
from winml.modelkit.ort.host import resident_bytes
from winml.modelkit.ort.sessions import PreparedRun, Session

_T = TypeVar("_T")


@dataclass(frozen=True)
class RunOptions:
    """Options and input values for running an ONNX file."""

    shown: str
    """The model as written by the user."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of its dynamic dimensions, by name."""
    fitting_sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes at which the model was found to run, for sizes without a request; see :func:`run_at_fitting_sizes`."""
    fitting_inputs: tuple[InputTensorSpec, ...] = ()
    """Inputs with values on which the model was found to run; ``()``: as stated in the file."""
    fitting_feeds: Arrays | None = None
    """A sample stored beside the model, on which it was found to run; ``None``: values are drawn."""
    fitting_note: str = ""
    """Sentence on these values."""
    batch_size: int | None = None
    decoding: DecoderRun | None = None
    """The measured run of a decoder with a cache; None: only the sizes above apply."""
    input_data: Path | None = None
    """File of values instead of random values."""
    seed: int = 0
    ep: str | None = None
    device: Device | None = None
    ep_options: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    """Threads per operator; None: the runtime's default."""
    io_binding: bool = True
    """Copy inputs to the device once and leave outputs there; False passes arrays in each run."""
    is_exported: bool = False
    """True if the file was exported from the PyTorch model that the user named."""

    def choose_provider(self) -> ChosenProvider:
        """Choose the execution provider of the options.

        Raises:
            UsageError: the provider is unknown or not installed.
        """
        return choose_provider(self.ep, self.device, self.ep_options)

    @property
    def stated_provider(self) -> ChosenProvider | None:
        """The execution provider, if a provider, a device or a provider option is stated."""
        return self.choose_provider() if self.ep or self.device or self.ep_options else None


@dataclass(frozen=True)
class OpenedModel:
    """A model in a session, with the time and memory it took to create the session."""

    session: Session
    provider: ChosenProvider
    creation_ms: float
    session_bytes: int


@dataclass(frozen=True)
class PreparedModel:
    """An opened model with its input values, ready for its first run."""

    path: Path
    options: RunOptions
    opened: OpenedModel
    values: Values
    run: PreparedRun


@dataclass(frozen=True)
class Values:
    """The input values of a model."""

    inputs: tuple[InputTensorSpec, ...]
    feeds: Arrays
    notes: tuple[str, ...] = ()
    file: Path | None = None
    """File of the values; None for random values."""

    @property
    def words(self) -> str:
        """Names, types and shapes, for messages."""
        return (
            ", ".join(f"{name} {array.dtype}[{', '.join(map(str, array.shape))}]" for name, array in self.feeds.items())
            or "nothing"
        )


def open_model(path: Path, options: RunOptions, provider: ChosenProvider, **session_options: Any) -> OpenedModel:
    """Open a file in a session.

    Args:
        path: The file.
        options: Options of the run.
        provider: The execution provider.
        session_options: Further arguments of the session.

    Raises:
        InputError: the file, or one of its data files, is damaged or missing.
        StageError: ONNX Runtime cannot load the file.
    """
    resident_before, started = resident_bytes(), time.perf_counter()
    try:
        session = provider.open(path, threads=options.threads, **session_options)
    except StageError as error:
        hint = (
            missing_option_hint(provider, error.message)
            or error.hint
            or f"winml inspect {path} shows its operators and opsets; winml sys shows the ONNX Runtime version."
        )
        raise MeasureError(error.message, hint=hint) from error
    creation_ms = (time.perf_counter() - started - session.check_seconds) * 1000
    return OpenedModel(session, provider, creation_ms, max(resident_bytes() - resident_before, 0))


def values_for(session: Session, options: RunOptions) -> Values:
    """Return the input values of a run: from the user's file, or random.

    Raises:
        UsageError: sizes or values do not fit the inputs of the graph.
        InputError: the user's file is damaged.
    """
    inputs, damaged = graph_inputs(session), tuple(damaged_bounds_notes(session.metadata))
    if options.decoding is not None or options.input_data is None:
        drawn = random_values(inputs, options)
        return replace(drawn, notes=(*damaged, *drawn.notes))
    if options.sizes or options.batch_size is not None:
        option = spell("shape_config" if options.sizes else "batch_size")
        raise UsageError(
            f"{option}: {opt.input_data} {options.input_data} already determines the sizes", hint="Use one of the two."
        )
    return Values(inputs, load_feeds(options.input_data, inputs), damaged, file=options.input_data)


def random_values(inputs: Sequence[InputTensorSpec], options: RunOptions) -> Values:
    """Return random values for the inputs of a graph, or of one run of a decoder.

    Raises:
        UsageError: sizes do not fit the inputs, or no values can be drawn.
    """
    if options.decoding is not None:
        feeds, notes = decoder_feeds(
            inputs, options.decoding, options.sizes, batch_size=options.batch_size, seed=options.seed
        )
        return Values(tuple(inputs), feeds, notes)
    if options.fitting_feeds is not None:
        return Values(tuple(inputs), options.fitting_feeds, (options.fitting_note,))
    fitting = {name: size for name, size in options.fitting_sizes.items() if name not in options.sizes}
    sizes = settle_sizes(inputs, {**fitting, **options.sizes}, batch_size=options.batch_size)
    size_words = ", ".join(f"{name} {size}" for name, size in fitting.items())
    note = f"default sizes, changed because the model fails at others: {size_words}"
    notes = (*sizes.notes, *([f"{note} (change them with {opt.shape_config})"] if fitting else []))
    inputs = options.fitting_inputs or inputs
    notes += (options.fitting_note,) if options.fitting_note else ()
    return Values(tuple(inputs), draw_feeds(inputs, sizes.by_name, options.seed), notes)


def with_whole_prompts(inputs: Sequence[InputTensorSpec], options: RunOptions) -> RunOptions:
    """Return options with a whole prompt for a decoder with a cache, instead of a step after a random cache."""
    tokens = None if options.decoding is not None else decoder_tokens(inputs, options.sizes)
    return options if tokens is None else replace(options, decoding=DecoderRun(tokens, 0))


def run_at_fitting_sizes(path: Path, options: RunOptions, work: Callable[[RunOptions], _T]) -> _T:
    """Run work with a model; if it fails at default sizes, search sizes at which the model runs and repeat.

    Sizes are searched only if needed, so that the first run stays the model's first run.

    Args:
        path: The ONNX file.
        options: Options of the run.
        work: Opens the file and runs it with the passed options.

    Raises:
        WinMLError: an error of the work.
    """
    try:
        return work(options)
    except MeasureError as error:
        session = open_model(path, options, options.choose_provider()).session
        try:
            fitting = with_fitting_sizes(session, options)
        except NoInputsError:
            raise error from None  # the first error states sizes that the user may know
        del session
        if fitting is options:
            raise
        return work(fitting)


def with_fitting_sizes(session: Session, options: RunOptions) -> RunOptions:
    """Return options with supported sizes, if the model refuses the default sizes.

    Sizes are halved until the model runs: a position table has an end that graphs do not declare. The options are
    returned unchanged if the model runs, or at no sizes beside those of the user. If no smaller size helps, other
    sizes and values are tried.

    Raises:
        UsageError: sizes do not fit the inputs of the graph.
        NoInputsError: the model accepts none of the generated inputs.
    """
    if options.input_data is not None:
        return options
    inputs = graph_inputs(session)
    if options.decoding is not None:
        return _find_fitting_run(session, options)
    settled = settle_sizes(inputs, options.sizes, batch_size=options.batch_size)
    sizes, is_first = dict(settled.chosen), True
    # Integers, flags and text without stated values may be refused at fixed sizes as well.
    has_guesses = may_refuse_values(inputs) or any(
        "float" not in spec.dtype and spec.value_range is None and not spec.values for spec in inputs
    )
    if not sizes and not has_guesses:
        return options
    while sizes or is_first:
        feeds = draw_feeds(inputs, {**settled.by_name, **sizes}, options.seed)
        try:
            if may_refuse_values(inputs):
                run_generated(session, feeds, as_declared=True)
            else:
                session.run(feeds, session.outputs[:1])
        except StageError:
            smaller = {name: size // 2 if size > _SMALLEST_HALVED else size for name, size in sizes.items()}
            if smaller == sizes:
                break
            sizes, is_first = smaller, False
        else:
            return options if is_first else replace(options, fitting_sizes=sizes)
    stated = {name: size for name, size in settled.by_name.items() if name not in settled.chosen}
    try:
        accepted = next(accepted_inputs(session, options.seed, stated))
    except StageError:
        if options.sizes:
            return options  # the run with the user's sizes states the reason
        raise
    note = notes_on_inputs([accepted])
    if accepted.origin:
        return replace(options, fitting_feeds=accepted.feeds, fitting_note=note)
    fitting = {name: accepted.sizes[name] for name in settled.chosen if name in accepted.sizes}
    return replace(options, fitting_sizes=fitting, fitting_inputs=accepted.inputs, fitting_note=note)


def _find_fitting_run(session: Session, options: RunOptions) -> RunOptions:
    """Return options with a run of a decoder short enough for the model; unchanged options if no run is."""
    tried = options
    while tried.decoding is not None and not _can_run(session, tried):
        shorter = tried.decoding.halve()
        if shorter == tried.decoding:
            return options
        tried = replace(tried, decoding=shorter)
    return tried


def _can_run(session: Session, options: RunOptions) -> bool:
    """Return True if the model runs on the input values of the options."""
    try:
        session.run(values_for(session, options).feeds)
    except StageError:
        return False
    return True


_SMALLEST_HALVED = 4
"""Chosen: sizes up to this, such as those of a batch or of channels, do not limit tables."""


def refuse_dynamic_inputs(provider: ChosenProvider, inputs: tuple[InputTensorSpec, ...], options: RunOptions) -> None:
    """Refuse a graph with dynamic dimensions on a provider that needs fixed sizes.

    Raises:
        UsageError: the message names the provider; the hint has the command that fixes the sizes.
    """
    names = dict.fromkeys(size for spec in inputs for size in spec.shape if isinstance(size, str))
    sums = {name for spec in inputs for name in spec.sums}
    if names and not provider.provider.takes_dynamic:
        raise UsageError(
            f"{opt.ep} {options.ep}: {provider.provider.name} requires fixed sizes, but {options.shown} has dynamic "
            "dimensions",
            hint=f"Fix the sizes first: {fixing_command(options.shown, [name for name in names if name not in sums])}",
        )


@contextmanager
def prepared_model(
    path: Path, options: RunOptions, provider: ChosenProvider, **session_options: object
) -> Iterator[PreparedModel]:
    """Open a file and prepare its input values; errors of a run inside the block state the values.

    Args:
        path: The file.
        options: Options of the run.
        provider: The execution provider.
        session_options: Further arguments of the session.

    Raises:
        UsageError: sizes or values do not fit, or the provider needs fixed sizes and the graph has dynamic dimensions.
        InputError: a file is damaged.
        StageError: ONNX Runtime cannot load or run it.
    """
    opened = open_model(path, options, provider, **session_options)
    values = values_for(opened.session, options)
    refuse_dynamic_inputs(provider, values.inputs, options)
    with refusals_explained(values):
        run = opened.session.prepare(values.feeds, io_binding=options.io_binding)
        yield PreparedModel(path, options, opened, values, run)


@contextmanager
def refusals_explained(values: Values) -> Iterator[None]:
    """Add the input values to the error of a failed run inside the block.

    Raises:
        MeasureError: replaces the StageError of the run, with the same reason.
    """
    try:
        yield
    except MeasureError:
        raise
    except StageError as error:
        hint = f"Set supported sizes with {opt.shape_config}, or pass values with {opt.input_data}."
        if values.file is not None:
            hint = f"Correct the values in {values.file}."
        raise MeasureError(f"{error.message} (inputs: {values.words})", hint=hint) from error
