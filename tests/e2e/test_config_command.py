"""``winml config``: a config for exports and builds, checks of a given config, and a clean stdout."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from e2e.workplace import Workplace

DATA = Path(__file__).parents[1] / "data"


def test_config_round_trip_is_valid(workplace: Workplace, bert_tiny: Path) -> None:
    """Stdout holds JSON alone, and ``--check`` accepts it."""
    written = workplace.winml("config", "-m", bert_tiny, "--no-quant", "--device", "npu")
    assert (0, ["note: the compile stage will be skipped: no execution provider is specified (compile.ep)"]) == (
        written.code,
        written.complaint,
    )
    record = json.loads(written.out)
    assert (None, {"device": "npu"}) == (record["quant"], record["compile"])
    assert ["input_ids", "attention_mask", "token_type_ids"] == [
        spec["name"] for spec in record["export"]["input_tensors"]
    ]

    checked = workplace.winml("config", "--check", "-", stdin=written.out)
    assert (0, "") == (checked.code, checked.err)
    assert ["stdin: valid, schema version 1", "sections: loader, export, optim, compile", "skipped: quant, eval"] == (
        checked.out.splitlines()
    )

    schema = json.loads(workplace.winml("config", "--schema").out)
    jsonschema.validate(record, schema)


def test_config_export_section_determines_the_export(workplace: Workplace, bert_tiny: Path) -> None:
    """An export with the written inputs makes a file with these inputs."""
    written = workplace.winml("config", "-m", bert_tiny, "--batch-size", "2", "-o", "config.json")
    assert (0, "") == (written.code, written.out)
    record = json.loads((workplace.folder / "config.json").read_text(encoding="utf-8"))
    (workplace.folder / "export.json").write_text(json.dumps(record["export"]), encoding="utf-8")
    arguments = (
        "-m",
        bert_tiny,
        "-o",
        "model.onnx",
        "--export-config",
        "export.json",
        "--no-verify",
        "--format",
        "json",
    )
    exported = workplace.export(*arguments)
    assert 0 == exported.code, exported.err
    assert record["export"]["input_tensors"] == json.loads(exported.out)["inputs"]
    assert {(2, 128)} == {tuple(spec["shape"]) for spec in record["export"]["input_tensors"]}


def test_config_check_of_an_older_version_lists_changes(workplace: Workplace) -> None:
    """A file of the first layout is valid; notes go to stderr."""
    checked = workplace.winml("config", "--check", DATA / "build_config_v0.json")
    assert 0 == checked.code
    assert "section optimize" in checked.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"optm": {}}', "'optim'"),
        ('{"quant": {"precision": "int3"}}', "quant.precision"),
        ('{"a": 1', "line 1"),
        ("", "line 1"),
        ("[" * 100_000, "too deep"),
    ],
)
def test_config_check_of_an_invalid_config_exits_2(workplace: Workplace, text: str, words: str) -> None:
    """One sentence names the error."""
    checked = workplace.winml("config", "--check", "-", stdin=text)
    assert (2, "") == (checked.code, checked.out)
    assert words in checked.err
    assert "Traceback" not in checked.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "no model"),
        (("-m", "missing/folder/"), "no such"),
        (("-m", "{model}", "--precision", "int3"), "precision"),
        (("-m", "{model}", "--precision", "int8", "--no-quant"), "--no-quant"),
        (("-m", "{model}", "--device", "npu", "--no-quant", "--no-compile"), "--device"),
        (("-m", "{model}", "-o", "there.json"), "exists already"),
    ],
)
def test_config_wrong_use_exits_2_and_writes_nothing(
    workplace: Workplace, bert_tiny: Path, options: tuple[str, ...], words: str
) -> None:
    """A request without a meaning is refused, and an existing file stays."""
    (workplace.folder / "there.json").write_text("mine", encoding="utf-8")
    before = workplace.files()
    refused = workplace.winml("config", *(option.format(model=bert_tiny) for option in options))
    assert (2, "") == (refused.code, refused.out)
    assert words in refused.err
    assert before == workplace.files()
