"""Names from files and models: displayed in full and escaped, on terminals, pages and in documents."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

import markdown_it
import onnx
import pytest
import torch

from winml.modelkit import export_pytorch
from winml.modelkit.cli.main import main

HOSTILE = "a\x1b[31mred\x1b]0;title\x07|<img src=x onerror=alert(1)>`b`[bold]\u202egnp\u200b\n# next\x9b2J:smile:"
"""Escape sequences, a pipe, HTML, backticks, markup, direction marks, a line break, C1 controls, an emoji."""
SPELLED = (
    "a\\x1b[31mred\\x1b]0;title\\x07|<img src=x onerror=alert(1)>`b`[bold]\\u202egnp\\u200b\\n# next\\x9b2J:smile:"
)


def _module() -> torch.nn.Module:
    inner = type(HOSTILE, (torch.nn.Module,), {"forward": lambda self, values: self.linear(values).relu()})()
    inner.linear = torch.nn.Linear(4, 4)
    outer = type("Outer", (torch.nn.Module,), {"forward": lambda self, values: next(self.children())(values) + 1})()
    outer.add_module(HOSTILE, inner)
    return outer


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with hostile names of modules, classes, nodes, values and metadata."""
    path = tmp_path_factory.mktemp("hostile") / "model.onnx"
    export_pytorch(_module(), path, torch.ones(2, 4), with_report=True)
    model = onnx.load(path)
    model.producer_name = HOSTILE
    model.metadata_props.add(key=HOSTILE, value=HOSTILE)
    for node in model.graph.node:
        node.name = f"{node.name}{HOSTILE}"
        node.output[:] = [f"{name}{HOSTILE}" if name != "output" else name for name in node.output]
        node.input[:] = [
            f"{name}{HOSTILE}" if any(f"{name}{HOSTILE}" in other.output for other in model.graph.node) else name
            for name in node.input
        ]
    del model.graph.value_info[:]
    onnx.save(model, path)
    return path


def _obeyed(text: str) -> set[str]:
    """Return the control characters that a terminal or a page may obey."""
    kinds = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return {character for character in text if unicodedata.category(character) in kinds and character != "\n"}


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "MODEL", "-H", "-v"),
        ("inspect", "MODEL", "-H", "--module", "**"),
        ("inspect", "MODEL", "-H", "-v", "--format", "json"),
        ("extract", "MODEL", "--module", "**", "-o", "FOLDER/parts"),
        ("retag", "MODEL", "MODEL", "-o", "FOLDER/retagged.onnx"),
        ("optimize", "-m", "MODEL", "-o", "FOLDER/fast.onnx", "--level", "full", "-v"),
        ("perf", "MODEL", "--by-module", "--iterations", "2", "--report", "FOLDER/page.html", "--overwrite"),
        ("perf", "MODEL", "--by-module", "--iterations", "2", "--format", "json"),
        ("perf", "MODEL", "--module", "**", "--iterations", "2"),
        ("build", "-m", "MODEL", "-o", "FOLDER/built"),
        ("inspect", "MODEL", "--module", f"{HOSTILE}x"),
        ("export", "-m", HOSTILE, "-o", "FOLDER/x.onnx"),
        (HOSTILE,),
        ("inspect", f"--{HOSTILE}"),
    ],
    ids=lambda arguments: " ".join(arguments).replace(HOSTILE, "HOSTILE"),
)
def test_no_verb_writes_a_character_that_a_terminal_obeys(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    """Outputs and messages spell the name out, on its line."""
    places = [text.replace("MODEL", str(exported)).replace("FOLDER", str(tmp_path)) for text in arguments]
    code, out, err = _run(capsys, *places)
    assert set() == _obeyed(out + err)
    assert [] == [line for line in (out + err).splitlines() if line.startswith("# next")]
    if code == 0 and "json" in arguments:
        assert json.dumps(HOSTILE)[1:-1] in json.dumps(json.loads(out))
    elif code == 0 and arguments[0] in ("inspect", "perf"):
        assert SPELLED in out
    assert "internal error" not in err


def test_markdown_report_prints_names_unchanged(exported: Path) -> None:
    """The report has no HTML, no broken table and no reformatted text."""
    text = exported.with_name("model_htp_export_report.md").read_text(encoding="utf-8")
    assert set() == _obeyed(text)
    tokens = markdown_it.MarkdownIt("commonmark").enable("table").parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    assert [] == [token.content for token in (*tokens, *inline) if token.type.startswith("html")]
    assert {"text", "code_inline"} == {token.type for token in inline}
    assert any(SPELLED in token.content for token in inline if token.type == "code_inline")
    rows = [
        len(re.findall(r"<td", row)) for row in markdown_it.MarkdownIt().enable("table").render(text).split("</tr>")
    ]
    assert {0, 2, 3, 4} >= set(rows)


def test_page_prints_names_unchanged(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both the tables and the chart, which may have HTML in its labels, escape the names."""
    page = tmp_path / "page.html"
    assert 0 == _run(capsys, "perf", str(exported), "--by-module", "--iterations", "2", "--report", str(page))[0]
    text = page.read_text(encoding="utf-8")
    own, _, _ = text.partition("<script")
    assert set() == _obeyed(own.replace("\t", ""))
    assert "<img" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text


def test_sidecar_keeps_the_names(exported: Path) -> None:
    """The sidecar is for programs: its JSON has the exact name, and escapes every control character."""
    text = exported.with_name("model_htp_metadata.json").read_text(encoding="utf-8")
    assert set() == _obeyed(text)
    assert HOSTILE in {child["class_name"] for child in json.loads(text)["modules"]["children"]}
