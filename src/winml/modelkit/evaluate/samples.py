"""Gives what a graph takes for each sample of a data set, for whoever needs values and no answers to judge.

Joins the data set, the roles of its columns and what lies beside the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from winml.modelkit.evaluate.columns import match_columns
from winml.modelkit.evaluate.data_sets import DataSet
from winml.modelkit.evaluate.preprocessing import Preprocessor
from winml.modelkit.runtime.graph_inputs import GraphInput

__all__ = ["input_roles", "sample_feeds"]

_ROLES = {"tokenizer": "text", "image processor": "image", "feature extractor": "audio"}


def input_roles(data_set: DataSet, preprocessor: Preprocessor) -> dict[str, str]:
    """Return the columns that the inputs of a graph are made of: role → column.

    Texts are pairs where the data set has pairs, and words where it has words only.

    Raises:
        UsageError: no column plays a role that is needed.
    """
    needed = [role for kind in preprocessor.kinds for role in _roles_of(kind, data_set)]
    return match_columns(data_set, needed, optional=("text_pair",) if "text" in needed else ())


def _roles_of(kind: str, data_set: DataSet) -> tuple[str, ...]:
    if kind != "tokenizer" or "text" in data_set.request.columns:
        return (_ROLES[kind],)
    for roles in (("question", "context"), ("text",), ("tokens",)):
        if len(match_columns(data_set, (), optional=roles)) == len(roles):
            return roles
    return ("text",)


def sample_feeds(data_set: DataSet, folder: Path, inputs: Sequence[GraphInput]) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield one array per input for each batch that the graph takes: one sample where it leaves that open.

    Args:
        data_set: The samples.
        folder: Folder of the ONNX file, or checkpoint folder.
        inputs: Inputs of the graph.

    Raises:
        UsageError: a role, a file or a package is missing, or the arrays are not what the graph takes.
        InputError: files are damaged.
    """
    preprocessor = Preprocessor.of(folder, inputs, option=data_set.request.option)
    rows = data_set.rows(input_roles(data_set, preprocessor))
    for batch in preprocessor.batches(rows):
        yield dict(batch.feeds)
