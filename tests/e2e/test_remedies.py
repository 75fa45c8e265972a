"""Remedies in refusals: each command is refused, and the remedy of its message is applied.

The remedy is taken from the message itself. The existence of each verb and option in messages is tested in
``tests/architecture/test_remedies.py``.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import onnx
import onnx_ir as ir
import pytest

from checkpoints import one_layer
from e2e.in_process import run_here
from e2e.workplace import Outcome
from encoder_decoder import save_encoder_decoder
from generating import save_decoder
from graphs import parse
from vision_language import save_vision_language
from winml.modelkit.cli.main import VERBS


@dataclass(frozen=True)
class Remedy:
    """One remedy of one refusal."""

    asked: str
    """The command that is refused."""
    advice: str
    """Pattern of the message with the remedy as group: a command, an option to add, or one to leave out."""
    then: str = ""
    """Replacement ``OLD=NEW`` in the refused command, if the remedy makes a file."""


CACHED = ("t5", "llama", "whisper", "llava", "blip")
"""Checkpoints with a cache in the exported graphs, one for each kind of parts."""
FIXED_SIZES = r"(--shape-config '.*?')"

REMEDIES = (
    Remedy("export -m bert -o m.onnx --ep qnn --dynamic-batch --no-verify", "add (--allow-dynamic)"),
    Remedy("build -m bert -o new --ep qnn", "(--no-compile) skips"),
    Remedy("build -m bert -o new --ep-options a=b --compile", "(winml compile --list)"),
    Remedy("build -m file.onnx -o new --ep dml --compile", "(winml compile --list)"),
    Remedy("build -m file.onnx -o new --ep cpu --ep-options a=b", "Omit (--ep-options)"),
    Remedy("""build -m file.onnx -o new -c '{"compile": {"ep": "vitisai"}}'""", "(--no-compile) skips"),
    Remedy(
        """build -m file.onnx -o new --shape-config '{"batch": 1}'""",
        "first: (winml export .*?);",
        "file.onnx=fixed.onnx",
    ),
    Remedy("build -m file.onnx -o new --batch-size 2", "first: (winml export .*?);", "file.onnx=fixed.onnx"),
    Remedy("build -m bert", "or (--use-cache)"),
    Remedy("build -m bert -o new --layout genai", "Remove (--layout)"),
    Remedy("build -m bert -o new --submodel decoder", "Remove (--submodel)"),
    Remedy("optimize -m file.onnx -o o.onnx --ep qnn --enable-gelu-fusion", "(--opset 20)"),
    Remedy("compile -m file.onnx -o c.onnx --ep cpu --ep-options a=b", "Omit (--ep-options)"),
    Remedy("compile -m file.onnx -o there.onnx --ep cpu", "Use (--overwrite)"),
    Remedy("export -m file.onnx -o fixed-sizes.onnx", FIXED_SIZES),
    Remedy("perf file.onnx --iterations 2 --device npu --ep cpu", "Omit (--device)"),
    Remedy("perf file.onnx --iterations 2 --depth 2", "Add (--by-module)"),
    Remedy("perf file.onnx --iterations 2 --depth 2", "omit (--depth)"),
    Remedy("quantize -m file.onnx -o q.onnx -p int4 --mode qdq", "int4 with (--mode [a-z-]+)"),
    Remedy(
        "quantize -m file.onnx -o q.onnx -p int8 --mode weight-only --algorithm k_quant --symmetric",
        "Use (--algorithm rtn)",
    ),
    Remedy(
        "quantize -m file.onnx -o q.onnx -p int8 --mode weight-only --algorithm k_quant --symmetric",
        "omit (--symmetric)",
    ),
    Remedy("quantize -m file.onnx -o q.onnx -p int8 --mode weight-only --algorithm hqq", "Use (--algorithm k_quant)"),
    Remedy("quantize -m file.onnx -o q.onnx -p int8 --mode weight-only --algorithm hqq", "or (--precision int4)"),
    Remedy("export -m file.onnx -o m.onnx", FIXED_SIZES),
    Remedy("export -m bert/config.json -o m.onnx --no-verify", "Add (--random-weights)"),
    Remedy("export -m bert -o m.onnx --no-verify --revision main", "Remove (--revision)"),
    Remedy("export -m bert -o m.onnx --no-verify --logits last", "Remove (--logits)"),
    Remedy("export -m nets.py:noise -o m.onnx --no-verify --task fill-mask", "Remove (--task)"),
    Remedy("export -m nets.py:noise -o m.onnx --no-verify --random-weights", "Remove (--random-weights)"),
    Remedy("export -m nets.py:noise -o m.onnx --no-verify --dtype fp16", "Remove (--dtype)"),
    Remedy("inspect file.onnx --ep migraphx", "(winml sys)"),
)


@pytest.fixture(scope="module")
def models(small_bert: Path, small_file: Path, nets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models of all cases."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "bert").symlink_to(small_bert)
    for name in ("file.onnx", "there.onnx"):
        shutil.copyfile(small_file, folder / name)
    shutil.copyfile(nets, folder / "nets.py")
    ir.save(parse("m (float[A, B, C] x) => (float[A, B, C] y) { y = Relu (x) }"), folder / "plain.onnx")
    for name in CACHED:
        if name in ("t5", "whisper"):
            save_encoder_decoder(folder / name, name, **(one_layer(name) if name == "t5" else {}))
        elif name in ("llava", "blip"):
            save_vision_language(folder / name, name)
        else:
            save_decoder(folder / name, name, **one_layer(name))
    return folder


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda remedy: f"{remedy.asked} {remedy.advice}")
def test_remedy_of_the_message_helps(remedy: Remedy, models: Path, here: Path) -> None:
    """The command is refused without the remedy, and works with it."""
    for path in models.iterdir():
        (here / path.name).symlink_to(path) if path.is_dir() else shutil.copyfile(path, here / path.name)
    words = shlex.split(remedy.asked)
    refused = run_here(*words)
    assert refused.code in (1, 2), refused.err
    found = re.search(remedy.advice, refused.err)
    assert found is not None, refused.err
    helped = _followed(words, found, remedy.then)
    assert 0 == helped.code, f"{found[1]}: {helped.err}"


@pytest.mark.parametrize("name", CACHED)
def test_cache_sizes_are_fixed_for_a_provider_without_dynamic_sizes(name: str, models: Path, here: Path) -> None:
    """The sizes are fixed unrequested; a note has the option for others, which gives the same file."""
    asked = ("export", "-m", models / name, "--ep", "qnn", "--no-verify", "-o")
    exported = run_here(*asked, "m/m.onnx")
    assert 0 == exported.code, exported.err
    told = re.search(FIXED_SIZES, exported.out + exported.err)
    assert told is not None
    again = run_here(*asked, "n/m.onnx", *shlex.split(told[1]))
    assert 0 == again.code, again.err
    first, second = [
        {
            path.name: [
                [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in onnx.load(path).graph.input
            ]
            for path in (here / folder).glob("*.onnx")
        }
        for folder in ("m", "n")
    ]
    assert first == second
    # The part that places images among tokens runs on the CPU, with any number of images and tokens.
    first.pop("m_embedding.onnx", None)
    assert all(size > 0 for file in first.values() for shape in file for size in shape[1:])


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": [1, 16], "dynamic": True},
        {"shape": [1, 16], "dynamic_axes": {"0": "batch"}},
        {"shape": [None, 16]},
        {"shape": "dynamic"},
    ],
)
@pytest.mark.parametrize("option", ["--input-specs", "--export-config"])
def test_open_size_is_written_as_the_message_shows(
    wrong: dict[str, Any], option: str, small_bert: Path, here: Path
) -> None:
    """The spelling in the message is accepted, and makes the size dynamic."""

    def export(entry: dict[str, Any]) -> Outcome:
        entries = [{"name": "input_ids", "dtype": "int64", **entry}]
        text = json.dumps(entries if option == "--input-specs" else {"input_tensors": entries})
        return run_here("export", "-m", small_bert, "-o", "m.onnx", "--no-verify", option, text)

    refused = export(wrong)
    assert 2 == refused.code, refused.err
    shown = re.search(r"\"shape\": \[.*?\]", refused.err)
    assert shown is not None, refused.err
    exported = export(json.loads(f"{{{shown[0]}}}"))
    assert 0 == exported.code, exported.err
    axis = onnx.load(here / "m.onnx").graph.input[0].type.tensor_type.shape.dim[0]
    assert "batch" == axis.dim_param


def _followed(words: list[str], advice: re.Match[str], then: str) -> Outcome:
    """Return the outcome of the remedy in a message."""
    advised = shlex.split(advice[1])
    if advised[0] == "winml":
        told = run_here(*advised[1:])
        if not then:
            return told
        assert 0 == told.code, told.err
        old, new = then.split("=")
        kept = [new if word == old else word for word in words]
        for done in {"--shape-config", "--batch-size"}.intersection(advised, kept):
            kept = _remove_option(kept, done)
        return run_here(*kept)
    if advice[0].lower().startswith(("remove ", "omit ")):
        return run_here(*_remove_option(words, advised[0]))
    return run_here(*_remove_option(words, advised[0]), *advised)


def _remove_option(words: list[str], flag: str) -> list[str]:
    """Return a command without an option and its value, however it is spelled."""
    command: click.Command = VERBS[words[0]]
    options = [item for item in command.params if isinstance(item, click.Option)]
    option = next(item for item in options if flag in (*item.opts, *item.secondary_opts))
    left: list[str] = []
    rest = iter(words)
    for word in rest:
        if word not in (*option.opts, *option.secondary_opts):
            left.append(word)
        elif not option.is_flag:
            next(rest)
    return left
