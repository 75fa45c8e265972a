"""Messages about damaged files, from every command that reads them.

Files are damaged byte by byte and field by field. The commands run in a process with bounds on memory and time: each
ends with an exit code of ours and never as an internal error, a crash or a hang.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from adapters import save_adapter
from checkpoints import build_model, save_checkpoint, save_image_processor
from damage import Damage, byte_damages, json_damages, onnx_damages
from evaluation_checkpoints import save_task_checkpoint, sentences, text_tokenizer
from fuzzed_commands import CommandProcess
from graphs import parse
from winml.modelkit.errors import WinMLError
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.exporting import export_pytorch
from winml.modelkit.models.checkpoints.processor_files import read_processor_files
from winml.modelkit.models.request import check_folder

EXAMPLES = int(os.environ.get("WINML_DAMAGED_FILES", "80"))
"""Number of damages for each kind of file; a weekly run tries more (``canary.yml``)."""
_QUICK = ("--iterations", "1", "--warmup", "0")
bounded = settings(
    max_examples=EXAMPLES, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

BRANCHES = """g (float[N,8] x, bool c) => (float[N,8] y) <float[8,8] w1 = {0}, int64[2] shape = {-1, 8}> {
  h = MatMul(x, w1)
  k = Constant <value = float[8] {1, 2, 3, 4, 5, 6, 7, 8}> ()
  s = Add(h, k)
  r = If (c) <then_branch = t () => (float[N,8] a) { a = Relu(s) },
              else_branch = e () => (float[N,8] b) { k2 = Constant <value_float = 2.0> () b = Mul(s, k2) }>
  f = local.twice(r)
  y = Reshape(f, shape)
}"""
FUNCTION = '<domain: "local", opset_import: ["" : 17]> twice (x) => (y) { y = Add(x, x) }'


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Inner(), _Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).softmax(-1)


@pytest.fixture(scope="module")
def commands() -> Iterator[CommandProcess]:
    """The process that runs the commands; a new one starts after a crash."""
    process = CommandProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """An export, the same model with an external data file, and a graph with branches, a function and constants."""
    folder = tmp_path_factory.mktemp("models")
    export_pytorch(
        _Outer(), folder / "exported.onnx", {"x": torch.randn(2, 8)},
        config=WinMLExportConfig(dynamic_axes={"x": {0: "N"}}),
    )  # fmt: skip
    data = "external.onnx.data"
    ir.save(ir.load(folder / "exported.onnx"), folder / "external.onnx", external_data=data, size_threshold_bytes=0)
    ir.save(parse(BRANCHES, functions=FUNCTION, domains=', "local" : 1'), folder / "branches.onnx")
    return tuple(folder / f"{name}.onnx" for name in ("exported", "external", "branches"))


def _reads(model: Path, original: Path) -> Mapping[str, tuple[str, ...]]:
    """Return verb → arguments, for every command that reads an ONNX file."""
    folder, written = model.parent, str(model.parent / "out.onnx")
    return {
        "inspect": ("inspect", str(model), "-H", "-v"),
        "retag": ("retag", str(original), str(model), "-o", written, "--overwrite"),
        "retag of it": ("retag", str(model), str(original), "-o", written, "--overwrite"),
        "optimize": ("optimize", "-m", str(model), "-o", written, "--overwrite"),
        "export": ("export", "-m", str(model), "-o", written, "--overwrite", "--shape-config", '{"N": 1}'),
        "extract": ("extract", str(model), "--module", "**", "-o", str(folder / "parts"), "--overwrite"),
        "perf": ("perf", str(model), *_QUICK),
        "perf by module": ("perf", str(model), *_QUICK, "--by-module"),
        "build": ("build", "-m", str(model), "-o", str(folder / "build"), "--rebuild"),
    }


VERBS = tuple(_reads(Path(), Path()))


@given(damage=onnx_damages, which=st.integers(0, 2), verb=st.sampled_from(VERBS[1:]))
@bounded
def test_damaged_model_ends_every_verb_with_a_message(
    commands: CommandProcess, models: Sequence[Path], damage: Damage, which: int, verb: str
) -> None:
    """Inspect and another command end with a known exit code and no traceback, for a readable or unreadable file."""
    model = models[0].parent / "damaged.onnx"
    model.write_bytes(damage(models[which].read_bytes()))
    reads = _reads(model, models[0])
    for arguments in (reads["inspect"], reads[verb]):
        ending = commands.run(*arguments)
        assert ending.is_foreseen, (arguments, ending)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, models: Sequence[Path], commands: CommandProcess) -> Path:
    """A checkpoint, a sharded checkpoint, and a build folder with its config beside it."""
    root = tmp_path_factory.mktemp("folders")
    model = build_model("bert")
    model.save_pretrained(root / "checkpoint")
    model.save_pretrained(root / "sharded", max_shard_size="40KB")
    tokenizer = {"tokenizer_class": "BertTokenizer", "model_max_length": 64, "model_input_names": ["input_ids"]}
    (root / "checkpoint" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    image = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 32, "width": 32},
        "crop_size": {"height": 32},
    }
    (root / "checkpoint" / "preprocessor_config.json").write_text(json.dumps(image))
    assert commands.run("build", "-m", str(models[0]), "-o", str(root / "build")).code == 0
    assert commands.run("config", "-m", str(root / "checkpoint"), "-o", str(root / "config.json")).code == 0
    return root


def _whole(damage: Damage, content: bytes) -> bytes:
    return damage(content)


def _header(damage: Damage, content: bytes) -> bytes:
    """Damage the header of a safetensors file and adjust its length field."""
    length = int.from_bytes(content[:8], "little")
    header = damage(content[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def _restored(path: Path, content: bytes) -> contextlib.AbstractContextManager[None]:
    """Replace the content of a file for the block."""

    @contextlib.contextmanager
    def replaced() -> Iterator[None]:
        kept = path.read_bytes()
        path.write_bytes(content)
        try:
            yield
        finally:
            path.write_bytes(kept)

    return replaced()


@pytest.mark.parametrize(
    ("file", "wrap"),
    [
        ("checkpoint/model.safetensors", _header),
        ("sharded/model.safetensors.index.json", _whole),
        ("checkpoint/tokenizer_config.json", _whole),
        ("checkpoint/preprocessor_config.json", _whole),
    ],
)
@given(damage=json_damages)
@bounded
def test_damaged_checkpoint_file_is_refused_or_read(
    folders: Path, file: str, wrap: Callable[[Damage, bytes], bytes], damage: Damage
) -> None:
    """Headers, indexes and processor files are read by us before any library, so each error is one of ours."""
    path = folders / file
    with _restored(path, wrap(damage, path.read_bytes())), contextlib.suppress(WinMLError):
        check_folder(path.parent, needs_weights=True)
        read_processor_files(path.parent)


@pytest.mark.parametrize("kind", ["config", "manifest", "build config"])
@given(data=st.data(), damage=json_damages)
@bounded
def test_damaged_json_ends_every_verb_with_a_message(
    commands: CommandProcess, folders: Path, models: Sequence[Path], kind: str, data: st.DataObject, damage: Damage
) -> None:
    """A fault in a config or a manifest gives an error message or has no effect."""
    checkpoint, build, other = (str(folders / name) for name in ("checkpoint", "build", "other"))
    path, reads = {
        "config": (
            folders / "checkpoint" / "config.json",
            [("inspect", "-m", checkpoint), ("config", "-m", checkpoint)],
        ),
        "manifest": (folders / "build" / "build_manifest.json", [("build", "-m", str(models[0]), "-o", build)]),
        "build config": (
            folders / "config.json",
            [("config", "--check", str(folders / "config.json")),
             ("build", "-m", str(models[0]), "-c", str(folders / "config.json"), "-o", other)],
        ),
    }[kind]  # fmt: skip
    arguments = data.draw(st.sampled_from(reads))
    with _restored(path, damage(path.read_bytes())):
        ending = commands.run(*arguments)
    assert ending.is_foreseen, (arguments, ending)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@given(damage=json_damages)
@settings(bounded, max_examples=15)
def test_damaged_checkpoint_ends_its_export_with_a_message(
    commands: CommandProcess, folders: Path, file: str, damage: Damage
) -> None:
    """Files that pass the first checks reach torch and transformers, and the export still ends without a traceback."""
    path = folders / "checkpoint" / file
    wrap = _header if path.suffix == ".safetensors" else _whole
    arguments = ("export", "-m", str(path.parent), "-o", str(folders / "out.onnx"), "--overwrite", "--no-verify")
    with _restored(path, wrap(damage, path.read_bytes())):
        ending = commands.run(*arguments)
    assert ending.is_foreseen, (arguments, ending)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory, commands: CommandProcess) -> Path:
    """An adapter with its base model, and builds of a text and an image classifier with their companion files."""
    from PIL import Image

    root = tmp_path_factory.mktemp("foreign")
    save_checkpoint("bert", root / "base")
    save_adapter(root / "adapter", build_model("bert"), ("query", "value"), seed=1)
    save_task_checkpoint(root / "text", "bert", "BertForSequenceClassification", text_tokenizer(), labels=["a", "b"])
    save_checkpoint("vit", root / "image")
    save_image_processor(root / "image", 32)
    Image.new("RGB", (40, 50)).save(root / "photo.png")
    for name in ("text", "image"):
        output = str(root / f"built-{name}")
        assert commands.run("build", "-m", str(root / name), "-o", output, "--no-verify").code == 0
    return root


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
@given(damage=json_damages)
@settings(bounded, max_examples=EXAMPLES // 2)
def test_damaged_adapter_is_reported_in_words(
    commands: CommandProcess, foreign: Path, file: str, damage: Damage
) -> None:
    """The damages include numbers of any size, types that torch lacks, and names that are expressions."""
    path = foreign / "adapter" / file
    wrap = _header if path.suffix == ".safetensors" else _whole
    with _restored(path, wrap(damage, path.read_bytes())):
        ending = commands.run("inspect", "-m", str(foreign / "base"), "--adapter", str(path.parent))
    assert ending.is_foreseen, ending


@pytest.mark.parametrize(
    "file",
    ["built-text/config.json", "built-text/tokenizer_config.json", "built-text/tokenizer.json",
     "built-image/config.json", "built-image/preprocessor_config.json"],
)  # fmt: skip
@given(damage=json_damages)
@settings(bounded, max_examples=EXAMPLES // 4)
def test_damaged_file_beside_a_model_is_reported_in_words(
    commands: CommandProcess, foreign: Path, file: str, damage: Damage
) -> None:
    """Config, tokenizer and processor are read by transformers, which raises errors of many types."""
    path = foreign / file
    passed = ("--text", sentences(1)[0]) if "text" in path.parent.name else ("--image", str(foreign / "photo.png"))
    with _restored(path, damage(path.read_bytes())):
        ending = commands.run("run", str(path.parent / "model.onnx"), *passed)
    assert ending.is_foreseen, ending


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A GGUF file, and the offset of its values."""
    gguf = pytest.importorskip("gguf")
    import coded_checkpoints

    path = coded_checkpoints.save_gguf_of(tmp_path_factory.mktemp("gguf"), "llama")
    return path, int(gguf.GGUFReader(path).data_offset)


@given(damage=byte_damages)
@bounded
def test_damaged_gguf_header_is_reported_in_words(
    commands: CommandProcess, gguf_file: tuple[Path, int], damage: Damage
) -> None:
    """Counts, lengths, offsets and names may have any value; the message names no temporary folder."""
    path, start = gguf_file
    content = path.read_bytes()
    with _restored(path, damage(content[:start]) + content[start:]):
        ending = commands.run("inspect", "-m", str(path))
    assert ending.is_foreseen, ending
    assert "winml-temporary" not in ending.stderr
