"""Dimensions of each architecture that can be left open, and the three shapes tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Tried = Mapping[str, tuple[int, int, int]]
"""Dimension → its size in each of the three shapes."""


@dataclass(frozen=True)
class Refused:
    """A dimension that the architecture cannot vary, with the reason."""

    reason: str
    """Part of the message."""


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    architecture: str
    options: tuple[str, ...]
    """Options among ``batch``, ``sequence``, ``image_size``."""
    outcome: Tried | Refused

    def __str__(self) -> str:
        return f"{self.architecture}-{'+'.join(self.options)}"


BATCH: Tried = {"batch_size": (1, 4, 3)}
PAIRS: Tried = {"text_batch_size": (1, 4, 3), "image_batch_size": (2, 1, 5)}
SEQUENCE: Tried = {"sequence_length": (1, 33, 64)}
IMAGE: Tried = {"height": (1, 97, 130), "width": (1, 64, 33)}

SIZES: Mapping[str, tuple[str, Tried | Refused]] = {
    "bert": ("sequence", SEQUENCE),
    "gpt2": ("sequence", SEQUENCE),
    "t5": ("sequence", {"sequence_length": (1, 40, 7), "decoder_sequence_length": (1, 5, 30)}),
    "vit": ("image_size", Refused("images of 32x32 pixels only")),
    "resnet": ("image_size", IMAGE),
    "wav2vec2": ("sequence", {"audio_length": (105, 4001, 1777)}),
    "clip": ("sequence", SEQUENCE),
}
"""Architecture → dimensions that vary besides the batch. In vit every patch has a learned position."""


def _cases() -> tuple[Case, ...]:
    cases = []
    for architecture, (option, outcome) in SIZES.items():
        batch = PAIRS if architecture == "clip" else BATCH
        both = outcome if isinstance(outcome, Refused) else {**batch, **outcome}
        cases += [
            Case(architecture, ("batch",), batch),
            Case(architecture, (option,), outcome),
            Case(architecture, ("batch", option), both),
        ]
    return tuple(cases)


CASES = _cases()


def table() -> str:
    """Return the cells as the Markdown table of ``docs/reference/dynamic_dimensions.md``."""
    lines = ["| architecture | `--dynamic-batch` | by size | both |", "| --- | --- | --- | --- |"]
    for architecture in SIZES:
        row = [case for case in CASES if case.architecture == architecture]
        lines.append(f"| {architecture} | {' | '.join(_cell(case) for case in row)} |")
    return "\n".join(lines)


def _cell(case: Case) -> str:
    if isinstance(case.outcome, Refused):
        return f"no: the model takes {case.outcome.reason}"
    return "; ".join(f"`{name}` {', '.join(map(str, sizes))}" for name, sizes in case.outcome.items())
