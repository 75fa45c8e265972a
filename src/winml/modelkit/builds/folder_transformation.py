"""Transforms a build folder into a new one: a verb transforms each part, and companions are copied.

The result is the folder of a build without stages: every verb opens it, and the next build in it knows its files. All
files appear together, or none. Which verb it is decides who calls it.
"""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from winml.modelkit.builds.found_models import FoundFolder
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
"""Options whose selectors name the only modules that change."""
_SELECTING = (*_LIMITING, "exclude", "per_module")


def refuse_folder_outputs(found: FoundFolder, output: Path, *, overwrite: bool) -> None:
    """Refuse a folder that cannot be written, before anything is read.

    Raises:
        UsageError: it is a file or the folder that is read, a file in it exists already, or the readers of the folder
            look for data files by name.
        WriteError: it cannot be written to.
    """
    if output.is_file():
        raise UsageError(f"output {output} is a file", hint=f"Pass a folder: {found.path} holds several files.")
    models = [output / found.name_of(part) for part in found.parts]
    outputs = [*models, *(output / name for name in found.companions), output / BUILD_MANIFEST_NAME]
    refuse_inputs(outputs, (*found.parts.values(), *found.companions.values()))
    refuse_existing(outputs, overwrite=overwrite)
    layout = find_layout(found.layout)
    if layout.numbers_data and (outside := [file for path in found.parts.values() for file in external_files(path)]):
        raise UsageError(
            f"{found.path} is laid out for {layout.readers}, and its config lists data files, "
            f"which this would change: {outside[0].name}",
            hint=f"Pass a file of it, or request this from the build: winml build … --layout {layout.name}.",
        )


def transform_folder(
    found: FoundFolder,
    output: Path,
    changed: Collection[str],
    work: Callable[[str, OutputFiles], RecordT],
    *,
    overwrite: bool,
) -> TransformedFolder[RecordT]:
    """Do something with the chosen parts of a folder, and put the result beside what came along.

    Args:
        found: The folder.
        output: The folder to write.
        changed: Names of the parts that change.
        work: Makes the file of a part, among files that are put in place together.
        overwrite: Replace existing files.

    Raises:
        UsageError: the output is no folder that can be written.
        WinMLError: whatever the work raises; nothing is written.
    """
    refuse_folder_outputs(found, output, overwrite=overwrite)
    recover([output / BUILD_MANIFEST_NAME])
    started, clock = datetime.now(timezone.utc).astimezone(), time.perf_counter()
    records: dict[str, RecordT] = {}
    with OutputFiles() as files:
        files.reserve(output / BUILD_MANIFEST_NAME)  # moved last
        staged: dict[str, tuple[str, tuple[Path, ...]]] = {}
        for part, source in found.parts.items():
            name = found.name_of(part)
            place = files.reserve(output / name)
            if part in changed:
                records[part] = work(part, files)
            else:
                place_self_contained(source, place, may_link=False)
            staged[part] = (name, (place, *external_files(place)))
        for name, source in found.companions.items():
            place = files.reserve(output / name)
            shutil.copyfile(source, place)
            staged[f"/{name}"] = (name, (place,))
        described = {key: _described(name, paths) for key, (name, paths) in staged.items()}
        manifest = _manifest(found, output, described, started, time.perf_counter() - clock)
        files.write_json(output / BUILD_MANIFEST_NAME, manifest.as_record())
        size_bytes = sum(files.commit(overwrite=overwrite).values())
    unchanged = {
        part: "none of its modules is selected" if part in found.chosen else f"{opt.submodel} {' '.join(found.chosen)}"
        for part in found.parts
        if part not in records
    }
    return TransformedFolder(found.path, output, records, unchanged, tuple(found.companions), size_bytes)


def _described(name: str, staged: Iterable[Path]) -> tuple[FileRecord, ...]:
    """Return the records of the files of one part, with the names they get in the folder."""
    folder = Path(name).parent
    return tuple(
        record.model_copy(update={"name": (folder / record.name).as_posix()})
        for path in staged
        for record in FileRecords(path.parent).of([path])
    )


def _manifest(
    found: FoundFolder,
    output: Path,
    described: Mapping[str, tuple[FileRecord, ...]],
    started: datetime,
    seconds: float,
) -> BuildManifest:
    parts = tuple(PartRecord(name=part, model=described[part]) for part in found.parts)
    companions = tuple(record for name in found.companions for record in described[f"/{name}"])
    written = (*(file for part in parts for file in part.model), *companions)
    # The next build may remove what a build left in the folder before.
    earlier = find_manifest(output)
    owned = () if earlier is None else earlier.files
    return BuildManifest(
        status="done",
        files=tuple(sorted({*owned, *(file.name for file in written), BUILD_MANIFEST_NAME})),
        parts=parts,
        companions=companions,
        deploy=written,
        layout=found.layout,
        input={"model": str(found.path)},
        started=started.isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
        versions={TOOL_NAME: __version__, "python": platform.python_version()},
    )


def options_by_part(found: FoundFolder, options: OptionsT) -> dict[str, OptionsT]:
    """Return what is to be done with each part; without those of which nothing is to change.

    A selector counts for the parts that have modules of it.

    Raises:
        UsageError: a selector names no module of any part.
    """
    selectors = {key: value for key in _SELECTING if (value := getattr(options, key, None))}
    if not selectors or len(found.chosen) == 1:
        return dict.fromkeys(found.chosen, options)
    modules = part_modules({part: found.parts[part] for part in found.chosen})
    for text in (text for value in selectors.values() for text in value):
        parts_with_module(modules, text)
    narrowed = {}
    for part in found.chosen:
        changes: dict[str, object] = {key: _matching(value, modules[part]) for key, value in selectors.items()}
        if all(changes[key] for key in _LIMITING if key in changes):
            narrowed[part] = options.model_copy(update=changes)
    return narrowed


def _matching(selectors: Any, modules: Iterable[ModuleAddress]) -> Any:
    """Return the selectors that name a module, in the form they have."""
    modules = list(modules)
    retained = [text for text in selectors if any(map(Selector(text).matches, modules))]
    return {text: selectors[text] for text in retained} if isinstance(selectors, Mapping) else type(selectors)(retained)


def part_modules(parts: Mapping[str, Path]) -> Modules:
    """Return the modules of each part, by tags or by names of nodes; no weight is read.

    Raises:
        InputError: a file is damaged.
    """
    return {part: [*graph_modules(load_by_reference(path), path.stem).modules] for part, path in parts.items()}


def parts_with_module(modules: Modules, selector: str) -> list[str]:
    """Return the parts that have a module of a selector.

    Raises:
        UsageError: none has; the nearest addresses are listed.
    """
    found = [part for part, candidates in modules.items() if any(map(Selector(selector).matches, candidates))]
    if not found:
        select([module for candidates in modules.values() for module in candidates], selector)
    return found
