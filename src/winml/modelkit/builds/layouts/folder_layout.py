"""The layout of one build folder: file names, copied files, written files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from winml.modelkit.builds.config import requested_provider
from winml.modelkit.builds.dtypes import dtype_file
from winml.modelkit.builds.folder import BuildFolder
from winml.modelkit.builds.identity import ModelIdentity
from winml.modelkit.builds.layouts import layout
from winml.modelkit.builds.manifest_records import FileRecord
from winml.modelkit.builds.plan import BuildPlan
from winml.modelkit.builds.stages import BuiltPart, adapter_names, built_names
from winml.modelkit.errors import UsageError, opt
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME, DECODER, MODEL_CARD_NAME, is_data_of, numbered_data_path
from winml.modelkit.models.checkpoints.adapters import read_adapters
from winml.modelkit.models.checkpoints.companion_files import module_names
from winml.modelkit.models.checkpoints.task import canonical_task
from winml.modelkit.models.request import resolve_source
from winml.modelkit.onnx.bundle import model_record
from winml.modelkit.onnx.files import companions
from winml.modelkit.onnx.files.content_digest import hash_file
from winml.modelkit.onnx.files.output_files import OutputFiles
from winml.modelkit.samples.processors import missing_processors


class FolderLayout:
    """The layout of one build.

    Attributes:
        copied: Files that are copied unchanged: name in the folder → file.
        rewritten: Files of the checkpoint that are written with other content: name in the folder → text.
        written_names: Names of files written for the readers, except models; known once the parts are known.
    """

    def __init__(self, plan: BuildPlan, identity: ModelIdentity) -> None:
        """Decide which files are copied or rewritten.

        Raises:
            InputError: a file to rewrite for the readers is damaged.
            TaskError: the readers have no class for the model.
            UsageError: a layout is requested for a diffusers pipeline.
        """
        self._plan = plan
        self._layout = plan.layout
        self._sources = self._find_sources(identity)
        self._config = self._find_config(identity)
        self._card = identity.card
        kind = None if plan.onnx_path is not None else resolve_source(plan.request, needs_weights=False).kind
        if kind == "script":
            layout.refuse_task(self._layout, None)
        if kind == "pipeline" and self._layout is not layout.PLAIN:
            raise UsageError(
                f"{opt.layout} {self._layout.name}: the build of a diffusers pipeline has one layout, the one that "
                "optimum's ORTDiffusionPipeline opens",
                hint=f"Remove {opt.layout}.",
            )
        task = None if plan.request.task is None else canonical_task(plan.request.task)
        layout.refuse_unknown_type(self._layout, self._config, task, has_cache=plan.request.cache)
        self.rewritten = self._layout.rewrite(self._sources)
        changed_names = {*self.rewritten, *self._layout.described}
        if self.has_card:
            changed_names.add(MODEL_CARD_NAME)
        self.copied = {name: source for name, source in self._sources.items() if name not in changed_names}
        self.written_names: tuple[str, ...] = ()
        self._placed: dict[Path, Path] = {}
        """Data file of a stage → its copy in the folder; parts may share a file of compiled content."""

    def _find_sources(self, identity: ModelIdentity) -> dict[str, Path]:
        """Return the companion files to copy: name in the folder → file; ``{}`` if none are requested."""
        if not self._plan.with_companions:
            return {}
        return {**identity.companions, **(identity.card if self._layout.with_card else {})}

    @property
    def has_card(self) -> bool:
        """True if the folder gets a model card."""
        return self._layout.with_card and self._plan.with_companions

    def card(self, parts: Sequence[BuiltPart], sizes: Mapping[str, int]) -> str:
        """Return the text of the model card.

        Args:
            parts: The finished parts.
            sizes: Name of each model and data file, relative to the folder → bytes.
        """
        from winml.modelkit.builds.model_card import CardFacts, CardRow, model_card
        from winml.modelkit.onnx.files.reading import read_metadata, read_structure

        models = [part.current for part in parts if part.current is not None]
        described = next((part for part in parts if part.name == DECODER), parts[0])
        assert described.current is not None  # the build is finished
        inputs = tuple(value.name for value in read_structure(described.current).graph.input)
        task = model_record(read_metadata(models[0])).get("task") or ""
        config = self._sources.get(CHECKPOINT_CONFIG_NAME)
        has_processors = config is not None and not missing_processors(inputs, config.parent, self._layout.unread)
        stem = Path(self.model_name(described)).stem
        folder = layout.BuiltFolder(".", task, inputs, stem, has_processors=has_processors)
        prefixes = {part.name: f"{part.name} " if len(parts) > 1 else "" for part in parts}
        facts = CardFacts(
            self._plan.request.model,
            task,
            self._layout.readers,
            [CardRow(name, size) for name, size in sizes.items()],
            stages=[
                f"{prefixes[part.name]}{record.name}: {record.summary}"
                for part in parts
                for record in part.records
                if record.status != "skipped"
            ],
            usage=self._layout.usage(folder),
            language=self._layout.language,
            tags=("onnx", self._layout.name),
            later_modules=module_names(self._sources),
        )
        return model_card(facts, self._card)

    def _find_config(self, identity: ModelIdentity) -> Path | None:
        """Return ``config.json`` of the model, copied or not; ``None`` if missing."""
        config = identity.companions.get(CHECKPOINT_CONFIG_NAME)
        return config or next((path for path in identity.places if path.name == CHECKPOINT_CONFIG_NAME), None)

    def model_name(self, part: BuiltPart) -> str:
        """Return the path of a finished part relative to the folder, with ``/``; that of the first dtype."""
        return self.model_names(part)[0]

    def model_names(self, part: BuiltPart) -> tuple[str, ...]:
        """Return the paths of the files of a finished part relative to the folder, one for each dtype."""
        return built_names(part.name, of_several=part.of_several, config=self._plan.config)

    def _models(self, part: BuiltPart) -> dict[str, Path]:
        """Return final name → current file, for each dtype of a part."""
        assert part.current is not None  # an export ran, or the model was an ONNX file
        config = self._plan.config
        files = [dtype_file(part.current, dtype, config) for dtype in config.dtypes] or [part.current]
        return dict(zip(self.model_names(part), files, strict=True))

    def place(self, part: BuiltPart, folder: Path, files: OutputFiles) -> tuple[str, ...]:
        """Write a finished part under its final name, as part of a transaction.

        Args:
            part: The part.
            folder: The folder of the build.
            files: The transaction.

        Returns:
            The names of the written files, each model before its data, the first dtype first. Data files that a model
                shares with its stages are not listed.
        """
        # The result of a stage belongs to the build and stays in the folder, unlike the source model.
        is_ours = bool(part.current_files)
        models = self._models(part).items()
        return tuple(
            created for name, file in models for created in self._place_file(file, name, folder, files, is_ours)
        )

    def _place_file(self, source: Path, name: str, folder: Path, files: OutputFiles, may_link: bool) -> list[str]:
        """Write one file of a finished part; return the names of model and data files, relative to the folder."""
        from winml.modelkit.onnx.files import writing
        from winml.modelkit.onnx.files.placing import place_copy

        path = folder / name
        staged = files.reserve(path)
        if self._layout.numbers_data:
            created = writing.place_numbered(source, staged, may_link=may_link)
            for data in created[1:]:
                files.reserve(path.with_name(data.name))  # replaces the file of an earlier build with this name
        elif self._plan.is_deployed:
            created = writing.place_self_contained(source, staged, may_link=may_link, placed=self._placed)
        else:
            shares = may_link and path.parent == folder  # a model can name only data files of its own folder
            created = place_copy(source, staged, share_data=shares, may_link=may_link)
        return [path.with_name(file.name).relative_to(folder).as_posix() for file in created]

    def names_data_of(self, names: Sequence[str]) -> bool:
        """Return True if data files have the names that the layout requires; each follows its model."""
        return all(self._names_data_of(Path(model), data) for model, *data in group_by_model(names))

    def _names_data_of(self, model: Path, data: Sequence[str]) -> bool:
        if self._layout.numbers_data:
            return list(data) == [numbered_data_path(model, number).as_posix() for number in range(len(data))]
        return not self._plan.is_deployed or all(is_data_of(model.name, Path(name).name) for name in data)

    def refuse(self, parts: Sequence[BuiltPart]) -> None:
        """Refuse graphs that the readers do not support, before further stages.

        Raises:
            UsageError: the readers do not support a graph; names the reason.
        """
        models = [part.current for part in parts if part.current is not None]
        if self._layout is not layout.PLAIN and models:
            layout.refuse_models(self._layout, models, self._config)
            self.written(parts, {})

    def notes(self, parts: Sequence[BuiltPart], folder: Path) -> tuple[str, ...]:
        """Return notes on files that readers of a finished folder lack; ``()`` without a layout.

        Args:
            parts: The finished parts.
            folder: The folder of the build.
        """
        if self._layout is layout.PLAIN or not self._plan.with_companions:
            return ()
        from winml.modelkit.ort.decoding.inputs import inputs_of_file

        models = [part.current for part in parts if part.current is not None]
        inputs = {graph_input.name: graph_input.shape for model in models for graph_input in inputs_of_file(model)}
        missing = [
            f"{self._layout.readers} cannot prepare {data}: the model has no {kind}. Put its files into "
            f"the build folder ({' or '.join(files)})."
            for kind, data, files in missing_processors(inputs, folder, self._layout.unread)
        ]
        config = self._sources.get(CHECKPOINT_CONFIG_NAME)
        unfit = self._layout.note(config, inputs) if config is not None else ""
        return (*missing, *([f"{unfit[0].upper()}{unfit[1:]}"] if unfit else []))

    def written(self, parts: Sequence[BuiltPart], placed: Mapping[str, Iterable[str]]) -> dict[str, str]:
        """Decide the files that are written for the readers, and set :attr:`written_names`; return name → text.

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
            {name: file for part in parts if part.current is not None for name, file in self._models(part).items()},
            requested_provider(self._plan.config),
            self._plan.request.model,
        )
        texts = {**self.rewritten, **self._layout.describe(files)}
        self.written_names = tuple(texts)
        return texts

    def place_adapters(self, parts: Sequence[BuiltPart], folder: Path, files: OutputFiles) -> None:
        """Write the run-time adapters beside their model, as part of a transaction.

        Raises:
            WinMLError: an adapter can no longer be read, or cannot be written.
        """
        names = adapter_names(self._plan)
        if not names:
            return
        from winml.modelkit.export.adapter_files import write_adapters

        adapters = [adapter for adapter in read_adapters(self._plan.request.adapter) if adapter.name is not None]
        for part in parts:  # exactly one part
            assert part.current is not None  # an export ran
            beside = (folder / self.model_name(part)).parent
            write_adapters(adapters, part.current, lambda name, beside=beside: files.reserve(beside / name))  # type: ignore[misc]
        self.written_names = (*self.written_names, *names)


def group_by_model(names: Iterable[str]) -> list[list[str]]:
    """Divide the names of placed files into one group per model: the model, then its data files."""
    groups: list[list[str]] = []
    for name in names:
        if name.endswith(".onnx"):
            groups.append([])
        groups[-1].append(name)
    return groups


class BuildCompanions:
    """The companion files in a build folder: config, tokenizer and processor files.

    A file belongs to builds while its content is unchanged; a file that the user changed is not replaced.

    Attributes:
        placed: The companion files in the folder; known once the models are placed.
        records: Records for the manifest. Until the build is done, a name may have two: of the earlier build, and of
            this build.
    """

    def __init__(self, folder: BuildFolder, sources: Mapping[str, Path]) -> None:
        """Start with the records of the earlier build.

        Args:
            folder: Folder that the build holds.
            sources: Path relative to the folder, with ``/`` → file to copy.
        """
        self.placed = companions.Companions()
        self.records = folder.manifest.companions if folder.manifest is not None else ()
        self._folder = folder
        self._sources = sources

    def reserve(self, files: OutputFiles) -> None:
        """Copy missing and outdated files, and claim their names; files that the user changed are kept and disowned.

        Sets :attr:`placed`; the caller saves the manifest.

        Raises:
            WriteError: a file cannot be written.
        """
        folder = self._folder
        self._disown_changed_files()
        owned_names = folder.owned_names()
        self.placed = companions.reserve_companions(files, folder.path, self._sources, owned=owned_names)
        folder.disown(self.placed.foreign_names)
        new = [name for name in self.placed.names if name not in owned_names]
        if new:
            folder.claim(new)
        new_records = (file_record(name, self._sources[name]) for name in self.placed.names)
        self.records = tuple(dict.fromkeys((*self.records, *new_records)))

    def add(self, name: str, path: Path) -> None:
        """Add a file to copy."""
        self._sources = {**self._sources, name: path}

    @property
    def planned(self) -> tuple[str, ...]:
        """Names of all files that may be copied."""
        return tuple(self._sources)

    def outdated(self) -> tuple[str, ...]:
        """Return the names of the files that :meth:`reserve` would write; changes no file."""
        self._disown_changed_files()
        return companions.outdated_companions(self._folder.path, self._sources, owned=self._folder.owned_names())

    def settle(self, files: OutputFiles) -> None:
        """Update records and ownership after the commit of the copied files."""
        folder = self._folder
        reserved = self.placed.names
        self.placed = companions.settled_companions(self.placed, folder.path, self._sources, files.gave_way)
        folder.disown([name for name in reserved if name not in self.placed.names])
        self.records = tuple(file_record(name, folder.path / name) for name in self.placed.names)

    def _disown_changed_files(self) -> None:
        """Remove files that the user changed from the records and from the files of the build."""
        names = {record.name for record in self.records} & {*self._folder.owned_names()}
        changed = [name for name in names if self._is_changed_by_user(name)]
        self._folder.disown(changed)
        self.records = tuple(record for record in self.records if record.name in names and record.name not in changed)

    def _is_changed_by_user(self, name: str) -> bool:
        """Return True if a file differs from its records, or another kind of file has its name."""
        path = self._folder.path / name
        if companions.is_in_the_way(self._folder.path, name):
            return True
        return path.exists() and file_record(name, path) not in self.records


def file_record(name: str, path: Path) -> FileRecord:
    """Return the record of a file under its final name in the folder."""
    return FileRecord(name=name, size_bytes=path.stat().st_size, sha256=hash_file(path))
