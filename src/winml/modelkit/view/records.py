"""Records of ``winml view``: the displayed models, and the data of their page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from winml.modelkit.onnx.module_costs import Cost
from winml.modelkit.records import Record, entry
from winml.modelkit.report.result import Result
from winml.modelkit.words import count_words, size_words


class ViewedPart(Record):
    """One graph of a displayed model."""

    name: str
    path: Path | None
    """ONNX file; None for a checkpoint before its export."""
    tree_source: str
    """Source of the module tree: ``winml tags``, other names in the file, or a forward."""
    modules: int
    total: Cost
    """Nodes, parameters, bytes of weights and operations of the graph; without nodes for a checkpoint."""


class KnownNumbers(Record):
    """A number or text of each module, other than the numbers in the file."""

    title: str
    source: str
    """File of the earlier run, or ``model`` for metadata of the model itself."""
    modules: int
    """Number of modules with a value."""


class ViewedModel(Record):
    """One displayed model."""

    name: str
    """Name as passed by the user."""
    parts: tuple[ViewedPart, ...]
    known: tuple[KnownNumbers, ...]
    build: Mapping[str, str]
    """Stage of the build → nodes, size and quality of its result; empty for a file of no build."""
    notes: tuple[str, ...]
    """Limits of the view, such as missing tags, one sentence each."""

    @property
    def total(self) -> Cost:
        """Sum of all parts."""
        return sum((part.total for part in self.parts), Cost())

    @property
    def heading(self) -> str:
        """Name of the file or folder, and its key numbers."""
        total = self.total
        numbers = [f"{count_words(total.parameters)} parameters"]
        numbers += [size_words(total.size_bytes)] if total.size_bytes else []
        numbers += [f"{total.nodes} nodes"] if total.nodes else []
        return f"{Path(self.name).name}: {', '.join(numbers)}"


class ModelPage(Result, Record, kind="view", document="view.table:page_document", rows="models"):
    """The page of one or two models."""

    _page_height = 960
    """Chosen: the modules and the top of the graph."""

    models: tuple[ViewedModel, ...]
    differing: int | None
    """Number of modules that differ between two models; None for one model, and for checkpoints."""
    data: Mapping[str, Any] = field(metadata=entry(skip=True))
    """Data of the page: templates of the modules, and the numbers of each module."""

    def svg(self) -> str:
        """Return a picture of the modules, light or dark as its reader (``winml view -o FILE.svg``)."""
        from winml.modelkit.view.picture import draw_svg

        return draw_svg(self.data, [model.heading for model in self.models])

    def png(self) -> bytes:
        """Return the picture of the modules as a light PNG.

        Raises:
            ImportError: Pillow is not installed.
        """
        from winml.modelkit.view.picture import draw_png

        return draw_png(self.data, [model.heading for model in self.models])
