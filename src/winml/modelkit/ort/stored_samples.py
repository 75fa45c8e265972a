"""Samples that are stored beside an ONNX file: test data of ONNX, and the user's inputs in the proof of a build.

Commands that run a model use them before generated values. Formats:

* ``test_data_set_0/input_0.pb``: one tensor per input, in the order of the graph, as in the ONNX model zoo;
* ``proof/proof.json`` with ``proof.safetensors``: ``docs/reference/formats.md`` specifies them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.errors import WinMLError, first_line
from winml.modelkit.file_names import proof_paths
from winml.modelkit.onnx.files.foreign_names import ForeignNameError, file_below
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.options import read_json_file
from winml.modelkit.ort.graph_inputs import array_words, takes_array

_TEST_DATA = re.compile(r"test_data_set_(\d+)")
"""Specified by ONNX: folder of a sample, from 0."""
_USER_DATA = ("file", "dataset")
"""Sources of samples in a proof that are the user's; others are generated, as they would be here."""


@dataclass(frozen=True)
class StoredSamples:
    """Samples that fit the inputs of a graph."""

    feeds: tuple[Arrays, ...] = ()
    names: tuple[str, ...] = ()
    """Name of the folder of each sample."""
    unused: str = ""
    """Sentence on the first sample that is not used, and the reason."""


def origin_words(names: Sequence[str]) -> str:
    """Name the folders of samples, in order.

    >>> origin_words(["test_data_set_0", "test_data_set_1", "test_data_set_2"]), origin_words(["the proof"] * 2)
    ('test_data_set_0 to 2', 'the proof')
    >>> origin_words(["test_data_set_0", "test_data_set_2"])
    'test_data_set_0 and test_data_set_2'
    """
    first, *others = dict.fromkeys(names)
    numbers = [int(match[1]) for name in (first, *others) if (match := _TEST_DATA.fullmatch(name))]
    if others and numbers == [*range(numbers[0], numbers[0] + len(others) + 1)]:
        return f"{first} to {numbers[-1]}"
    return " and ".join((first, *others))


def unused_note(name: str, reason: str) -> str:
    """Return a sentence on a sample beside a model that is not used."""
    return f"The sample in {name} beside the model is not used: {reason.rstrip('.')}."


def stored_samples(model: Path | None, inputs: Sequence[InputTensorSpec]) -> StoredSamples:
    """Return the samples stored beside a model that fit its inputs; none if a file is damaged.

    Args:
        model: The ONNX file; `None` for a graph in memory.
        inputs: Inputs of the graph, in order.
    """
    if model is None or not inputs:
        return StoredSamples()
    from google.protobuf.message import DecodeError

    folder, names = model.absolute().parent, [spec.name for spec in inputs]
    unused = ""
    for name, read in (("test_data_set_0", _test_data), ("the proof", _proof_inputs)):
        samples: list[tuple[str, Arrays]] = []
        try:
            for own_name, sample in read(folder, names):
                if reason := _unfit_words(sample, inputs):
                    unused = unused or unused_note(own_name, reason)
                else:
                    samples.append((own_name, sample))
        except (WinMLError, ForeignNameError, OSError, KeyError, TypeError, ValueError, DecodeError) as error:
            # The inputs are generated.
            unused, samples = unused or unused_note(name, _damage_words(error)), []
        if samples:
            names_of_samples, feeds = zip(*samples, strict=True)
            return StoredSamples(feeds, names_of_samples, unused)
    return StoredSamples(unused=unused)


def _unfit_words(sample: Arrays, inputs: Sequence[InputTensorSpec]) -> str:
    """Return the first input that a sample does not fit, as a clause; ``""`` if it fits all."""
    unfit = (spec for spec in inputs if not takes_array(spec, sample[spec.name]))
    return next((f"input {spec.name} takes {spec.words}, not {array_words(sample[spec.name])}" for spec in unfit), "")


def _damage_words(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing"
    return first_line(error)


def _test_data(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, Arrays]]:
    """Yield name and values of the test data of ONNX in a folder."""
    import onnx

    numbers = sorted(int(match[1]) for path in folder.iterdir() if (match := _TEST_DATA.fullmatch(path.name)))
    for number in numbers:
        sample: dict[str, Array] = {}
        for position, name in enumerate(names):
            path = file_below(folder, f"test_data_set_{number}/input_{position}.pb")
            tensor = onnx.TensorProto.FromString(path.read_bytes())
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                raise ValueError(f"{path.name} refers to another file")
            array = onnx.numpy_helper.to_array(tensor)
            sample[name] = array.astype(object) if array.dtype.kind in "SU" else array
        yield f"test_data_set_{number}", sample


def _proof_inputs(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, Arrays]]:
    """Yield the user's inputs in the proof in a folder.

    Raises:
        ValueError: the proof is damaged, or none of its parts has these inputs.
    """
    record_path, tensors_path = proof_paths(folder)
    if not record_path.is_file():
        return
    from safetensors import SafetensorError, safe_open

    record = read_json_file(record_path)
    parts = {part["name"]: sorted(spec["name"] for spec in part["inputs"]) for part in record["parts"]}
    fitting = [part for part in record["parts"] if parts[part["name"]] == sorted(names)]
    users = [part for part in record["parts"] if part["samples"]["source"] in _USER_DATA]
    if users and not fitting:
        raise ValueError(f"it has inputs {', '.join(parts[users[0]['name']])}, and the graph takes {', '.join(names)}")
    try:
        for part in (part for part in users if part in fitting):
            with safe_open(file_below(folder, tensors_path.relative_to(folder)), framework="numpy") as tensors:
                for number in range(part["samples"]["count"]):
                    key = f"{part['name']}/inputs/{number}"
                    yield "the proof", {name: tensors.get_tensor(f"{key}/{name}") for name in names}
            return
    except SafetensorError as error:
        raise ValueError(str(error)) from error
