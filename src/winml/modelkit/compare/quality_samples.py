"""Samples that the quality of a file is judged on, equal in all commands.

Arrays or a dataset of the user, samples stored beside the model, or realistic samples: sentences of the tokenizer's
words, images and audio with natural spectra, converted by the processors beside the model. Without processors, random
values.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare.fidelity import QualitySamples, QualitySource
from winml.modelkit.errors import NoInputsError, StageError, UsageError, WinMLError, opt
from winml.modelkit.file_names import files_folder
from winml.modelkit.onnx.files.placing import external_files
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.accepted_inputs import may_refuse_values, run_generated
from winml.modelkit.ort.decoding.inputs import decoder_tokens, inputs_of_file
from winml.modelkit.ort.graph_inputs import DRAWN_DTYPES, graph_inputs
from winml.modelkit.ort.opened_model import RunOptions, Values, values_for, with_fitting_sizes, with_whole_prompts
from winml.modelkit.ort.sessions import Session
from winml.modelkit.ort.stored_samples import origin_words, stored_samples, unused_note
from winml.modelkit.samples.data_sets import DataSetRequest, open_data_set
from winml.modelkit.samples.generated_samples import (
    decoder_data,
    decoding_samples,
    embedding_samples,
    generate_samples,
    has_processors,
    with_fixed_sizes,
)

MOST_SAMPLES = 16
"""Default number of samples. Chosen: the ends of the interval are not single samples, in a second or two."""
_FEWEST_SAMPLES = 2
RUNS_BETWEEN_SAMPLES = 7
"""Chosen: samples then come from several texts, at different positions."""
_BYTES_OF_ALL_SAMPLES = 16_000_000_000
"""Maximum weight bytes read by all samples together by default. Chosen: a model of 1 GB runs on 16 samples, a model of
8 GB on 2."""


@dataclass(frozen=True)
class JudgingData:
    """Requested samples of a comparison; by default, samples are generated."""

    input_data: Path | None = None
    """An ``.npz`` file with one array per input, or a folder of such files."""
    data_set: DataSetRequest | None = None
    count: int | None = None
    """Number of samples; ``None``: that of the command."""

    @property
    def is_stated(self) -> bool:
        """True if the samples come from data of the user."""
        return self.input_data is not None or self.data_set is not None

    def request(self, run: RunOptions, folder: Path | None, model: Path, *, most: int | None = None) -> SampleRequest:
        """Return the request for the samples.

        Args:
            run: Sizes and seed.
            folder: Folder of the processors.
            model: File of the reference.
            most: Default number of samples; ``None``: that of :class:`SampleRequest`, and 16 arrays of a folder.
        """
        data_set, limit = self.data_set, self.count or most
        if data_set is not None and limit is not None:
            data_set = replace(data_set, most=limit)
        count = limit or (None if self.input_data is None else MOST_SAMPLES)
        run = replace(run, input_data=self.input_data)
        return SampleRequest(run, folder, data_set, count, model=model)


@dataclass(frozen=True)
class SampleRequest:
    """Requested samples."""

    run: RunOptions
    """Sizes, file or folder of the user's arrays, and seed."""
    folder: Path | None = None
    """Folder of the processors for texts, images and audio; ``None`` without processors."""
    data_set: DataSetRequest | None = None
    count: int | None = None
    """Number of generated samples, and largest number of arrays of a folder; ``None``: :func:`default_samples`, and all
    arrays."""
    model: Path | None = None
    """File of the reference, whose size determines the number of samples."""
    takes_stored: bool = True
    """Use samples stored beside the model, if any, instead of generated ones."""

    @property
    def samples(self) -> int:
        """Number of generated samples."""
        if self.count is not None:
            return self.count
        files = () if self.model is None else (self.model, *external_files(self.model))
        return default_samples(sum(file.stat().st_size for file in files))

    def read(self, session: Session) -> tuple[Sequence[Arrays], QualitySamples]:
        """Return samples and description; see :func:`quality_values`."""
        samples = quality_values(session, self)
        return [values.feeds for values in samples.values], samples.about


@dataclass(frozen=True)
class SampleValues:
    """Samples as arrays."""

    values: tuple[Values, ...]
    """Values of the samples; at least one."""
    source: QualitySource
    seed: int
    note: str = ""
    """Reason for random values in spite of a processor beside the model, and samples that are not used."""
    data: str = ""
    """Name of the dataset, with its split."""
    may_be_refused: bool = False
    """True for random values at sizes that no user stated."""

    @property
    def about(self) -> QualitySamples:
        """Description for the quality record."""
        return QualitySamples(self.source, len(self.values), self.seed, self.note, self.data, self.may_be_refused)


def default_samples(model_bytes: int) -> int:
    """Default number of samples for a file; fewer for large files.

    >>> default_samples(400_000_000), default_samples(28_000_000_000)
    (16, 2)
    """
    return max(_FEWEST_SAMPLES, min(MOST_SAMPLES, _BYTES_OF_ALL_SAMPLES // max(model_bytes, 1)))


def quality_values(session: Session, request: SampleRequest) -> SampleValues:
    """Create the samples that a file is judged on.

    Args:
        session: The opened reference; generated samples must run on it.
        request: The requested samples.

    Raises:
        UsageError: sizes or values do not fit the inputs of the graph.
        InputError: a file or dataset of the user is damaged.
    """
    notes: list[str] = []
    samples = _choose_values(session, request, notes)
    if not notes:
        return samples
    first, *others = samples.values
    first = replace(first, notes=(*first.notes, *notes))
    return replace(samples, values=(first, *others), note=" ".join(notes))


def _choose_values(session: Session, request: SampleRequest, notes: list[str]) -> SampleValues:
    """Create the samples of :func:`quality_values`, and add notes on samples that are not used."""
    run, inputs = request.run, graph_inputs(session)
    if run.input_data is not None:
        files = value_files(run.input_data)[: request.count]
        values = (values_for(session, replace(run, input_data=file)) for file in files)
        return SampleValues(tuple(values), "file", run.seed)
    if request.data_set is not None:
        assert request.folder is not None  # the caller refuses a dataset for models without a folder
        return data_set_values(inputs, run.sizes, request.data_set, request.folder, request.model)
    may_take_stored = request.takes_stored and run.decoding is None
    if may_take_stored and (stored := _stored_values(session, request, notes)) is not None:
        return stored
    if run.decoding is None and (decoded := _decoded_values(inputs, request)) is not None:
        return decoded
    if run.decoding is None and request.folder is not None and has_processors(inputs, request.folder):
        try:
            samples = generate_samples(inputs, request.folder, request.samples, run)
            session.run(samples[0].feeds)
            return SampleValues(samples, "processor", run.seed)
        except WinMLError as error:
            notes.append(
                f"Compared on random values, since the model cannot run on samples of its processor: {error.message}."
            )
    return _random_values(session, request)


def judging_request(
    data_set: str | None,
    *,
    split: str | None = None,
    columns: Mapping[str, str] | None = None,
    samples: int | None = None,
    seed: int = 0,
) -> DataSetRequest | None:
    """Return the request for the samples of a dataset that outputs are compared on; ``None`` without a dataset."""
    if data_set is None:
        return None
    return DataSetRequest(
        data_set, split=split, columns=dict(columns or {}), samples=samples, most=MOST_SAMPLES, seed=seed
    )


def data_set_values(
    inputs: Sequence[InputTensorSpec],
    sizes: Mapping[str, int],
    request: DataSetRequest,
    folder: Path,
    model: Path | None = None,
) -> SampleValues:
    """Convert the samples of a dataset to arrays with the processors beside a model.

    A decoder with a cache of a fixed length reads each text in several runs, some of which are the samples.

    Args:
        inputs: Inputs of the models.
        sizes: Sizes of dynamic dimensions that samples are resized to; other sizes depend on the sample.
        request: The requested samples.
        folder: Folder of the processors.
        model: File of the reference, which runs if it is such a decoder; None: no such decoder.

    Raises:
        UsageError: the dataset is missing, or does not fit the models.
        InputError: a file is damaged.
    """
    with open_data_set(request) as data_set:
        from winml.modelkit.samples.preprocessing import SampleFeeds

        samples = SampleFeeds(data_set, folder)
        data = decoder_data(samples, model) if model is not None and _holds_fixed_cache(inputs, sizes) else None
        if model is not None and data is not None:
            count = request.samples or MOST_SAMPLES
            runs = decoding_samples(model, folder, sizes, count, request.seed, every=RUNS_BETWEEN_SAMPLES, data=data)
            draws = list(runs)
        else:
            draws = list(samples.read(with_fixed_sizes(inputs, sizes)))
        notes = (samples.notes, *([()] * len(draws)))
        values = tuple(Values(tuple(inputs), feeds, own) for feeds, own in zip(draws, notes, strict=False))
        return SampleValues(values, "dataset", request.seed, data=data_set.words)


def refuse_unfit_data(request: DataSetRequest, model: Path, folder: Path) -> None:
    """Convert the first sample of a dataset, before work that a mistake in its request would waste.

    Args:
        request: The requested samples.
        model: The ONNX file.
        folder: Folder of the processors.

    Raises:
        UsageError: the dataset is missing, or does not fit the model.
        InputError: a file is damaged.
    """
    with open_data_set(request) as data_set:
        from winml.modelkit.samples.preprocessing import SampleFeeds

        inputs, samples = inputs_of_file(model), SampleFeeds(data_set, folder)
        data = decoder_data(samples, model) if _holds_fixed_cache(inputs, {}) else None
        next(samples.read(inputs) if data is None else data, None)


def _holds_fixed_cache(inputs: Sequence[InputTensorSpec], sizes: Mapping[str, int]) -> bool:
    """Return True for a decoder with a cache of a fixed length, which does not read a whole text in one run."""
    return any(spec.cache for spec in inputs) and decoder_tokens(inputs, sizes) is None


def value_files(path: Path) -> list[Path]:
    """List the value files of a folder, in order; for a file, the file itself.

    Raises:
        UsageError: the folder has no such file.
    """
    if not path.is_dir():
        return [path]
    if files := sorted(path.glob("*.npz")):
        return files
    raise UsageError(
        f"{opt.input_data} {path}: no .npz file in this folder", hint="Pass an .npz file, or a folder of .npz files."
    )


def _stored_values(session: Session, request: SampleRequest, notes: list[str]) -> SampleValues | None:
    """Return the samples stored beside the model; ``None`` without any, for other sizes, or if the model refuses all.

    Args:
        session: The opened model.
        request: The requested samples; its model may be the reference of the opened one.
        notes: Extended by a note on samples that are not used.
    """
    inputs = graph_inputs(session)
    for path in dict.fromkeys((request.model, session.source_path)) if not request.run.sizes else ():
        samples = stored_samples(path, inputs)
        accepted, unused = dict[str, list[Values]](), samples.unused
        for name, feeds in itertools.islice(zip(samples.names, samples.feeds, strict=True), request.count):
            try:
                session.run(feeds)
            except WinMLError as error:
                unused = unused or unused_note(name, error.message)
                continue
            accepted.setdefault(name, []).append(Values(inputs, feeds))
        if unused not in ("", *notes):
            notes.append(unused)
        if accepted:
            values = tuple(itertools.chain.from_iterable(accepted.values()))
            return SampleValues(values, "file", request.run.seed, data=origin_words([*accepted]))
    return None


def _decoded_values(inputs: Sequence[InputTensorSpec], request: SampleRequest) -> SampleValues | None:
    """Record runs of a decoder with a cache of fixed length while it continues texts, or of the embedding of images.

    ``None`` for another graph.
    """
    run = request.run
    if request.model is None:
        return None
    folder = request.folder or files_folder(request.model)
    try:
        runs = embedding_samples(request.model, folder, run.sizes, run.seed)
        if runs is None and _holds_fixed_cache(inputs, run.sizes):
            runs = decoding_samples(
                request.model, folder, run.sizes, request.samples, run.seed, every=RUNS_BETWEEN_SAMPLES
            )
        if runs is None:
            return None
        feeds = [*itertools.islice(runs, request.samples)]
    except WinMLError:
        return None
    source: QualitySource = "processor" if has_processors([i for i in inputs if not i.cache], folder) else "random"
    return SampleValues(tuple(Values(tuple(inputs), values) for values in feeds), source, run.seed)


def _random_values(session: Session, request: SampleRequest) -> SampleValues:
    """Create random values; for a decoder with a KV cache, whole prompts, since random caches are meaningless.

    Raises:
        NoInputsError: the reference accepts no random values, or none can be drawn for an input.
    """
    undrawn = [spec for spec in graph_inputs(session) if spec.dtype not in DRAWN_DTYPES]
    if undrawn and request.run.input_data is None:
        raise NoInputsError(
            f"input {undrawn[0].name} takes {undrawn[0].dtype}, for which no random values can be generated"
        )
    run = with_fitting_sizes(session, with_whole_prompts(graph_inputs(session), request.run))
    # A graph without inputs has one result.
    count = request.samples if graph_inputs(session) else 1
    may_be_refused = not run.sizes and run.batch_size is None and run.input_data is None
    try:
        drawn = [values_for(session, replace(run, seed=run.seed + number)) for number in range(count)]
    except UsageError as error:
        if not may_be_refused:
            raise
        raise NoInputsError(error.message, hint=error.hint) from error
    if may_refuse_values(graph_inputs(session)):
        drawn = [drawn[0], *(values for values in drawn[1:] if _can_run(session, values))]
    return SampleValues(tuple(drawn), "random", request.run.seed, may_be_refused=may_be_refused)


def _can_run(session: Session, values: Values) -> bool:
    try:
        run_generated(session, values.feeds, as_declared=True)
    except StageError:
        return False
    return True
