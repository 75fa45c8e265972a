"""The layout of one build folder: file names, copied files, written files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from winml.modelkit.builds.folder import BuildFolder
from winml.modelkit.builds.identity import ModelIdentity
from winml.modelkit.builds.layouts import layout
from winml.modelkit.builds.manifest_records import FileRecord
from winml.modelkit.builds.plan import BuildPlan
from winml.modelkit.builds.stages import BuiltPart, adapter_names, built_name
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME, files_folder, is_data_of, numbered_data_path
from winml.modelkit.models.checkpoints.adapters import read_adapters
from winml.modelkit.models.checkpoints.companion_files import companion_files
from winml.modelkit.models.checkpoints.task import canonical_task
from winml.modelkit.models.request import resolve_source
from winml.modelkit.onnx.files import companions
from winml.modelkit.onnx.files.content_digest import hash_file
from winml.modelkit.onnx.files.output_files import OutputFiles
from winml.modelkit.samples.processors import missing_processors


class FolderLayout:
    """The layout of one build.

    Attributes:
        copied: Files that come along as they are: name in the folder → file.
        rewritten: Files of the checkpoint that are written with other content: name in the folder → text.
        written_names: What is written for the readers besides the models; known once the parts are.
    """

    def __init__(self, plan: BuildPlan, identity: ModelIdentity) -> None:
        """Decide what comes along.

        Raises:
            InputError: a file that is written anew for the readers is damaged.
            TaskError: the readers have no class for the model.
        """
        self._plan = plan
        self._layout = plan.layout
        self._sources = self._found_sources(identity)
        self._config = self._find_config(identity)
        if plan.onnx_path is None and resolve_source(plan.request, needs_weights=False).kind == "script":
            layout.refuse_task(self._layout, None)
        task = None if plan.request.task is None else canonical_task(plan.request.task)
        layout.refuse_unknown_type(self._layout, self._config, task, has_cache=plan.request.cache)
        self.rewritten = self._layout.rewrite(self._sources)
        written = {*self.rewritten, *self._layout.described}
        self.copied = {name: source for name, source in self._sources.items() if name not in written}
        self.written_names: tuple[str, ...] = ()

    def _found_sources(self, identity: ModelIdentity) -> dict[str, Path]:
        if not self._plan.with_companions:
            return {}
        if self._plan.onnx_path is not None:
            # Without a layout nothing is known of a reader who looks for them.
            return {} if self._layout is layout.PLAIN else companion_files(files_folder(self._plan.onnx_path))
        return {**identity.companions, **(identity.card if self._layout.with_card else {})}

    def _find_config(self, identity: ModelIdentity) -> Path | None:
        """Return ``config.json`` of the model, also where it is not copied; None if it has none."""
        found = identity.companions.get(CHECKPOINT_CONFIG_NAME, self._sources.get(CHECKPOINT_CONFIG_NAME))
        return found or next((path for path in identity.places if path.name == CHECKPOINT_CONFIG_NAME), None)

    def model_name(self, part: BuiltPart) -> str:
        """Return the name of a finished part in the folder, ``/`` between parts."""
        return built_name(part.name, of_several=part.of_several, config=self._plan.config)

    def place(self, part: BuiltPart, folder: Path, files: OutputFiles) -> tuple[str, ...]:
        """Write a finished part under its name, to be put in place with other files.

        Args:
            part: The part.
            folder: The folder of the build.
            files: Where it is written to.

        Returns:
            The names of the files in the folder, the model first; without data that the part shares with its stages,
            where nobody takes the model out of the folder.
        """
        from winml.modelkit.onnx.files import writing
        from winml.modelkit.onnx.files.placing import place_copy

        assert part.current is not None  # an export ran, or the model was an ONNX file
        path = folder / self.model_name(part)
        staged = files.reserve(path)
        # A stage's result is ours and stays beside it; the model a build starts from is neither.
        is_ours = bool(part.current_files)
        if self._layout.numbers_data:
            created = writing.place_numbered(part.current, staged, may_link=is_ours)
            for data in created[1:]:
                files.reserve(path.with_name(data.name))  # replaces that of an earlier build, which has the same name
        elif self._plan.is_deployed:
            created = writing.place_self_contained(part.current, staged, may_link=is_ours)
        else:
            shares = is_ours and path.parent == folder  # a model names data files of its own folder only
            created = place_copy(part.current, staged, share_data=shares, may_link=is_ours)
        return tuple(path.with_name(file.name).relative_to(folder).as_posix() for file in created)

    def names_data_of(self, names: Sequence[str]) -> bool:
        """Say whether data is called after its model, and as the readers look for it; the model comes first."""
        model, data = Path(names[0]), names[1:]
        if self._layout.numbers_data:
            return list(data) == [numbered_data_path(model, number).as_posix() for number in range(len(data))]
        return not self._plan.is_deployed or all(is_data_of(model.name, Path(name).name) for name in data)

    def refuse(self, parts: Sequence[BuiltPart]) -> None:
        """Refuse graphs that the readers do not know, before anything else is done with them.

        Raises:
            UsageError: names what they do not know.
        """
        models = [part.current for part in parts if part.current is not None]
        if self._layout is not layout.PLAIN and models:
            layout.refuse_models(self._layout, models, self._config)
            self.written(parts, {})

    def notes(self, parts: Sequence[BuiltPart], folder: Path) -> tuple[str, ...]:
        """Return what readers of a finished folder miss, where it is laid out for some.

        Args:
            parts: The finished parts.
            folder: The folder of the build.
        """
        if self._layout is layout.PLAIN or not self._plan.with_companions:
            return ()
        from winml.modelkit.ort.decoding.inputs import inputs_of_file

        models = [part.current for part in parts if part.current is not None]
        inputs = {item.name: item.shape for model in models for item in inputs_of_file(model)}
        missing = [
            f"{self._layout.readers} cannot prepare {data}: the model has no {kind}. Put its files into "
            f"the build folder ({' or '.join(files)})."
            for kind, data, files in missing_processors(inputs, folder, self._layout.unread)
        ]
        config = self._sources.get(CHECKPOINT_CONFIG_NAME)
        unfit = self._layout.note(config, inputs) if config is not None else ""
        return (*missing, *([f"{unfit[0].upper()}{unfit[1:]}"] if unfit else []))

    def written(self, parts: Sequence[BuiltPart], placed: Mapping[str, Iterable[str]]) -> dict[str, str]:
        """Return what is written for the readers: name → text.

        Args:
            parts: The finished parts.
            placed: Part → names of its files in the folder, the model first.

        Raises:
            UsageError: the readers have no type for the graph.
            InputError: a config is damaged.
        """
        files = layout.LayoutFiles(
            self._sources,
            {part.name: (part.current, self.model_name(part)) for part in parts if part.current is not None},
            {part: tuple(names)[1:] for part, names in placed.items()},
        )
        texts = {**self.rewritten, **self._layout.describe(files)}
        self.written_names = tuple(texts)
        return texts

    def place_adapters(self, parts: Sequence[BuiltPart], folder: Path, files: OutputFiles) -> None:
        """Write the adapters that are switched at run time beside their model, to be put in place with other files.

        Raises:
            WinMLError: an adapter cannot be read any more, or not be written.
        """
        names = adapter_names(self._plan)
        if not names:
            return
        from winml.modelkit.export.adapter_files import write_adapters

        adapters = [adapter for adapter in read_adapters(self._plan.request.adapter) if adapter.name is not None]
        for part in parts:  # of which there is one
            assert part.current is not None  # an export ran
            beside = (folder / self.model_name(part)).parent
            write_adapters(adapters, part.current, lambda name, beside=beside: files.reserve(beside / name))  # type: ignore[misc]
        self.written_names = (*self.written_names, *names)


class BuildCompanions:
    """The companions in the folder of one build: config, tokenizer and processor files.

    A file belongs to builds as long as its content is what a build wrote; one that the user changed is not replaced.

    Attributes:
        placed: What stands there; known once the models are placed.
        records: What the manifest says of them. Until the build is done, these may be two of one name: as the earlier
            build left it, and as this one does.
    """

    def __init__(self, folder: BuildFolder, sources: Mapping[str, Path]) -> None:
        """Take over what the earlier build wrote down.

        Args:
            folder: Held by the build.
            sources: Name in the folder, ``/`` between parts → file to copy.
        """
        self.placed = companions.Companions()
        self.records = folder.manifest.companions if folder.manifest is not None else ()
        self._folder = folder
        self._sources = sources

    def reserve(self, files: OutputFiles) -> None:
        """Copy what is missing or outdated; the names are ours from now on, which the caller is to write down.

        Raises:
            WriteError: a file cannot be written.
        """
        folder = self._folder
        self._disown_changed()
        owned = folder.owned_names()
        self.placed = companions.reserve_companions(files, folder.path, self._sources, owned=owned)
        folder.disown(self.placed.kept)
        new = [name for name in self.placed.names if name not in owned]
        if new:
            folder.claim(new)
        coming = (file_record(name, self._sources[name]) for name in self.placed.names)
        self.records = tuple(dict.fromkeys((*self.records, *coming)))

    @property
    def planned(self) -> tuple[str, ...]:
        """Names of all files that may come along."""
        return tuple(self._sources)

    def outdated(self) -> tuple[str, ...]:
        """Return the names of those that :meth:`reserve` would write; changes no file."""
        self._disown_changed()
        return companions.outdated_companions(self._folder.path, self._sources, owned=self._folder.owned_names())

    def settle(self, files: OutputFiles) -> None:
        """Take note of what became of them in the commit."""
        folder = self._folder
        reserved = self.placed.names
        self.placed = companions.settled_companions(self.placed, folder.path, self._sources, files.gave_way)
        folder.disown([name for name in reserved if name not in self.placed.names])
        self.records = tuple(file_record(name, folder.path / name) for name in self.placed.names)

    def _disown_changed(self) -> None:
        names = {record.name for record in self.records} & {*self._folder.owned_names()}
        changed = [name for name in names if self._is_changed(name)]
        self._folder.disown(changed)
        self.records = tuple(record for record in self.records if record.name in names and record.name not in changed)

    def _is_changed(self, name: str) -> bool:
        path = self._folder.path / name
        if companions.is_in_the_way(self._folder.path, name):
            return True
        return path.exists() and file_record(name, path) not in self.records


def file_record(name: str, path: Path) -> FileRecord:
    """Return the record of a file under the name that it gets in the folder."""
    return FileRecord(name=name, size_bytes=path.stat().st_size, sha256=hash_file(path))
