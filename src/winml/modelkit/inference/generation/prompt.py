"""A prompt that is ready for a built model, and the folder of the files that prepare it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from winml.modelkit.evaluate.media import Recording
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME
from winml.modelkit.inference.generation.decoder_prompt import DecoderPrompt
from winml.modelkit.inference.generation.settings import GenerationSettings
from winml.modelkit.inference.generation.text import TextTokenizer
from winml.modelkit.runtime.decoding.vision_language import VisionLanguageFiles

__all__ = ["PreparedPrompt", "files_folder"]


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt in the tokens of the model that is to go on with it."""

    model: Path
    text: str
    tokens: tuple[int, ...]
    settings: GenerationSettings
    tokenizer: TextTokenizer
    encoder: Path | None = None
    """Graph that reads the prompt, where another one writes the answer."""
    beginning: DecoderPrompt | None = None
    """How the answer begins then."""
    medium: str = "prompt"
    """What the encoder reads: ``prompt``, a text; ``audio`` and ``image``, the file named by ``text``."""
    recording: Recording | None = None
    """The sound of that file, where it is a recording."""
    shown: VisionLanguageFiles | None = None
    """What the model is shown beside the text, where it takes images."""

    @property
    def before(self) -> tuple[int, ...]:
        """Tokens of the text that the answer goes on with."""
        return self.tokens if self.beginning is None else (self.beginning.start,)


def files_folder(model: Path) -> Path:
    """Return the folder with the configs and the tokenizer of a model: its own, or the one above where it has none."""
    own, above = model.parent, model.parent.parent
    return above if not (own / CHECKPOINT_CONFIG_NAME).is_file() and (above / CHECKPOINT_CONFIG_NAME).is_file() else own
