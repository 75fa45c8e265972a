"""Makes the inputs of a graph of each sample of a data set, for callers that need values and judge no outputs.

Joins the data set, the roles of its columns and the processor beside the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.arrays import Array
from winml.modelkit.ort.graph_inputs import GraphInput
from winml.modelkit.samples.columns import match_columns
from winml.modelkit.samples.preprocessing import Preprocessor

if TYPE_CHECKING:
    from winml.modelkit.samples.data_sets import DataSet
    from winml.modelkit.samples.text_files import TextFile

_ROLES = {"image processor": "image", "feature extractor": "audio"}


class SampleFeeds:
    """Makes feeds of the samples of a data set, as often as they are asked for."""

    def __init__(self, data_set: DataSet | TextFile, folder: Path) -> None:
        """Take a data set, and the folder of an ONNX file or a checkpoint, whose processor makes arrays."""
        self.data_set = data_set
        self._folder = folder
        self._preprocessor: Preprocessor | None = None
        self._roles: dict[str, str] = {}

    def read(self, inputs: Sequence[GraphInput]) -> Iterator[dict[str, Array]]:
        """Yield one array per input for each batch that the graph takes: one sample where it leaves that open.

        Raises:
            UsageError: a column, a file or a package is missing, or the arrays are not what the graph takes.
            InputError: files are damaged.
        """
        preprocessor = Preprocessor.of(self._folder, inputs, option=self.data_set.request.words)
        needed = [role for kind in preprocessor.kinds for role in _roles_of(kind, self.data_set)]
        roles = match_columns(self.data_set, needed, optional=("text_pair",) if "text" in needed else ())
        self._preprocessor, self._roles = preprocessor, roles
        for batch in preprocessor.batches(self.data_set.rows(roles)):
            yield dict(batch.feeds)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided because nobody said, and what was left out; known once samples were read."""
        guessed = {role: column for role, column in self._roles.items() if role not in self.data_set.request.columns}
        columns = ", ".join(f"{role} is {column}" for role, column in guessed.items() if role != column)
        found = f"columns of {self.data_set.name}: {columns}, recognized by name (set others with --columns)"
        created = self._preprocessor.notes if self._preprocessor is not None else ()
        notes = (*self.data_set.notes, found if columns else "", *created, self.data_set.unreadable_note or "")
        return tuple(f"{note[0].upper()}{note[1:]}." for note in notes if note)


def _roles_of(kind: str, data_set: DataSet | TextFile) -> tuple[str, ...]:
    """Return the roles of columns that a processor reads.

    Texts are questions with their contexts, or texts, or words if the data set has words only.
    """
    if kind in _ROLES:
        return (_ROLES[kind],)
    for roles in (("question", "context"), ("text",), ("tokens",)):
        is_requested = "text" not in data_set.request.columns or roles == ("text",)
        if is_requested and len(match_columns(data_set, (), optional=roles)) == len(roles):
            return roles
    return ("text",)
