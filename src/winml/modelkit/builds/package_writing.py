"""Writes the files of a model package from the finished models of its variants.

Weights with equal bytes in several variants are written once. No weight is held in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from winml.modelkit import file_names
from winml.modelkit.builds.layouts import package
from winml.modelkit.errors import WriteError
from winml.modelkit.file_names import MODEL_CARD_NAME
from winml.modelkit.onnx.contexts import context_file_attributes
from winml.modelkit.onnx.files.initializer_bytes import StoredBytes
from winml.modelkit.onnx.files.moving import remove_file
from winml.modelkit.onnx.files.output_files import OutputFiles, refuse_existing
from winml.modelkit.onnx.files.placing import copy_data, external_tensors
from winml.modelkit.onnx.files.reading import read_referring, refer_to_data
from winml.modelkit.onnx.files.wire_format import INLINE_LIMIT_BYTES
from winml.modelkit.onnx.files.writing import aligned_offset, locate_values, write_embedded
from winml.modelkit.words import size_words

_SMALLEST_SHARED_BYTES = 1024
"""Specified by onnx: size from which it writes a tensor to a data file by default."""


@dataclass(frozen=True)
class PackageContent:
    """Content of a package: the models of its variants, and the files beside them."""

    name: str
    """Name of the package."""
    source: str
    """Name of the source model."""
    variants: Mapping[str, package.Variant]
    models: Mapping[str, Mapping[str, Path]]
    """Variant → part → ONNX file."""
    facts: Mapping[str, Mapping[str, Any]]
    """Variant → values for the metadata of its entries."""
    companions: Mapping[str, Path]
    """Name in the root of the package → file."""
    card: Callable[[Mapping[str, int]], str]
    """Variant → bytes of its own files and the shared weights that it reads; returns the text of the model card."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of the model, in the order in which they run."""
        return tuple(next(iter(self.models.values())))


@dataclass(frozen=True)
class _Weight:
    """A weight of a model, with the digest and the location of its bytes."""

    tensor: onnx.TensorProto
    stored: StoredBytes
    digest: str


@dataclass(frozen=True)
class _Model:
    """The graph of one part of one variant."""

    part: str
    variant: str
    path: Path
    graph: onnx.ModelProto
    weights: tuple[_Weight, ...]
    placed: list[_Weight] = field(default_factory=list)
    """Weights in a data file of the package."""


@dataclass(frozen=True)
class WrittenPackage:
    """Sizes of a written package, in bytes."""

    size_bytes: int
    """All files."""
    shared_bytes: int
    """Weights in shared data files."""
    by_variant: Mapping[str, tuple[int, int]]
    """Variant → its own files, and the shared weights that it reads."""


class _DataFile:
    """Layout of a data file: weights with equal bytes are stored once."""

    def __init__(self) -> None:
        """Start an empty file."""
        self._entries: dict[str, tuple[int, StoredBytes]] = {}
        self._size_bytes = 0

    def place(self, weight: _Weight) -> int:
        """Return the offset of a weight, which is added if it is new."""
        if weight.digest not in self._entries:
            offset = aligned_offset(self._size_bytes, weight.stored.size_bytes)
            self._entries[weight.digest] = (offset, weight.stored)
            self._size_bytes = offset + weight.stored.size_bytes
        return self._entries[weight.digest][0]

    def pieces(self) -> Iterator[bytes]:
        """Yield the content of the file, with zeros between weights."""
        end = 0
        for offset, stored in self._entries.values():
            yield bytes(offset - end)
            yield from stored.read()
            end = offset + stored.size_bytes


def write_package(folder: Path, content: PackageContent, earlier: tuple[str, ...]) -> WrittenPackage:
    """Write a package, all files or none, and remove the files that only the earlier package had.

    Args:
        folder: Folder of the package.
        content: Content of the package.
        earlier: Files of the earlier package in the folder, relative to it.

    Raises:
        InputError: a model or its data cannot be read.
        OutputExistsError: the folder has a file of this name that is not of the earlier package.
        WriteError: a file cannot be written.
    """
    models = [
        _read_model(part, variant, path) for variant, parts in content.models.items() for part, path in parts.items()
    ]
    data = _share_weights(models)
    uri = package.directory_uri({name: _digest(file.pieces()) for name, file in data.items()})
    uris = {model.variant: uri for model in models if model.placed}
    with OutputFiles() as files:
        for name in (
            file_names.PACKAGE_MANIFEST_NAME,
            *(f"{part}/{file_names.PACKAGE_COMPONENT_NAME}" for part in content.parts),
        ):
            files.reserve(folder / name)  # moved after the files that they name, the manifest last
        for name, file in data.items():
            with files.reserve(folder / package.shared_folder(uri) / name).open("wb") as stream:
                stream.writelines(file.pieces())
        for model in models:
            target = folder / package.variant_path(model.part, model.variant)
            for attribute in context_file_attributes(model.graph):
                context = attribute.s.decode()
                copy_data(model.path.parent / context, files.reserve(target.with_name(context)))
            if not write_embedded(model.graph, model.path, files.reserve(target), external=tuple(data)):
                raise WriteError(
                    f"cannot write {target}: the graph is larger than {size_words(INLINE_LIMIT_BYTES)}",
                    hint="Build variants into folders of their own, without a package.",
                )
        for name, path in content.companions.items():
            shutil.copyfile(path, files.reserve(folder / name))
        for part in content.parts:
            record = package.component_record(part, content.variants, uris, content.facts)
            files.write_json(folder / part / file_names.PACKAGE_COMPONENT_NAME, record)
        by_variant = _variant_sizes(folder, models, files.written_sizes())
        card = content.card({name: own + shared for name, (own, shared) in by_variant.items()})
        files.write_text(folder / MODEL_CARD_NAME, card)
        names = {path.relative_to(folder.absolute()).as_posix() for path in files.written_sizes()}
        names.add(file_names.PACKAGE_MANIFEST_NAME)
        manifest = package.manifest_record(content.name, content.parts, sorted(names), content.source)
        files.write_json(folder / file_names.PACKAGE_MANIFEST_NAME, manifest)
        refuse_existing([folder / name for name in names.difference(earlier)], overwrite=False)
        sizes = files.commit()
    _remove_files(folder, {*earlier} - names)
    shared = {weight.digest: weight.stored.size_bytes for model in models for weight in model.placed}
    return WrittenPackage(sum(sizes.values()), sum(shared.values()), by_variant)


def _variant_sizes(folder: Path, models: Sequence[_Model], sizes: Mapping[Path, int]) -> dict[str, tuple[int, int]]:
    """Return variant → bytes of its own files, and of the shared weights that it reads.

    Args:
        folder: Folder of the package.
        models: All models.
        sizes: Path of each written file → bytes.
    """
    own, read = Counter[str](), Counter[str]()
    for model in models:
        directory = (folder / package.variant_path(model.part, model.variant)).parent.absolute()
        own[model.variant] += sum(size for path, size in sizes.items() if path.parent == directory)
        read[model.variant] += sum({weight.digest: weight.stored.size_bytes for weight in model.placed}.values())
    return {model.variant: (own[model.variant], read[model.variant]) for model in models}


def _read_model(part: str, variant: str, path: Path) -> _Model:
    """Read a model with the digests of its larger weights."""
    graph = read_referring(path)
    weights = []
    for tensor in external_tensors(graph):
        stored = locate_values(path, tensor)
        if stored.size_bytes >= _SMALLEST_SHARED_BYTES:
            weights.append(_Weight(tensor, stored, _digest(stored.read())))
    return _Model(part, variant, path, graph, tuple(weights))


def _share_weights(models: Sequence[_Model]) -> dict[str, _DataFile]:
    """Move the weights of several variants to a shared data file; likewise those of a model beyond the size limit.

    Returns:
        Name → data file; tensors of the models refer to them.
    """
    users: dict[str, set[str]] = {}
    for model in models:
        for weight in model.weights:
            users.setdefault(weight.digest, set()).add(model.variant)
    files: dict[str, _DataFile] = {}
    for model in models:
        own_bytes = model.graph.ByteSize()
        own_bytes += sum(weight.stored.size_bytes for weight in model.weights if len(users[weight.digest]) == 1)
        for weight in model.weights:
            name = package.SHARED_DATA_NAME
            if len(users[weight.digest]) == 1:
                name = f"{model.part}-{model.variant}.data" if own_bytes > INLINE_LIMIT_BYTES else ""
            if name:
                offset = files.setdefault(name, _DataFile()).place(weight)
                refer_to_data(weight.tensor, name, offset, weight.stored.size_bytes)
                model.placed.append(weight)
    return files


def _digest(pieces: Iterable[bytes]) -> str:
    """Return the SHA-256 of a content in pieces."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove files of an earlier package, and the folders that become empty."""
    for name in names:
        path = folder / name
        with contextlib.suppress(OSError):
            remove_file(path)
        for parent in path.relative_to(folder).parents:
            with contextlib.suppress(OSError):  # not empty, or removed already
                (folder / parent).rmdir()
