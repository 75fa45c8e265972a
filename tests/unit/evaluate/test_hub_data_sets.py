"""Data sets of the Hub, from a small server on this machine, with unchanged libraries."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import datasets
import huggingface_hub.constants
import pytest

from winml.modelkit.errors import HubError
from winml.modelkit.samples.data_sets import DataSetRequest, open_data_set

COMMIT = "b" * 40


def _hash(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


class _SmallHub(BaseHTTPRequestHandler):
    """Serves the folder of one data set, ``owner/words``."""

    folder: Path

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path).strip("/")
        if "owner/words" not in path:
            self._send(404, headers={"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in path:
            place = self.folder / path.partition("/tree/")[2].partition("/")[2]
            if place.is_dir():
                self._send(200, json.dumps([self._entry(file) for file in sorted(place.iterdir())]).encode())
            else:
                self._send(404, headers={"X-Error-Code": "EntryNotFound"})
        elif path.startswith("api/"):
            self._send(200, json.dumps({"id": "owner/words", "sha": COMMIT, "siblings": []}).encode())
        else:
            file = self.folder / path.partition("/resolve/")[2].partition("/")[2]
            if file.is_file():
                self._send(200, file.read_bytes(), {"X-Repo-Commit": COMMIT, "ETag": f'"{_hash(file)}"'})
            else:
                self._send(404, headers={"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET  # noqa: N815 -- named by http.server

    def _entry(self, file: Path) -> dict[str, object]:
        name = file.relative_to(self.folder).as_posix()
        return {"type": "file", "path": name, "size": file.stat().st_size, "oid": _hash(file)}

    def _send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Hub with one data set of two splits, and empty caches."""
    (tmp_path / "words").mkdir()
    for split, text in (("train", "first"), ("test", "second")):
        (tmp_path / "words" / f"{split}.csv").write_text(f"text\n{text}\n")
    handler = type("Handler", (_SmallHub,), {"folder": tmp_path / "words"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    constants, config = huggingface_hub.constants, datasets.config
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(config, "HF_ENDPOINT", address)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("HF_UPDATE_DOWNLOAD_COUNTS", "USE_PARQUET_EXPORT"):  # other servers
        monkeypatch.setattr(config, name, False)
    for owner in (constants, config):
        monkeypatch.setattr(owner, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    yield address
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("endpoint")
def test_data_set_of_the_hub_is_fetched_once_and_read_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits are chosen as for files; offline, the downloaded data set is read."""
    with open_data_set(DataSetRequest("owner/words")) as data_set:
        assert [{"text": "second"}] == list(data_set.rows())
        assert ("owner/words", "test") == (data_set.name, data_set.split)
    with pytest.raises(HubError, match="on the Hub"):
        open_data_set(DataSetRequest("owner/other"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with open_data_set(DataSetRequest("owner/words", split="train")) as data_set:
        assert [{"text": "first"}] == list(data_set.rows())
    with pytest.raises(HubError, match="offline mode"):
        open_data_set(DataSetRequest("owner/unseen"))
