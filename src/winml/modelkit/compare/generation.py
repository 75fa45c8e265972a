"""The record of one generated text that two models were compared on."""

from __future__ import annotations

from dataclasses import dataclass, field

from winml.modelkit.records import Record, entry

__all__ = ["GenerationInfo"]


@dataclass(frozen=True)
class GenerationInfo(Record):
    """A prompt, greedy steps and a second prompt, each with the cache of the run before."""

    rows: int
    """Texts generated at once."""
    prompt_tokens: int
    """Tokens of the longest prompt; other rows are padded on the left, where the model takes a mask."""
    new_tokens: int
    """Tokens generated after it, in each row."""
    second_prompt_tokens: int
    """Tokens given at once after them."""
    ties: int
    """Choices in which the scores of two tokens are equal within the tolerance, so that rounding decides."""
    largest_relative_diff: float
    """Of the scores of any step, of their scale."""
    stopped_after: int | None = None
    """Steps after which rounding alone decides what the reference answers; None where no such step was met."""
    differs_in_pieces: float | None = field(default=None, metadata=entry(omit_none=True))
    """By how much of scale the scores after a prompt are off where the reference reads it in two runs; None: they are
    equal, or it was not tried."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be known of prompts."""
        if self.differs_in_pieces is None:
            return ()
        difference = f"{self.differs_in_pieces:.1e} of scale"
        return (f"A prompt is to be read in one run: in two, PyTorch itself answers otherwise, by {difference}.",)

    @property
    def words(self) -> str:
        """The outcome in a few words."""
        if self.stopped_after is not None:
            return (
                f"the scores of {self.stopped_after} of {self.new_tokens} generated tokens are equal, of the next "
                "PyTorch's own depend on rounding"
            )
        choices = self.rows * self.new_tokens
        if self.ties * 2 > choices:
            return f"the scores of {self.new_tokens} generated tokens are equal; which token is the best is a tie"
        ties = f", {self.ties} of {choices} of them ties" if self.ties else ""
        return f"generate() gives the same {self.new_tokens} tokens{ties}"
