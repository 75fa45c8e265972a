"""Download of a model by its Hub id, from the cache alone whenever the cache is enough.

A small server on this machine replaces the Hub; code of this project and of huggingface_hub is not replaced.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import huggingface_hub.constants
import numpy as np
import onnx_ir as ir
import pytest

from checkpoints import save_checkpoint
from e2e.in_process import run_here
from winml.modelkit.builds.found_models import onnx_file
from winml.modelkit.errors import HubError, ModelPathError
from winml.modelkit.file_names import files_folder
from winml.modelkit.models.checkpoints.companion_files import LARGEST_COMPANION, companion_files
from winml.modelkit.models.checkpoints.hub import snapshot_folder
from winml.modelkit.models.model import load_model
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.models.resolution import resolve_model

COMMIT = "a" * 40
REFUSALS = {
    "owner/gated": (403, "GatedRepo"),
    "owner/private": (401, "RepoNotFound"),
    "owner/broken": (500, ""),
}


class SmallHub:
    """A server of repositories on disk that responds as the Hub does."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.repositories = repositories
        self.asked: list[str] = []
        """Files that were fetched, in order."""
        self.requests = 0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET  # noqa: N815 -- named by http.server

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.requests += 1
        path = unquote(urlparse(request.path).path).strip("/")
        if path.startswith("api/models/"):
            self._listing(request, path.removeprefix("api/models/"))
        else:
            self._file(request, path)

    def _listing(self, request: BaseHTTPRequestHandler, path: str) -> None:
        name, _, rest = path.partition("/revision/") if "/revision/" in path else path.partition("/tree/")
        if name in REFUSALS:
            return self._send(request, *REFUSALS[name])
        if name not in self.repositories:
            return self._send(request, 404, "RepoNotFound")
        if rest.partition("/")[0] not in ("", "main", "v1", COMMIT):
            return self._send(request, 404, "RevisionNotFound")
        files = sorted(file for file in self.repositories[name].rglob("*") if file.is_file())
        names = [file.relative_to(self.repositories[name]).as_posix() for file in files]
        if "/tree/" in path:
            entries = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": _hash(file)}
                for name, file in zip(names, files, strict=True)
            ]
            return self._send(request, 200, "", json.dumps(entries).encode())
        siblings = [{"rfilename": name, "size": file.stat().st_size} for name, file in zip(names, files, strict=True)]
        content = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
        return self._send(request, 200, "", json.dumps(content).encode())

    def _file(self, request: BaseHTTPRequestHandler, path: str) -> None:
        name, _, rest = path.partition("/resolve/")
        file = self.repositories[name] / rest.partition("/")[2]
        if not file.is_file():
            return self._send(request, 404, "EntryNotFound")
        if request.command == "GET":
            self.asked.append(file.name)
        return self._send(request, 200, "", file.read_bytes(), {"X-Repo-Commit": COMMIT, "ETag": f'"{_hash(file)}"'})

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        code: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
    ) -> None:
        request.send_response(status)
        for key, value in {**(headers or {}), **({"X-Error-Code": code} if code else {})}.items():
            request.send_header(key, value)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)


def _hash(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    """A Hub with one model in many formats, and an empty cache."""
    folder = save_checkpoint("bert", tmp_path / "hub" / "tiny")
    for name in ("pytorch_model.bin", "tf_model.h5", "modeling_own.py"):
        (folder / name).write_bytes(b"large")
    (folder / "README.md").write_text("---\npipeline_tag: fill-mask\n---\n", encoding="utf-8")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    small_hub = SmallHub({"owner/bert-tiny": folder})
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", small_hub.endpoint)
    template = f"{small_hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    yield small_hub
    small_hub.stop()


def _snapshot(name: str = "owner/bert-tiny", revision: str | None = None, **others: bool) -> Path:
    return snapshot_folder(name, revision, **{"needs_weights": True, "needs_code": False, **others})


def test_hub_id_is_fetched_once_then_read_from_the_cache(hub: SmallHub) -> None:
    """The second load sends no requests, not even for a newer version."""
    request = ModelRequest("owner/bert-tiny")
    told: list[str] = []
    first = load_model(request, told.append)
    assert any("owner/bert-tiny" in line for line in told)
    assert ("owner/bert-tiny", "hub") == (first.info.name_or_path, first.info.source_kind)
    before = hub.requests
    again = load_model(request)
    assert before == hub.requests
    assert first.only_part.inputs == again.only_part.inputs


def test_hub_fetches_small_files_and_one_format_of_weights(hub: SmallHub) -> None:
    """Other formats, other folders and code are not downloaded."""
    _snapshot()
    assert ["README.md", "config.json", "model.safetensors", "tokenizer_config.json"] == sorted(hub.asked)


def test_hub_fetches_the_pickle_as_a_last_resort(hub: SmallHub) -> None:
    """Old repositories hold only a pickle."""
    (hub.repositories["owner/bert-tiny"] / "model.safetensors").unlink()
    _snapshot()
    assert "pytorch_model.bin" in hub.asked


def test_hub_random_weights_fetch_no_weights(hub: SmallHub) -> None:
    """A config is enough, and completed later when weights are needed."""
    _snapshot(needs_weights=False)
    assert "model.safetensors" not in hub.asked
    _snapshot()
    assert "model.safetensors" in hub.asked


def test_hub_id_is_resolved_without_its_weights(hub: SmallHub) -> None:
    """Resolution from the small files finds the same inputs and class as loading."""
    resolved = resolve_model(ModelRequest("owner/bert-tiny"))
    assert ["README.md", "config.json", "tokenizer_config.json"] == sorted(hub.asked)
    loaded = load_model(ModelRequest("owner/bert-tiny"))
    assert loaded.only_part.inputs == resolved.parts[0].inputs
    assert type(loaded.model) is type(resolved.model)


def test_hub_code_is_fetched_only_when_allowed(hub: SmallHub) -> None:
    """The code is not even downloaded without permission."""
    _snapshot()
    assert "modeling_own.py" not in hub.asked
    folder = _snapshot(needs_code=True)
    assert (folder / "modeling_own.py").is_file()


def test_hub_revision_is_requested_and_remembered(hub: SmallHub) -> None:
    """A tag, and the commit behind it, are each found in the cache afterwards."""
    folder = _snapshot(revision="v1")
    before = hub.requests
    assert folder == _snapshot(revision="v1") == _snapshot(revision=COMMIT)
    assert before == hub.requests


def test_hub_interrupted_download_is_completed(hub: SmallHub) -> None:
    """A snapshot without its weights is not considered complete."""
    folder = _snapshot()
    (folder / "model.safetensors").unlink()
    shutil.rmtree(folder.parent.parent / "blobs")
    (folder / "config.json").unlink()
    assert (_snapshot() / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        ("owner/missing", None, "owner/missing:"),
        ("owner/private", None, "owner/private:"),
        ("owner/gated", None, "owner/gated: is gated"),
        ("owner/broken", None, "be reached"),
        ("owner/bert-tiny", "v9", "'v9'"),
    ],
)
def test_hub_refusal_is_one_sentence(hub: SmallHub, name: str, revision: str | None, words: str) -> None:
    """Each message names its subject, and the hint says how to proceed."""
    with pytest.raises(HubError) as caught:
        _snapshot(name, revision)
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert 1 == caught.value.exit_code


def test_hub_unreachable_is_one_sentence(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed port is reported like a missing network."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="the Hub"):
        _snapshot()


def test_hub_offline_uses_the_cache_without_requests(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached models load offline; others are refused."""
    _snapshot()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    before = hub.requests
    assert _snapshot().is_dir()
    assert _snapshot(needs_code=True).is_dir()
    with pytest.raises(HubError, match=r"owner/other.*v1:"):
        _snapshot("owner/other", "v1")
    assert before == hub.requests


def test_modules_of_sentence_transformers_are_fetched(hub: SmallHub) -> None:
    """Small files and the weights of layers; no other folder, no weights of a whole transformer, no large file."""
    folder = hub.repositories["owner/bert-tiny"]
    (folder / "modules.json").write_text('[{"path": "1_Pooling"}, {"path": "2_Dense"}]', encoding="utf-8")
    wanted = {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    for name in (*wanted, "3_Dense/.env.json", "3_Dense/model.onnx", "openvino/config.json", "1_Pooling/deep/a.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")
    for name in ("corpus.txt", "3_Dense/model.safetensors", "3_Dense/corpus.txt"):
        with (folder / name).open("wb") as file:
            file.truncate(LARGEST_COMPANION + 1)  # takes no room
    fetched = _snapshot()
    names = {path.relative_to(fetched).as_posix() for path in fetched.rglob("*") if path.is_file()}
    assert wanted == {name for name in names if "/" in name}
    assert "corpus.txt" not in names
    assert wanted <= set(companion_files(fetched)) | {"2_Dense/model.safetensors"}


def _add_onnx_file(hub: SmallHub, name: str = "onnx/model.onnx") -> Path:
    """Add an ONNX file with weights in a data file of another name."""
    folder = hub.repositories["owner/bert-tiny"]
    weights = np.arange(600, dtype=np.float32).reshape(20, 30)
    node = ir.node(
        "MatMul",
        [
            ir.Value(name="x", shape=ir.Shape([1, 20]), type=ir.TensorType(ir.DataType.FLOAT)),
            ir.Value(name="w", const_value=ir.tensor(weights, name="w")),
        ],
    )
    node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = "y", ir.DataType.FLOAT, ir.Shape([1, 30])
    graph = ir.Graph(
        [node.inputs[0]], node.outputs, nodes=[node], initializers=[node.inputs[1]], opset_imports={"": 18}
    )
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    ir.save(ir.Model(graph, ir_version=10), path, external_data="weights.bin", size_threshold_bytes=0)
    return path


def test_onnx_file_is_fetched_with_its_data_and_the_tokenizer(hub: SmallHub, tmp_path: Path) -> None:
    """The ONNX file names its data file; a second use sends no requests."""
    original = _add_onnx_file(hub)
    file = onnx_file("owner/bert-tiny/onnx/model.onnx")
    assert file is not None
    assert file.read_bytes() == original.read_bytes()
    assert ["README.md", "config.json", "model.onnx", "tokenizer_config.json", "weights.bin"] == sorted(hub.asked)
    assert (files_folder(file) / "tokenizer_config.json").is_file()
    before = hub.requests
    assert file == onnx_file("owner/bert-tiny@main/onnx/model.onnx")
    assert before == hub.requests
    (snapshot,) = (tmp_path / "cache" / "models--owner--bert-tiny" / "snapshots").iterdir()
    assert file == onnx_file(str(snapshot / "onnx" / "model.onnx"))
    (snapshot / "onnx" / "weights.bin").unlink()
    again = onnx_file("owner/bert-tiny/onnx/model.onnx")
    assert again is not None
    assert (again.parent / "weights.bin").read_bytes() == (original.parent / "weights.bin").read_bytes()


def test_onnx_file_of_the_hub_is_optimized_into_the_current_folder(hub: SmallHub, tmp_path: Path) -> None:
    """The cache is shared with other programs, so the output is not written into the cache."""
    _add_onnx_file(hub)
    outcome = run_here("optimize", "-m", "owner/bert-tiny/onnx/model.onnx", "--level", "basic")
    assert 0 == outcome.code, outcome.err
    assert (tmp_path / "model_opt.onnx").is_file()
    assert not list((tmp_path / "cache").rglob("model_opt*"))
    assert 0 == run_here("inspect", "owner/bert-tiny/onnx/model.onnx").code
    assert run_here("diff", "owner/bert-tiny/onnx/model.onnx", "model_opt.onnx").code in (0, 3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("owner/bert-tiny/onnx/other.onnx", "onnx/model.onnx"),
        ("owner/missing/model.onnx", "owner/missing"),
        ("owner/bert-tiny@v9/model.onnx", "'v9'"),
        ("owner/gated/model.onnx", "gated"),
    ],
)
def test_onnx_file_missing_on_the_hub_is_named(hub: SmallHub, name: str, words: str) -> None:
    """The refusal lists the ONNX files that exist."""
    _add_onnx_file(hub)
    with pytest.raises(HubError) as caught:
        onnx_file(name)
    assert words in f"{caught.value.message} {caught.value.hint}"


def test_name_below_a_folder_that_exists_is_a_path(hub: SmallHub, tmp_path: Path) -> None:
    """A misspelled local path sends no requests."""
    (tmp_path / "built").mkdir()
    for name in ("built/encoder/model.onnx", "./owner/name/model.onnx", "owner/model.onnx", str(tmp_path / "x.onnx")):
        with pytest.raises(ModelPathError):
            onnx_file(name)
    assert 0 == hub.requests
