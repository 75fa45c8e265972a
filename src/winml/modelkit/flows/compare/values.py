"""What are two models fed? Values of files, or samples of a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate.data_sets import DataSetRequest, open_data_set
from winml.modelkit.evaluate.preprocessing import SampleFeeds
from winml.modelkit.evaluate.processors import processor_files
from winml.modelkit.load.request import ModelRequest, processor_folder
from winml.modelkit.runtime.graph_inputs import GraphInput, sizes_by_key
from winml.modelkit.runtime.opened_model import Values

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "data_set_values",
    "folder_of_processors",
    "value_files",
]


# --- What are two models fed from a data set? The samples, as what lies beside one of the models makes arrays of
# them.


def folder_of_processors(models: Sequence[Path | ModelRequest | nn.Module], request: DataSetRequest) -> Path:
    """Return the folder of the first model that has something beside it to make arrays with.

    Raises:
        UsageError: none of the models lies in a folder.
    """
    named = [model for model in models if isinstance(model, (Path, ModelRequest))]
    folders = [folder for model in named if (folder := processor_folder(model)) is not None]
    if not folders:
        raise UsageError(
            f"{request.words}: samples need a tokenizer or image processor, and neither model lies in a folder",
            hint="Give values in an .npz file.",
        )
    return next((folder for folder in folders if processor_files(folder)), folders[0])


def data_set_values(
    inputs: Sequence[GraphInput], sizes: Mapping[str, int], request: DataSetRequest, folder: Path
) -> list[Values]:
    """Return the values of each sample.

    Args:
        inputs: What the models take.
        sizes: Sizes of open dimensions that samples are brought to; others are as each sample has them.
        request: Which samples.
        folder: Where what makes arrays of them lies.

    Raises:
        UsageError: no such data set, or it does not fit the models.
        InputError: a file is damaged.
    """
    by_key = sizes_by_key(inputs, sizes)
    fixed = [
        replace(item, shape=tuple(by_key.get(str(key), size) for key, size in zip(item.keys, item.shape, strict=True)))
        for item in inputs
    ]
    with open_data_set(request) as data_set:
        samples = SampleFeeds(data_set, folder)
        draws = list(samples.read(fixed))
        return [Values(tuple(inputs), feeds, samples.notes if not number else ()) for number, feeds in enumerate(draws)]


# --- Which files of values does a path mean? One ``.npz`` file is one set of values, a folder of them several.


def value_files(path: Path, option: str = "--input-data") -> list[Path]:
    """Return the files of a folder that hold values, in their order; of a file, itself.

    Raises:
        UsageError: the folder has none.
    """
    if not path.is_dir():
        return [path]
    if files := sorted(path.glob("*.npz")):
        return files
    raise UsageError(f"{option} {path}: the folder has no .npz file", hint="Give an .npz file, or a folder of them.")
