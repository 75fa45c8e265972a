"""Files that a killed command leaves behind, at every moment of different folder contents.

Run as a program: ``python killing.py FOLDER VERB...`` prints one JSON object per moment. A command runs once, in a fork
of this process, where an audit hook copies the folder at each moment: the copies have the files of a kill, with times
and links, and no process holds their locks. The hook sees the operations of Python: open for writing, rename, link,
remove, mkdir, rmdir. It sees neither single writes into an open file nor writes of native code; both happen in hidden
folders only.

A moment is before an operation. The folder is copied if a visible file differs from all earlier copies, or if the set
of hidden files is new: the next command tidies up by their names. Commands that write by the same function are
represented by one command for changes of hidden files; likewise the stages of a build, which differ by the names of
their files only. Operations that change neither, such as a commit seen before, can reveal nothing new.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resting_threads import rest_where_cores_are_shared

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
MOVING = {"os.rename", "os.link", "os.symlink"}
CHANGING = {"os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod"}
HIDDEN = re.compile(r"(^|/)\.")
RANDOM = re.compile(r"(?<=[-.])[a-z0-9_]{8}(?=/|$)")
"""Random name ending made by ``tempfile``."""
STAGE = re.compile(r"(?<=/)\.?(export|optimized|model)(?=[._])")
"""Build stage in the name of a hidden file."""

MODULES = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.linear(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return self.second(self.first(x))

def old():
    torch.manual_seed(1)
    return Net()

def new():
    torch.manual_seed(2)
    return Net()

def example_inputs():
    return torch.linspace(-1, 1, 48).reshape(3, 16)
"""
"""Two models of one shape and different weights; each linear layer is a hierarchy module ``Block``."""


def run_winml(*arguments: str | Path) -> None:
    """Run a command in this process, as the shell would.

    Raises:
        RuntimeError: the command failed.
    """
    from winml.modelkit.cli.main import main

    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as leave:
            if leave.code:
                raise RuntimeError(f"winml {arguments[0]} ended with {leave.code}: {silence.getvalue()}") from None


@dataclass(frozen=True)
class Verb:
    """A command that writes into a folder, from either of two sources."""

    name: str
    command: Callable[[Path, Path, str], Sequence[str | Path]]
    """(folder of the sources, output folder, ``old`` or ``new``) → arguments."""
    is_like_optimize: bool = False
    """True if the command writes by the function of ``optimize``: then only changes of visible files are moments."""

    def run(self, place: Path, folder: Path, which: str) -> None:
        """Run the command."""
        run_winml(*self.command(place, folder, which))


VERBS = {
    verb.name: verb
    for verb in (
        Verb("export", lambda place, folder, which: (
            "export", "-m", f"{place / 'nets.py'}:{which}", "-o", folder / "model.onnx", "--overwrite", "--with-report",
            "--no-verify", "--no-dynamo", "-q",
        )),
        Verb("optimize", lambda place, folder, which: (
            "optimize", "-m", place / which / "in.onnx", "-o", folder / "model.onnx", "--level", "basic",
            "--external-data", "--overwrite", "--no-verify", "-q",
        )),
        Verb("extract", lambda place, folder, which: (
            "extract", "-m", place / which / "in.onnx", "--module", "Block", "-o", folder, "--with-inputs",
            "--overwrite", "-q",
        )),
        Verb("retag", lambda place, folder, which: (
            "retag", place / which / "in.onnx", place / which / "bare.onnx", "-o", folder / "model.onnx",
            "--overwrite", "-q",
        )),
        Verb("quantize", lambda place, folder, which: (
            "quantize", "-m", place / which / "in.onnx", "-o", folder / "model.onnx", "--external-data", "--overwrite",
            "--no-verify", "-q",
        ), is_like_optimize=True),
        Verb("compile", lambda place, folder, which: (
            "compile", "-m", place / which / "in.onnx", "-o", folder / "model.onnx", "--ep", "cpu",
            "--overwrite", "--no-verify", "-q",
        ), is_like_optimize=True),
        Verb("pin", lambda place, folder, which: (
            "export", "-m", place / which / "open.onnx", "-o", folder / "model.onnx", "--shape-config",
            '{"rows": 3}', "--overwrite", "--no-verify", "-q",
        ), is_like_optimize=True),
        Verb("unlinked", lambda place, folder, which: (
            "optimize", "-m", place / which / "in.onnx", "-o", folder / "model.onnx", "--level", "basic",
            "--overwrite", "--no-verify", "-q",
        )),
        Verb("build", lambda place, folder, which: (
            "build", "-m", f"{place / 'nets.py'}:{which}", "-o", folder, "--level", "basic", "--no-verify", "--rebuild",
            "--no-dynamo", "-q",
        )),
    )
}  # fmt: skip


def keep_weights_outside() -> None:
    """Store the weights of every model in a separate file, as for large models."""
    from winml.modelkit.onnx.files.writing import write_model
    from winml.modelkit.optimize import file_optimization as optimize
    from winml.modelkit.transform import graph_file

    assert write_model.__kwdefaults__ is not None
    write_model.__kwdefaults__["inline_limit_bytes"] = 0
    # The command reads the first, a build the second.
    for module in (optimize, graph_file):
        module.EXTERNAL_BYTES = 0


def make_sources(place: Path) -> None:
    """Write the models that the commands start from."""
    import onnx

    (place / "nets.py").write_text(MODULES)
    for which in ("old", "new"):
        (place / which).mkdir()
        source = place / which / "in.onnx"
        axes = ("--dynamic-axes", '{"x": {"0": "rows"}}')
        run_winml("export", "-m", f"{place / 'nets.py'}:{which}", "-o", source, "--no-dynamo", "-q")
        run_winml("export", "-m", f"{place / 'nets.py'}:{which}", "-o", place / which / "open.onnx", *axes, "-q")
        bare = onnx.load(source, load_external_data=False)
        for node in bare.graph.node:
            node.ClearField("metadata_props")
        (place / which / "bare.onnx").write_bytes(bare.SerializeToString())


@contextlib.contextmanager
def links_refused() -> Iterator[None]:
    """Refuse hard links in this process, as on FAT and many shares."""
    link = os.link

    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError("Operation not permitted")

    os.link = refuse
    try:
        yield
    finally:
        os.link = link


_LINK = os.link
"""The original function, for copies while links are refused to the command."""


def copy_folders(folders: Sequence[Path], targets: Sequence[Path]) -> None:
    """Copy the content of folders with file times; hard links stay hard links, also between two folders."""
    copied: dict[int, Path] = {}
    for folder, target in zip(folders, targets, strict=True):
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.rglob("*")):
            copy = target / path.relative_to(folder)
            if path.is_symlink():
                copy.symlink_to(path.readlink())
            elif path.is_dir():
                copy.mkdir()
            elif (first := copied.get(path.stat().st_ino)) is not None:
                _LINK(first, copy)
            else:
                copied[path.stat().st_ino] = copy
                shutil.copy2(path, copy)


class CopyAtMoments:
    """An audit hook that copies folders at every moment. It cannot be removed."""

    def __init__(self, folders: Sequence[Path], copies: Path, *, hidden_too: bool = True) -> None:
        self._copies = copies
        self._hidden_too = hidden_too
        self._folders = tuple(str(folder) for folder in folders)
        self._seen: set[frozenset[Any]] = set()
        self._count = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if any(path.startswith(self._folders) for path in self._changed_paths(event, arguments)):
            looks = {*map(frozenset, self._looks()[: 1 + self._hidden_too])}
            if not looks <= self._seen:
                self._seen |= looks
                self._count += 1
                folders = [Path(folder) for folder in self._folders]
                copy_folders(folders, [self._copies / str(self._count) / str(n) for n in range(len(folders))])

    def _looks(self) -> tuple[set[object], set[object]]:
        """Return the state of the visible files and the names of the hidden ones."""
        seen: set[object] = {"seen"}
        hidden: set[object] = {"hidden"}
        for folder in self._folders:
            for path in Path(folder).rglob("*"):
                name = path.relative_to(folder).as_posix()
                if folder == self._folders[0] and not HIDDEN.search(name):
                    state = path.lstat()
                    seen.add((name, state.st_ino, state.st_mtime_ns, state.st_size))
                else:
                    hidden.add(STAGE.sub("", RANDOM.sub("", name)))
        return seen, hidden

    def _changed_paths(self, event: str, arguments: tuple[Any, ...]) -> Iterator[str]:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
            yield self._absolute(arguments[0])
        elif event in MOVING:
            yield self._absolute(arguments[0], arguments[2] if len(arguments) > 3 else -1)
            yield self._absolute(arguments[1], arguments[-1])
        elif event in CHANGING:
            folder = arguments[-1] if event != "os.truncate" else -1
            yield self._absolute(arguments[0], folder)

    @staticmethod
    def _absolute(path: Any, folder: Any = -1) -> str:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return ""
        path = os.fsdecode(path)
        if isinstance(folder, int) and folder >= 0:
            path = f"/proc/self/fd/{folder}/{path}"
        # Links in the folder's path are resolved; a link in the last position is itself changed.
        return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))  # noqa: PTH118, PTH119, PTH120


def run_in_fork(work: Callable[[], None], hook: CopyAtMoments) -> None:
    """Run a function in a fork of this process, which the hook watches.

    Raises:
        RuntimeError: the function failed.
    """
    child = os.fork()
    if child == 0:
        try:
            # Garbage collection would copy all memory shared by the two processes.
            gc.disable()
            sys.addaudithook(hook)
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    if status := os.waitpid(child, 0)[1]:
        raise RuntimeError(f"the command failed by itself: {status}")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones included."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Judge:
    """Compares a folder with its state before and after a command."""

    def __init__(self, before: Path, after: Path) -> None:
        self._files = {"old": contents(before), "new": contents(after)}
        self._answers = {which: self._answers_in(folder) for which, folder in (("old", before), ("new", after))}

    def models(self, folder: Path) -> str:
        """Classify the models found by a plain reader: ``old``, ``new``, both (each model for itself), or the fault."""
        found = set()
        for name, answer in self._answers_in(folder).items():
            which = [which for which, answers in self._answers.items() if answers.get(name) == answer]
            found.add("any" if len(which) == 2 else which[0] if which else f"{name}: {answer[:60]}")
        return "+".join(sorted(found - {"any"})) or "any"

    @staticmethod
    def _answers_in(folder: Path) -> dict[str, str]:
        import numpy as np
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        answers = {}
        for path in sorted(folder.glob("*.onnx")):
            try:
                session = ort.InferenceSession(str(path), options)
                name = session.get_inputs()[0].name
                values = session.run(None, {name: np.linspace(-1, 1, 48, dtype=np.float32).reshape(3, 16)})
                answers[path.name] = hashlib.sha256(values[0].tobytes()).hexdigest()
            except Exception as error:  # noqa: PERF203 - one of a few files
                answers[path.name] = str(error)
        return answers

    def whole_set(self, folder: Path) -> str:
        """Return ``old`` or ``new`` if all files are, else name the leftover, missing and mixed files."""
        found, old, new = contents(folder), self._files["old"], self._files["new"]
        if found == old:
            return "old"
        wrong = {*(found.keys() ^ new.keys())}
        for name in found.keys() & new.keys():
            # Times of day differ from run to run, in the texts only.
            if (found[name] == old.get(name) and found[name] != new[name]) or (
                found[name] != new[name] and not name.endswith((".json", ".md", ".npz"))
            ):
                wrong.add(name)
            if name.endswith("_htp_metadata.json"):
                model = name.replace("_htp_metadata.json", ".onnx")
                if json.loads(found[name])["model_sha256"] != hashlib.sha256(found[model]).hexdigest():
                    wrong.add(f"{name} of another model")
        return "new" if not wrong else f"mixed: {', '.join(sorted(wrong))}"


def run_next(verb: Verb, place: Path, folder: Path) -> None:
    """Run the next command after the kill: the same build again, or another command with an output in the folder."""
    if verb.name == "build":
        verb.run(place, folder, "new")
        return
    other = folder / "other.onnx"
    run_winml("optimize", "-m", place / "new" / "in.onnx", "-o", other, "--level", "basic", "--no-verify", "-q")
    for path in folder.glob(f"{other.name}*"):
        path.unlink()


def judge_verb(verb: Verb, place: Path) -> Iterator[dict[str, Any]]:
    """Run a command; yield the state after a kill at each moment and the next command; last, the normal end."""
    folder, before, after = place / "out", place / f"{verb.name}-before", place / f"{verb.name}-after"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    verb.run(place, folder, "old")
    shutil.copytree(folder, before)
    verb.run(place, folder, "new")
    shutil.copytree(folder, after)
    judge, temporary = Judge(before, after), Path(tempfile.gettempdir())
    folders, copies = (folder, temporary), place / f"{verb.name}-moments"
    shutil.rmtree(folder)
    shutil.copytree(before, folder)
    work = functools.partial(verb.run, place, folder, "new")
    run_in_fork(work, CopyAtMoments(folders, copies, hidden_too=not verb.is_like_optimize))
    moments = sorted(int(path.name) for path in copies.iterdir())
    end = len(moments) + 1
    copy_folders(folders, [copies / str(end) / str(n) for n in range(len(folders))])
    for number in (*moments, end):
        shutil.rmtree(folder)
        copy_folders([copies / str(number) / str(n) for n in range(len(folders))], folders)
        at_once = judge.models(folder)
        run_next(verb, place, folder)
        yield {
            "verb": verb.name,
            "number": number,
            "killed": number != end,
            "at_once": at_once,
            "set": judge.whole_set(folder),
            "left": [path.name for path in temporary.iterdir()],
        }


def main(place: Path, names: Sequence[str]) -> None:
    """Judge commands, and print the states."""
    rest_where_cores_are_shared()
    keep_weights_outside()
    make_sources(place)
    for name in names:
        with links_refused() if name == "unlinked" else contextlib.nullcontext():
            for found in judge_verb(VERBS[name], place):
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
