"""What a layout means for the folder of one build: names, files that come along, files that are written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from winml.modelkit.builds.identity import ModelIdentity
from winml.modelkit.builds.layouts.layout import PLAIN, find_layout, refuse_models
from winml.modelkit.builds.layouts.older_readers import rewritten_companions
from winml.modelkit.builds.plan import BuildPlan
from winml.modelkit.builds.stage_runs import BuiltPart
from winml.modelkit.builds.stages import built_name
from winml.modelkit.file_names import GENAI_CONFIG_NAME
from winml.modelkit.load.checkpoints.companion_files import companion_files

__all__ = ["FolderLayout"]


class FolderLayout:
    """The layout of one build.

    Attributes:
        copied: Files that come along as they are: name in the folder → file.
    """

    def __init__(self, plan: BuildPlan, identity: ModelIdentity) -> None:
        """Decide what comes along.

        Raises:
            InputError: a file that is written anew for the readers is damaged.
        """
        self._plan = plan
        self._layout = find_layout(plan.config.layout)
        self._sources = self._found_sources(identity)
        self._rewritten = rewritten_companions(self._layout, self._sources)
        self.copied = {name: source for name, source in self._sources.items() if name not in self._rewritten}

    def _found_sources(self, identity: ModelIdentity) -> dict[str, Path]:
        if not self._plan.with_companions:
            return {}
        if self._plan.onnx_path is not None:
            # Without a layout nothing is known of a reader who looks for them.
            return {} if self._layout is PLAIN else companion_files(self._plan.onnx_path.parent)
        return {**identity.companions, **(identity.card if self._layout.with_card else {})}

    @property
    def written_names(self) -> tuple[str, ...]:
        """What is written for the readers, besides the models."""
        return (GENAI_CONFIG_NAME,) if self._is_described else tuple(self._rewritten)

    @property
    def _is_described(self) -> bool:
        return GENAI_CONFIG_NAME in self._layout.written

    def model_name(self, part: BuiltPart) -> str:
        """Return the name of a finished part in the folder, ``/`` between parts."""
        return built_name(part.name, of_several=part.of_several, config=self._plan.config)

    def refuse(self, parts: Sequence[BuiltPart]) -> None:
        """Refuse graphs that the readers do not know, before anything else is done with them.

        Raises:
            UsageError: names what they do not know.
        """
        models = [part.current for part in parts if part.current is not None]
        if self._layout is not PLAIN and models:
            refuse_models(self._layout, models)
            self.written(parts)

    def written(self, parts: Sequence[BuiltPart]) -> dict[str, str]:
        """Return what is written for the readers: name → text.

        Raises:
            UsageError: the readers have no type for the graph.
            InputError: a config is damaged.
        """
        if not self._is_described:
            return self._rewritten
        from winml.modelkit.builds.layouts.genai import genai_config_text  # imports onnx

        (part,) = parts
        assert part.current is not None  # an export ran, or the model was an ONNX file
        return {GENAI_CONFIG_NAME: genai_config_text(part.current, self.model_name(part), self._sources)}
