"""Descriptions of the parts of a model in the metadata of files."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.file_names import built_part_name, part_path
from winml.modelkit.onnx.bundle import (
    ModelBundle,
    PartDescription,
    PartFeed,
    TextTokens,
    only_part,
    read_part_description,
)

TEXT = "<ir_version: 10, opset_import: ['' : 17]> g (float[1] x) => (float[1] y) { y = Relu(x) }".replace("'", '"')
DECODER = PartDescription("decoder", ("encoder", "decoder"), (PartFeed("present.0.key", "decoder", "past.0.key"),))


def write(path: Path, metadata: str | None) -> Path:
    """Write a model with the metadata of its part."""
    model = onnx.parser.parse_model(TEXT)
    if metadata is not None:
        model.metadata_props.add(key="winml.part", value=metadata)
    onnx.save(model, path)
    return path


def test_description_survives_a_round_trip(tmp_path: Path) -> None:
    """A part may feed itself, and may have no end of positions."""
    limited = dataclasses.replace(DECODER, positions=64)
    assert limited == read_part_description(write(tmp_path / "l.onnx", json.dumps(limited.as_record())))
    assert DECODER == read_part_description(write(tmp_path / "m.onnx", json.dumps(DECODER.as_record())))


def test_file_without_a_description_is_a_separate_model(tmp_path: Path) -> None:
    """Files of models with one part have no description."""
    assert read_part_description(write(tmp_path / "m.onnx", None)) is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"name": "a"}',
        '{"name": "a", "of": ["a"], "feeds": [{"output": "y"}]}',
        '{"name": "a", "of": ["a"], "feeds": [], "positions": 0}',
        '{"name": "a", "of": ["a"], "feeds": [], "text": {"first": true, "ends": []}}',
        '{"name": "a", "of": ["a"], "feeds": [], "text": [3]}',
    ],
)
def test_damaged_description_is_refused_with_the_file(text: str, tmp_path: Path) -> None:
    """The refusal names the file and the key."""
    with pytest.raises(InputError, match=r"m\.onnx: winml\.part is damaged"):
        read_part_description(write(tmp_path / "m.onnx", text))


def test_bundle_has_the_order_of_execution(tmp_path: Path) -> None:
    """The order of the files does not matter."""
    encoder = PartDescription("encoder", DECODER.part_names, text=TextTokens(3, (4, 5)))
    paths = [write(tmp_path / f"{part.name}.onnx", json.dumps(part.as_record())) for part in (DECODER, encoder)]
    bundle = ModelBundle.read(paths)
    assert [("encoder", paths[1]), ("decoder", paths[0])] == list(bundle.paths.items())
    assert {"encoder": (), "decoder": DECODER.feeds} == bundle.feeds
    assert [DECODER, encoder] == list(map(read_part_description, paths))
    with pytest.raises(InputError):
        ModelBundle.read(paths[:1])


def test_single_part_access_is_refused_for_several_parts() -> None:
    """The refusal names the parts."""

    @dataclass(frozen=True)
    class Part:
        name: str

    encoder, decoder = Part("encoder"), Part("decoder")
    assert encoder is only_part([encoder])
    for parts in ([encoder, decoder], []):
        with pytest.raises(UsageError):
            only_part(parts)


def test_file_names_contain_the_part_if_several_exist() -> None:
    """The file of a model with one part has the requested name."""
    path = Path("out/net.v1.onnx")
    assert (path, Path("out/net.v1_vision.onnx")) == tuple(
        part_path(path, "vision", of_several=several) for several in (False, True)
    )
    assert ("model.onnx", "vision.onnx") == tuple(
        built_part_name("vision", of_several=several) for several in (False, True)
    )
