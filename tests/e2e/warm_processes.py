"""Commands of tests in separate processes that need not import torch first.

A warm process imports the libraries and every module of ours once, and runs nothing; every command is a fork of it,
with its own directory, environment and streams, and its own exit code. Tests that depend on a fresh interpreter do not
use it: tests/architecture starts one for each verb, and shows that modules can be imported in any order.

The module is also the server program: requests are lines of JSON on stdin, answers are exit codes on stdout.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

LIBRARIES = (
    "click",
    "numpy",
    "onnx",
    "onnx_ir.passes.common",
    "onnxruntime",
    "onnxscript.function_libs.torch_lib.ops.core",
    "onnxscript.optimizer",
    "onnxscript.rewriter",
    "pydantic",
    "rich.console",
    "safetensors.torch",
    "torch._export.passes._node_metadata_hook",
    "torch.ao.quantization.fx._decomposed",
    "torch.export._trace",
    "torch.onnx._internal.exporter._torchlib.ops",
    "torch.onnx._internal.torchscript_exporter.utils",
    "transformers.exporters.onnxruntime_fusions",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.bert.modeling_bert",
)
"""Libraries that commands import: the large libraries of both exporters, and small ones."""
READY = "ready"


def can_run_warm() -> bool:
    """Return True if this system has forks."""
    return hasattr(os, "fork")


def run_warm(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    stdin: str,
    timeout_s: float,
    program: str | None = None,
) -> tuple[int, str, str]:
    """Run ``winml``, or a program that does, in a fork of the warm process. Its streams are files.

    Returns:
        Exit code, negative for a signal as ``subprocess`` has it; stdout; stderr.

    Raises:
        TimeoutError: it took longer than ``timeout_s``; it is ended.
    """
    server = _server()
    with tempfile.TemporaryDirectory() as place:
        streams = [Path(place, name) for name in ("stdin", "stdout", "stderr")]
        streams[0].write_text(stdin, encoding="utf-8")
        request = {
            "arguments": list(arguments),
            "program": program,
            "folder": str(folder),
            "environment": dict(environment),
            "streams": [str(path) for path in streams],
            "timeout_s": timeout_s,
        }
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        if code == -signal.SIGALRM:
            raise TimeoutError(f"winml {' '.join(arguments)}: not done after {timeout_s} s")
        out, err = (path.read_bytes().decode("utf-8") for path in streams[1:])
    return code, out, err


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the warm process; it ends together with this test process."""
    kept = {name: value for name, value in os.environ.items() if name not in ("HF_HOME", "HF_HUB_CACHE")}
    home = tempfile.TemporaryDirectory()
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**kept, "HOME": home.name, "HF_HUB_OFFLINE": "1"},
    )
    assert server.stdout is not None
    assert server.stdout.readline().strip() == READY

    def end() -> None:
        server.communicate()
        home.cleanup()

    atexit.register(end)
    return server


def _is_there(name: str) -> bool:
    """Return True if a module exists; versions of a library differ."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _serve() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*filter(_is_there, LIBRARIES), *_names_of_ours()):
            importlib.import_module(name)
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from resting_threads import rest_where_cores_are_shared
    from torch_operators import build_operator_table

    del sys.path[0]
    rest_where_cores_are_shared()
    build_operator_table()
    gc.collect()
    gc.freeze()
    print(READY, flush=True)
    for line in sys.stdin:
        process = os.fork()
        if not process:
            _become(json.loads(line))
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _names_of_ours() -> Iterator[str]:
    import winml.modelkit

    for module in pkgutil.walk_packages(winml.modelkit.__path__, f"{winml.modelkit.__name__}."):
        if not module.name.endswith(".dynamo_preload"):  # imports transformers, which commands on ONNX files do without
            yield module.name


def _become(request: dict[str, Any]) -> NoReturn:
    """Run the requested command, to the end of this process."""
    os.chdir(str(request["folder"]))
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    flags = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_CREAT)
    for number, (path, flag) in enumerate(zip(request["streams"], flags, strict=True)):
        opened = os.open(path, flag, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    signal.alarm(int(request["timeout_s"]))
    sys.argv = ["winml", *request["arguments"]]
    sys.path[0] = str(request["folder"])
    code: object = None
    try:
        if request["program"] is not None:
            exec(request["program"], {"__name__": "__main__"})
        else:
            from winml.modelkit.__main__ import main

            main()
    except SystemExit as end:
        code = end.code
    _leave(code)


def _leave(code: object) -> NoReturn:
    """End this process in the interpreter's order, without freeing every module of the libraries.

    That takes ten times as long as most commands. Tests with separate processes end in the ordinary way.
    """
    if code is not None and not isinstance(code, int):
        raise SystemExit(code)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    _serve()
