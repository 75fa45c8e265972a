"""Transforms a build folder into a new one: a command transforms each part, and companion files are copied.

The result is a build folder without stages, readable by every command, with a manifest for the next build. All files
appear together, or none. The caller passes the transformation.
"""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from winml.modelkit.builds.found_models import ModelFolder
from winml.modelkit.builds.identity import FileRecords
from winml.modelkit.builds.layouts.layout import find_layout
from winml.modelkit.builds.manifest_records import TOOL_NAME, BuildManifest, FileRecord, PartRecord, find_manifest
from winml.modelkit.errors import UsageError, opt
from winml.modelkit.file_names import BUILD_MANIFEST_NAME
from winml.modelkit.onnx.files.graph_reading import load_by_reference
from winml.modelkit.onnx.files.output_files import OutputFiles, recover, refuse_existing, refuse_inputs
from winml.modelkit.onnx.files.placing import external_files
from winml.modelkit.onnx.files.writing import place_self_contained
from winml.modelkit.options import Options
from winml.modelkit.tags.selector import ModuleAddress, Selector, select
from winml.modelkit.transform.module_functions import graph_modules
from winml.modelkit.transform.records import RecordT, TransformedFolder
from winml.modelkit.version import __version__

OptionsT = TypeVar("OptionsT", bound=Options)
Modules = Mapping[str, list[ModuleAddress]]
"""Name of a part → its modules."""

_LIMITING = ("module", "include")
"""Options with selectors of the modules that change; other modules stay."""
_SELECTING = (*_LIMITING, "exclude", "per_module", "block_sizes", "algorithms")


def refuse_folder_outputs(build: ModelFolder, output: Path, *, overwrite: bool) -> None:
    """Refuse an output folder that cannot be written, before a model is read.

    Raises:
        UsageError: the output is a file or the source folder, a file in it exists already, or the readers of the folder
            look for data files by name.
        WriteError: the output cannot be written to.
    """
    if output.is_file():
        raise UsageError(f"output {output} is a file", hint=f"Pass a folder: {build.path} holds several files.")
    models = [output / build.name_of(part) for part in build.parts]
    outputs = [*models, *(output / name for name in build.companions), output / BUILD_MANIFEST_NAME]
    refuse_inputs(outputs, (*build.parts.values(), *build.companions.values()))
    refuse_existing(outputs, overwrite=overwrite)
    layout = find_layout(build.layout)
    if layout.numbers_data and (outside := [file for path in build.parts.values() for file in external_files(path)]):
        raise UsageError(
            f"{build.path} is laid out for {layout.readers}, and its config lists data files, "
            f"which this would change: {outside[0].name}",
            hint=f"Pass a file of it, or request this from the build: winml build … --layout {layout.name}.",
        )


def transform_folder(
    build: ModelFolder,
    output: Path,
    changed: Collection[str],
    work: Callable[[str, OutputFiles], RecordT],
    *,
    overwrite: bool,
) -> TransformedFolder[RecordT]:
    """Transform some parts of a folder into a new folder, and copy the other parts and files.

    Args:
        build: The source folder.
        output: The folder to write.
        changed: Names of the parts to transform.
        work: Writes the file of a part in the transaction that puts all files in place together.
        overwrite: Replace existing files.

    Raises:
        UsageError: the output folder cannot be written.
        WinMLError: any error of ``work``; no file is written.
    """
    refuse_folder_outputs(build, output, overwrite=overwrite)
    recover([output / BUILD_MANIFEST_NAME])
    started, clock = datetime.now(timezone.utc).astimezone(), time.perf_counter()
    records: dict[str, RecordT] = {}
    with OutputFiles() as files:
        files.reserve(output / BUILD_MANIFEST_NAME)  # moved last
        staged: dict[str, tuple[str, tuple[Path, ...]]] = {}
        for part, source in build.parts.items():
            name = build.name_of(part)
            target = files.reserve(output / name)
            if part in changed:
                records[part] = work(part, files)
            else:
                place_self_contained(source, target, may_link=False)
            staged[part] = (name, (target, *external_files(target)))
        for name, source in build.companions.items():
            target = files.reserve(output / name)
            shutil.copyfile(source, target)
            staged[f"/{name}"] = (name, (target,))
        part_records = {key: _final_records(name, paths) for key, (name, paths) in staged.items()}
        manifest = _make_manifest(build, output, part_records, started, time.perf_counter() - clock)
        files.write_json(output / BUILD_MANIFEST_NAME, manifest.as_record())
        size_bytes = sum(files.commit(overwrite=overwrite).values())
    unchanged = {
        part: "none of its modules is selected" if part in build.chosen else f"{opt.submodel} {' '.join(build.chosen)}"
        for part in build.parts
        if part not in records
    }
    return TransformedFolder(build.path, output, records, unchanged, tuple(build.companions), size_bytes)


def _final_records(name: str, staged: Iterable[Path]) -> tuple[FileRecord, ...]:
    """Return the records of staged files of one part, under their final names in the folder."""
    folder = Path(name).parent
    return tuple(
        record.model_copy(update={"name": (folder / record.name).as_posix()})
        for path in staged
        for record in FileRecords(path.parent).of([path])
    )


def _make_manifest(
    build: ModelFolder,
    output: Path,
    described: Mapping[str, tuple[FileRecord, ...]],
    started: datetime,
    seconds: float,
) -> BuildManifest:
    """Return the manifest of the new folder: one model file for each part, and the copied files.

    Args:
        build: The transformed folder.
        output: The new folder, whose earlier manifest is read.
        described: Part, or ``/`` and name of a copied file → records of its files.
        started: Start of the command.
        seconds: Its duration.
    """
    parts = tuple(PartRecord(name=part, model=described[part]) for part in build.parts)
    companions = tuple(record for name in build.companions for record in described[f"/{name}"])
    new_files = (*(file for part in parts for file in part.model), *companions)
    # The files of an earlier build in the output stay listed, so that the next build may remove them.
    earlier = find_manifest(output)
    earlier_files = () if earlier is None else earlier.files
    return BuildManifest(
        status="done",
        files=tuple(sorted({*earlier_files, *(file.name for file in new_files), BUILD_MANIFEST_NAME})),
        parts=parts,
        companions=companions,
        deploy=new_files,
        layout=build.layout,
        input={"model": str(build.path)},
        started=started.isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
        versions={TOOL_NAME: __version__, "python": platform.python_version()},
    )


def options_by_part(build: ModelFolder, options: OptionsT) -> dict[str, OptionsT]:
    """Return part → options; unchanged parts are omitted.

    A selector applies to the parts with a matching module.

    Raises:
        UsageError: a selector names no module of any part.
    """
    selectors = {key: value for key in _SELECTING if (value := getattr(options, key, None))}
    if not selectors or len(build.chosen) == 1:
        return dict.fromkeys(build.chosen, options)
    modules = part_modules({part: build.parts[part] for part in build.chosen})
    for text in (text for value in selectors.values() for text in value):
        parts_with_module(modules, text)
    narrowed = {}
    for part in build.chosen:
        changes: dict[str, object] = {key: _filter_selectors(value, modules[part]) for key, value in selectors.items()}
        if all(changes[key] for key in _LIMITING if key in changes):
            narrowed[part] = options.model_copy(update=changes)
    return narrowed


def _filter_selectors(selectors: Any, modules: Iterable[ModuleAddress]) -> Any:
    """Return the selectors that match a module, as the same type of collection."""
    modules = list(modules)
    texts = [text for text in selectors if any(map(Selector(text).matches, modules))]
    return {text: selectors[text] for text in texts} if isinstance(selectors, Mapping) else type(selectors)(texts)


def part_modules(parts: Mapping[str, Path]) -> Modules:
    """Return part → modules, by tags or by names of nodes; no weights are read.

    Raises:
        InputError: a file is damaged.
    """
    return {part: [*graph_modules(load_by_reference(path), path.stem).modules] for part, path in parts.items()}


def parts_with_module(modules: Modules, selector: str) -> list[str]:
    """Return the parts with a module matched by a selector.

    Raises:
        UsageError: no part has such a module; the nearest addresses are listed.
    """
    part_names = [part for part, candidates in modules.items() if any(map(Selector(selector).matches, candidates))]
    if not part_names:
        select([module for candidates in modules.values() for module in candidates], selector)
    return part_names
