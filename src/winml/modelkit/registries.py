"""Registries of named objects: built-in names, and names that installed packages add through entry points.

A name is known without importing its object: built-in names are in the code, names of plug-ins in the
``entry_points.txt`` of their distribution. An unusable plug-in is listed by :func:`installed_plug_ins` and omitted
from other listings; the error of a request for its name states the package to remove. Meaning and use of the objects
are defined elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from winml.modelkit.errors import UsageError, error_chain, first_line
from winml.modelkit.records import Record

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from pydantic import GetCoreSchemaHandler

CONTRACT = "v1"
"""Version of the contracts in ``extend``; a plug-in package states its version in the entry-point group
``winml.contract``."""

_REGISTRIES: Mapping[str, str] = {
    "configs": "winml.modelkit.builds.foreign_configs:CONFIG_READERS",
    "families": "winml.modelkit.models.families.input_decisions:FAMILIES",
    "layouts": "winml.modelkit.builds.layouts.layout:LAYOUTS",
    "passes": "winml.modelkit.optimize.capabilities:CAPABILITIES",
    "placements": "winml.modelkit.quantize.placements:PLACEMENTS",
    "precisions": "winml.modelkit.quantize.precisions:PRECISIONS",
    "providers": "winml.modelkit.ort.execution_providers:EXECUTION_PROVIDERS",
    "queues": "winml.modelkit.sweep.work_queue:QUEUES",
    "tasks": "winml.modelkit.evaluate.tasks.table:TASK_DEFINITIONS",
    "verbs": "winml.modelkit.cli.main:VERBS",
}
"""Entry-point group without namespace → target of its registry."""

_NAMESPACE, _CONTRACT = "winml", "contract"
"""Entry-point groups are named ``winml.layouts`` etc.; ``winml.contract`` states the contracts of a package."""
_METADATA_SUFFIXES = (".dist-info", ".egg-info")
"""Specified: suffixes of the folders in which installers describe a distribution."""
_ENTRY_POINTS = "entry_points.txt"

try:
    _STARTING_FOLDER = os.path.realpath(os.curdir)
    """Working directory of this process when it started; empty if it was deleted."""
except OSError:
    _STARTING_FOLDER = ""

T_co = TypeVar("T_co", covariant=True)


class PlugIn(Record):
    """A name added by an installed package."""

    group: str
    """Group of the entry point, without its namespace: ``layouts``."""
    name: str
    package: str
    version: str
    target: str
    """``module:object`` of the entry point."""
    problem: str = ""
    """Reason why the plug-in is unusable; empty if usable."""

    def refusal(self, noun: str) -> UsageError:
        """Return the error for a request of this name."""
        return UsageError(
            f"{noun} {self.name} of the package {self.package} {self.version} cannot be used: {self.problem}",
            hint=f"Install a version for this winml, or remove it: pip uninstall {self.package}",
        )


class Names(Mapping[str, T_co], Generic[T_co]):
    """Name → object, for names in options; ``Annotated[str, names]`` is a field with one of the names."""

    def __init__(self, kind: str, objects: Mapping[str, Any]) -> None:
        """Declare names.

        Args:
            kind: Noun for the objects, for messages: ``mode``.
            objects: Name → object.
        """
        self.kind, self._named = kind, objects

    # Annotations of fields are hashed; tables of names compare by identity.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> T_co:
        member: T_co = self._named[name]
        return member

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return tuple(self._named)

    def find(self, name: str, option: str) -> T_co:
        """Return the object of a name specified by a user.

        Args:
            name: The name.
            option: The option with the name, for messages: ``--layout``.

        Raises:
            UsageError: the name is unknown (suggests the nearest name), or its plug-in is unusable.
        """
        if name in self:
            return self[name]
        raise UsageError(f"{option} {name}: no such {self.kind}", hint=self._suggestion_text(name))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """Validate a field annotated with the table, as ``Annotated[str, LAYOUTS]``: its value is one of the names."""
        from pydantic import AfterValidator

        return AfterValidator(self._check_name).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(
        self, schema: Any, handler: Callable[[Any], Mapping[str, Any]]
    ) -> dict[str, object]:
        """Describe a field by its names, including names of installed plug-ins."""
        return {"enum": list(self.names), **handler(schema)}

    def _check_name(self, name: str) -> str:
        """Return the name, as pydantic's validator of the field; raises ValueError if the name is unknown."""
        if name not in self:
            raise ValueError(f"no such {self.kind}. {self._suggestion_text(name)}")
        return name

    def _suggestion_text(self, name: str) -> str:
        """Return the nearest name as a question, or else the list of all names."""
        from winml.modelkit.options import suggest  # imports pydantic

        return suggest(name, self.names, otherwise=f"There is: {', '.join(self.names)}.")


class Registry(Names[T_co]):
    """Name → object, built-in objects first, then objects of plug-ins in the order of their names.

    ``name in registry`` knows every name; iteration omits unusable plug-ins, and imports the others.
    """

    def __init__(
        self,
        group: str,
        kind: str,
        built_in: Mapping[str, T_co | str],
        contract: Callable[[], type | tuple[type, ...]],
        refuse: Callable[[str, Any], str] = lambda _name, _value: "",
    ) -> None:
        """Declare a registry.

        Args:
            group: Group of its entry points, without its namespace: ``layouts``.
            kind: Noun for the objects, for messages: ``layout``.
            built_in: Name → object, or ``module:object`` of an object that is imported on first use.
            contract: Returns the required type of plug-in objects.
            refuse: Takes a name and its object; returns why the object is unusable, or an empty string.
        """
        super().__init__(kind, built_in)
        self.group, self._built_in = group, built_in
        self._contract, self._refuse = contract, refuse
        self._loaded: dict[str | PlugIn, Any] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._built_in or name in self._name_owners()

    def __getitem__(self, name: str) -> T_co:
        """Return the object of a name.

        Raises:
            KeyError: the name is unknown.
            UsageError: the plug-in of the name is unusable.
        """
        if name in self._built_in:
            target = self._built_in[name]
            if not isinstance(target, str):
                return target
            if name not in self._loaded:
                self._loaded[name] = _import_object(target)
            built_in: T_co = self._loaded[name]
            return built_in
        plug_in = self._name_owners()[name]
        checked, value = self._check_plug_in(plug_in)
        if checked.problem:
            raise checked.refusal(self.kind)
        member: T_co = value
        return member

    def __iter__(self) -> Iterator[str]:
        yield from self._built_in
        yield from (name for name, owner in self._name_owners().items() if not self._check_plug_in(owner)[0].problem)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def built_in_names(self) -> tuple[str, ...]:
        """Names of the built-in objects."""
        return tuple(self._built_in)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, including names of unusable plug-ins; imports nothing."""
        return (*self._built_in, *self._name_owners())

    def _check_name(self, name: str) -> str:
        """Return the name, after an import of its plug-in; raises UsageError if the plug-in is unusable."""
        if super()._check_name(name) not in self._built_in:
            self[name]
        return name

    def part(self, name: str, target: str) -> Any:
        """Return a target that the object of a name refers to, imported on first use.

        Args:
            name: The name.
            target: ``module:object``.

        Raises:
            UsageError: the target belongs to a plug-in and cannot be imported.
        """
        if name in self._built_in:
            return _import_object(target)
        problem, value = _import_plug_in(target)
        if problem:
            raise replace(self._name_owners()[name], problem=problem).refusal(self.kind)
        return value

    def source(self, name: str) -> str:
        """Return package and version of a plug-in, ``example 1.0``; empty for a built-in name."""
        if name in self._built_in or name not in self:
            return ""
        plug_in = self._name_owners()[name]
        return f"{plug_in.package} {plug_in.version}"

    def reported(self) -> tuple[PlugIn, ...]:
        """Return all plug-ins of the group with their problems; imports them."""
        usable = self._name_owners()
        return tuple(
            self._check_plug_in(p)[0] if usable.get(p.name) is p else self._mark_unreachable(p)
            for p in self._group_plug_ins()
        )

    def _group_plug_ins(self) -> tuple[PlugIn, ...]:
        """Return the installed plug-ins of the group, also those without an own name."""
        return _read_entry_points(search_path()).get(self.group, ())

    def _name_owners(self) -> Mapping[str, PlugIn]:
        """Return the plug-ins that own their names: neither built-in objects nor earlier plug-ins have the name."""
        owners: dict[str, PlugIn] = {}
        for plug_in in self._group_plug_ins():
            if plug_in.name not in self._built_in:
                owners.setdefault(plug_in.name, plug_in)
        return owners

    def _mark_unreachable(self, plug_in: PlugIn) -> PlugIn:
        """Return a plug-in with the problem that another object owns its name."""
        owner = "winml" if plug_in.name in self._built_in else self._name_owners()[plug_in.name].package
        return replace(plug_in, problem=f"{owner} has a {self.kind} of this name")

    def _check_plug_in(self, plug_in: PlugIn) -> tuple[PlugIn, Any]:
        """Return a plug-in with its problem, and its object."""
        if plug_in.problem:
            return plug_in, None
        if plug_in not in self._loaded:
            problem, value = self._load_plug_in(plug_in)
            self._loaded[plug_in] = replace(plug_in, problem=problem), value
        result: tuple[PlugIn, Any] = self._loaded[plug_in]
        return result

    def _load_plug_in(self, plug_in: PlugIn) -> tuple[str, Any]:
        """Import and check the object of a plug-in; return the problem (empty: usable) and the object."""
        problem, value = _import_plug_in(plug_in.target)
        if problem:
            return problem, None
        if not isinstance(value, self._contract()):
            return f"{plug_in.target} is no {self.kind}: its type is {type(value).__name__}", None
        return self._refuse(plug_in.name, value), value


def installed_sources(group: str) -> dict[str, str]:
    """Return the names that plug-ins add to a group, with package and version; imports nothing."""
    plug_ins = _read_entry_points(search_path()).get(group, ())
    return {plug_in.name: f"{plug_in.package} {plug_in.version}" for plug_in in plug_ins}


def installed_plug_ins() -> tuple[PlugIn, ...]:
    """Return all plug-ins of all installed packages with their problems; imports them.

    A package with unreadable metadata is listed with the file in place of a name.
    """
    reports: list[PlugIn] = []
    for group, plug_ins in sorted(_read_entry_points(search_path()).items()):
        if group in _REGISTRIES:
            registry: Registry[Any] = _import_object(_REGISTRIES[group])
            reports += registry.reported()
        elif group == _CONTRACT:
            reports += plug_ins
        else:
            reports += (replace(plug_in, problem=f"winml has no group {_NAMESPACE}.{group}") for plug_in in plug_ins)
    return tuple(reports)


def search_path() -> tuple[str, ...]:
    """Return the module search path of this process, without implicit working directories.

    Python adds the working directory as an empty entry, and also for an empty entry of ``PYTHONPATH``, as in
    ``PYTHONPATH=$UNSET:folder``.
    """
    entries = [entry for entry in sys.path if entry not in ("", os.curdir)]
    path_entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    is_named = any(entry and os.path.realpath(entry) == _STARTING_FOLDER for entry in path_entries)
    if len(path_entries) > 1 and "" in path_entries and not is_named:
        return tuple(entry for entry in entries if os.path.realpath(entry) != _STARTING_FOLDER)
    return tuple(entries)


def _import_object(target: str) -> Any:
    """Import ``module:object``, or ``module`` alone."""
    module, _, name = target.partition(":")
    return functools.reduce(getattr, name.split(".") if name else (), importlib.import_module(module))


def _import_plug_in(target: str) -> tuple[str, Any]:
    """Import an object of a plug-in; return the problem and None, or an empty string and the object."""
    try:
        # Stdout is reserved for results, which may be JSON.
        with contextlib.redirect_stdout(sys.stderr):
            return "", _import_object(target)
    except (Exception, SystemExit) as error:
        # Paths are removed, because winml sys prints no paths.
        message = re.sub(r"\(?(?<!\w)(?:/|[A-Za-z]:[\\/])\S+", "…", first_line(error))
        return f"{target} cannot be imported: {type(error).__name__}: {message}", None


@functools.cache
def _read_entry_points(path_entries: tuple[str, ...]) -> Mapping[str, tuple[PlugIn, ...]]:
    """Return the entry points of all packages for winml, by group, in the order of their names.

    Only files with a group of winml are parsed: reading the others takes 2 ms for a hundred distributions, while
    ``importlib.metadata`` takes 35 to 150 ms to import and 5 to 10 ms to read them (measured).

    Args:
        path_entries: Module search path.
    """
    groups: dict[str, list[PlugIn]] = {}
    packages: set[str] = set()
    for folder in _plug_in_folders(dict.fromkeys(path_entries)):
        package, version, entries, problem = _read_description(folder)
        if package in packages:  # as for modules, the first entry on the path wins
            continue
        packages.add(package)
        if problem:
            groups.setdefault(_CONTRACT, []).append(PlugIn(_CONTRACT, _ENTRY_POINTS, package, version, "", problem))
        contracts = [entry.name for group, entry in entries if group == _CONTRACT]
        problem = "" if CONTRACT in contracts else _contract_mismatch_text(contracts)
        for group, entry in entries:
            if group != _CONTRACT:
                plug_in = PlugIn(group, entry.name, package, version, entry.value, problem)
                groups.setdefault(group, []).append(plug_in)
    return {group: tuple(plug_ins) for group, plug_ins in groups.items()}


class _Description(NamedTuple):
    """Metadata of an installed package."""

    package: str
    version: str
    entries: list[tuple[str, EntryPoint]]
    """Group without its namespace, and entry point; in the order of the names."""
    problem: str
    """Reason why the entry points cannot be read; empty otherwise."""


def _read_description(folder: Path) -> _Description:
    """Read the metadata of a package; name and version come from the name of the folder if METADATA is damaged."""
    from importlib.metadata import Distribution

    distribution = Distribution.at(folder)
    package, _, version = folder.name.rpartition(".")[0].partition("-")
    # If METADATA is damaged, the name of the folder still states package and version.
    with contextlib.suppress(ValueError, KeyError, TypeError, OSError, ImportError):
        package, version = distribution.name or package, distribution.version or version
    try:
        entries = [
            (entry.group.removeprefix(f"{_NAMESPACE}."), entry)
            for entry in sorted(distribution.entry_points, key=lambda entry: entry.name)
            if entry.group.startswith(f"{_NAMESPACE}.")
        ]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return _Description(package, version, [], f"{_ENTRY_POINTS} is damaged: {first_line(error)}")
    return _Description(package, version, entries, "")


def damaged_package(error: BaseException) -> tuple[str, Path] | None:
    """Return the installed package whose metadata raised an error, and the damaged file.

    Libraries read the metadata of every installed package, and Python does not name the unreadable file.

    Returns:
        Name of the package and path of the file; ``None`` for any other error.
    """
    if not any(_is_from_importlib_metadata(link) for link in error_chain(error)):
        return None
    for folder in _metadata_folders(dict.fromkeys(sys.path)):
        package, _, _, problem = _read_description(folder)
        if problem:
            return package, folder / _ENTRY_POINTS
        metadata = folder / ("METADATA" if folder.suffix == ".dist-info" else "PKG-INFO")
        try:
            metadata.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return package, metadata
    return None


def _is_from_importlib_metadata(error: BaseException) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__")).startswith("importlib.metadata") for frame in frames)


def _contract_mismatch_text(contracts: Iterable[str]) -> str:
    """Describe the contracts of a package that do not include the current contract."""
    names = ", ".join(contracts) or "none"
    return f"its package is for contract {names} (group {_NAMESPACE}.{_CONTRACT}), and this winml has {CONTRACT}"


def _plug_in_folders(path_entries: Iterable[str]) -> Iterator[Path]:
    """Yield the metadata folders of packages with entry points for winml."""
    for folder in _metadata_folders(path_entries):
        try:
            content = (folder / _ENTRY_POINTS).read_bytes()
        except OSError:
            continue
        if f"[{_NAMESPACE}.".encode() in content:
            yield folder


def _metadata_folders(path_entries: Iterable[str]) -> Iterator[Path]:
    """Yield the metadata folders of the packages on a search path, sorted within each entry."""
    for path_entry in path_entries:
        try:
            with os.scandir(path_entry or os.curdir) as entries:
                folders = sorted(entry.path for entry in entries if entry.name.endswith(_METADATA_SUFFIXES))
        except OSError:
            continue
        yield from map(Path, folders)
