"""Import cost of commands that need no model.

Each case runs in a fresh process and looks at the imported modules. Times are not asserted: these machines are shared,
and the libraries named here are the cost (torch alone is over two seconds).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx.numpy_helper
import onnx.parser
import pytest

from winml.modelkit.cli.main import COMMANDS

HEAVY = {
    "torch",
    "transformers",
    "onnx",
    "onnxruntime",
    "onnx_ir",
    "onnxscript",
    "numpy",
    "safetensors",
    "huggingface_hub",
}

_RUN_COMMAND = """
import sys
from winml.modelkit.cli.main import main
sys.argv = ["winml", *sys.argv[1:]]
try:
    main()
    code = 0
except SystemExit as stop:
    code = stop.code
"""
_REPORT = """
import json
print(json.dumps({"code": code or 0, "modules": sorted({name.partition(".")[0] for name in sys.modules})}))
"""
VERBS = sorted(COMMANDS)
"""Verbs; a new verb joins these tests by its entry in the table of commands."""


def _run(program: str, *arguments: str, folder: Path) -> tuple[int, set[str], str]:
    """Return the exit code, the top-level modules in memory at the end, and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", program + _REPORT, *arguments],
        capture_output=True, text=True, encoding="utf-8", cwd=folder, check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    return report["code"], set(report["modules"]), done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with files and folders that cause usage errors."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.onnx").write_bytes(b"earlier file")
    (tmp_path / "broken.json").write_text('{"sequence_length": 128,\n', encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", ["", ".errors", ".options", ".records", ".onnx.specs", ".export.config", ".cli.main"])
def test_light_module_imports_no_heavy_library(name: str, folder: Path) -> None:
    """The modules that every command imports first import no model library."""
    _, loaded, _ = _run(f"import sys, winml.modelkit{name}\ncode = 0", folder=folder)
    assert set() == loaded & HEAVY


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_imports_no_heavy_library(arguments: list[str], folder: Path) -> None:
    code, loaded, _ = _run(_RUN_COMMAND, *arguments, folder=folder)
    assert 0 == code
    assert set() == loaded & HEAVY


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["build"],
        ["build", "-m", "empty", "-o", "new"],
        ["build", "-m", "owner/name"],
        ["build", "-m", "there.onnx", "-o", "new", "--task", "fill-mask"],
        ["build", "-m", "missing.onnx", "-o", "new"],
        ["build", "-m", "owner/name", "-o", "there.onnx"],
        ["build", "-m", "owner/name", "-o", "new", "-c", '{"optim": {"gelu_fusio": true}}'],
        ["config"],
        ["config", "-m", "./missing/folder"],
        ["config", "-m", "owner/name", "-o", "there.onnx"],
        ["config", "--check", "broken.json"],
        ["config", "-m", "owner/name", "--precision", "int3"],
        ["export"],
        ["export", "--nonsense"],
        ["export", "-m", "empty"],
        ["export", "-m", "./missing/folder", "-o", "model.onnx"],
        ["export", "-m", "empty", "-o", "there.onnx"],
        ["export", "-m", "empty", "-o", "model.onnx", "--batch-size", "none"],
        ["export", "-m", "empty", "-o", "model.onnx", "--shape-config", "broken.json"],
        ["export", "-m", "empty", "-o", "model.onnx", "--shape-config", '{"sequence_lenght": 8}'],
        ["export", "-m", "empty", "-o", "model.onnx", "--export-config", '{"opset": 17}'],
        ["export", "-m", "empty", "-o", "model.onnx", "--input-specs", "missing.json"],
        ["extract", "there.onnx", "-o", "out"],
        ["extract", "there.onnx", "--module", "Block", "-o", "out", "--task", "fill-mask"],
        ["extract", "-m", "./missing/folder", "--module", "Block", "-o", "out"],
        ["inspect"],
        ["inspect", "empty", "--model-type", "bert"],
        ["inspect", "there.onnx", "--task", "fill-mask"],
        ["inspect", "-m", "./missing/folder", "--hierarchy"],
        ["inspect", "-m", "empty", "--shape-config", "broken.json"],
        ["optimize"],
        ["optimize", "-m", "there.onnx", "-o", "there.onnx"],
        ["optimize", "-m", "missing.onnx", "-o", "model.onnx"],
        ["optimize", "-m", "there.onnx", "-o", "model.onnx", "--enable-glu-fusion"],
        ["optimize", "-m", "there.onnx", "-o", "model.onnx", "--ep", "qmn"],
        ["perf"],
        ["perf", "missing.onnx"],
        ["perf", "there.onnx", "--iterations", "0"],
        ["perf", "there.onnx", "--ep", "nonsense"],
        ["perf", "there.onnx", "--task", "fill-mask"],
        ["perf", "there.onnx", "--shape-config", "broken.json"],
    ],
    ids=" ".join,
)
def test_usage_error_imports_no_heavy_library(arguments: list[str], folder: Path) -> None:
    """A wrong request is refused with exit code 2 and a sentence, before anything heavy is loaded or written."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, loaded, words = _run(_RUN_COMMAND, *arguments, folder=folder)
    assert 2 == code
    assert set() == loaded & HEAVY
    assert "Traceback" not in words
    assert words.strip()
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_measuring_a_file_imports_no_model_library(folder: Path) -> None:
    """``winml perf`` on an ONNX file, and ``winml sys``, import no library that reads checkpoints, torch included."""
    graph = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Neg(x) }'
    )
    (folder / "net.onnx").write_bytes(graph.SerializeToString())
    for arguments in (["perf", "net.onnx", "--iterations", "2"], ["sys"]):
        code, loaded, _ = _run(_RUN_COMMAND, *arguments, folder=folder)
        assert 0 == code
        assert {"onnxruntime"} <= loaded
        assert set() == loaded & {"torch", "transformers", "onnxscript", "onnx_ir", "huggingface_hub"}


_REPORT_ALL = """
import json, sys
print(json.dumps({"code": code or 0, "modules": sorted(sys.modules)}), file=sys.stderr)
"""
_NEEDLESS = {"pandas", "datasets", "sklearn", "torchmetrics", "matplotlib", "ray"}
"""Libraries that these commands do not need to read a model."""


_WORK = {
    "builds": "builds.build",
    "compile": "compile.pipeline",
    "evaluate": "evaluate.evaluation",
    "generate": "generate.answering",
    "normalize": "normalize.pipeline",
    "optimize": "optimize.pipeline",
    "profile": "profile.latency",
    "quantize": "quantize.pipeline",
    "sweep": "sweep.sweep",
    "verification": "compare.verification.written_file",
}
"""Subject → module that is imported when its work is done; options and records of a subject are cheap."""
_CHECKPOINTS = {"torch", "transformers", "scipy", "safetensors", "huggingface_hub"}
"""Libraries that only a PyTorch model needs."""


@pytest.mark.parametrize(
    ("arguments", "unused", "most"),
    [
        pytest.param(
            ["export", "-m", "bert", "-o", "out.onnx", "--random-weights", "--no-verify"],
            {"builds", "compile", "evaluate", "generate", "profile", "optimize", "quantize", "sweep", "scipy"},
            225,
            id="export",
        ),
        pytest.param(
            ["inspect", "bert"], {"builds", "evaluate", "generate", "normalize", "optimize", "quantize"}, 147,
            id="inspect",
        ),
        pytest.param(
            ["inspect", "net.onnx"], {"builds", "evaluate", "optimize", "quantize", *_CHECKPOINTS, "onnx_ir"}, 92,
            id="inspect-file",
        ),
        pytest.param(
            ["quantize", "-m", "net.onnx", "-o", "out.onnx"], {"builds", "compile", "generate", *_CHECKPOINTS}, 199,
            id="quantize",
        ),
        pytest.param(
            ["compare", "net.onnx", "net.onnx"], {"generate", "normalize", "optimize", *_CHECKPOINTS}, 170,
            id="compare",
        ),
        pytest.param(
            ["diff", "net.onnx", "net.onnx"], {"builds", "normalize", "quantize", *_CHECKPOINTS, "onnxruntime"}, 109,
            id="diff",
        ),
        pytest.param(
            ["perf", "net.onnx", "--iterations", "2"], {"builds", "evaluate", "quantize", *_CHECKPOINTS, "onnx_ir"},
            102, id="perf",
        ),
    ],
)  # fmt: skip
def test_verb_imports_stay_within_the_budget(arguments: list[str], unused: set[str], most: int, folder: Path) -> None:
    """Unused work and libraries are not imported, and the number of modules stays within the measured one + 6 %."""
    (folder / "bert").mkdir()
    config = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 8, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 16}
    (folder / "bert" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = onnx.numpy_helper.from_array(np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32), "w")
    graph = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17]> g (float[1, 64] x) => (float[1, 64] y) { y = MatMul(x, w) }'
    )
    graph.graph.initializer.append(weights)
    (folder / "net.onnx").write_bytes(graph.SerializeToString())
    done = subprocess.run(
        [sys.executable, "-c", _RUN_COMMAND + _REPORT_ALL, *arguments],
        capture_output=True, text=True, encoding="utf-8", cwd=folder, check=False,
    )  # fmt: skip
    report = json.loads(done.stderr.splitlines()[-1])
    assert 0 == report["code"], done.stderr
    own = [name.removeprefix("winml.modelkit.") for name in report["modules"] if name.startswith("winml.modelkit.")]
    assert set() == {_WORK[name] for name in unused & _WORK.keys()} & {*own}
    libraries = {name.partition(".")[0] for name in report["modules"]}
    assert set() == (unused - _WORK.keys() | _NEEDLESS) & libraries
    assert most >= len(own), f"{len(own)} modules: import by need what this verb does not use"


@pytest.mark.parametrize(
    ("arguments", "unused", "most"),
    [
        pytest.param(
            ["generate", "built", "-p", "a b", "--max-new-tokens", "2"],
            {"builds", "normalize", "optimize", "quantize", "verification", "onnx", "onnx_ir"}, 110,
            id="generate",
        ),
        pytest.param(
            ["inspect", "built"], {"builds", "evaluate", "generate", "optimize", "quantize", "onnx_ir"}, 92,
            id="inspect-folder",
        ),
    ],
)  # fmt: skip
def test_built_folder_is_used_without_pytorch(arguments: list[str], unused: set[str], most: int, folder: Path) -> None:
    """The first token needs numpy, ONNX Runtime and the tokenizer only.

    The number of modules stays within its limit.
    """
    import tokenizers

    (folder / "built").mkdir()
    graph = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 17]> g (int64[rows, tokens] input_ids) => (float[rows, tokens, 4] logits)'
        "{ depth = Constant <value = int64 {4}> () values = Constant <value = float[2] {0.0, 1.0}> ()"
        " logits = OneHot (input_ids, depth, values) }"
    )
    (folder / "built" / "model.onnx").write_bytes(graph.SerializeToString())
    (folder / "built" / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    words = tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]  # its base
    tokenizer.save(str(folder / "built" / "tokenizer.json"))
    done = subprocess.run(
        [sys.executable, "-c", _RUN_COMMAND + _REPORT_ALL, *arguments],
        capture_output=True, text=True, encoding="utf-8", cwd=folder, check=False,
    )  # fmt: skip
    report = json.loads(done.stderr.splitlines()[-1])
    assert 0 == report["code"], done.stderr
    own = {name.removeprefix("winml.modelkit.") for name in report["modules"] if name.startswith("winml.modelkit.")}
    assert set() == {_WORK[name] for name in unused & _WORK.keys()} & own
    libraries = {name.partition(".")[0] for name in report["modules"]}
    assert set() == (unused - _WORK.keys() | _CHECKPOINTS | _NEEDLESS) & libraries
    assert most >= len(own), f"{len(own)} modules: import by need what this verb does not use"
