"""Foreign data sets: no network access, no path out of the folder, no program and bounded memory."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from PIL import Image

from winml.modelkit.errors import InputError, UsageError, WinMLError
from winml.modelkit.samples.columns import match_columns
from winml.modelkit.samples.data_sets import DataSetRequest, open_data_set
from winml.modelkit.samples.media import Recording, Unreadable, open_image, open_recording

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n%%EOF\n"


def _card(folder: Path, facts: str) -> None:
    (folder / "README.md").write_text(f"---\n{facts}\n---\n# Words\n", encoding="utf-8")


def _texts(folder: Path, **asked: Any) -> list[str]:
    with open_data_set(DataSetRequest(str(folder), **asked)) as data_set:
        return [row["text"] for row in data_set.rows()]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A folder with a table, an inner folder and a table outside."""
    folder = tmp_path / "words"
    (folder / "more").mkdir(parents=True)
    (folder / "a.csv").write_text("text\ninside\n")
    (folder / "more" / "b.csv").write_text("text\ndeeper\n")
    (tmp_path / "secret.csv").write_text("text\nsecret\n")
    return folder


@pytest.fixture
def address() -> Iterator[tuple[str, list[str]]]:
    """A server that has every requested file, and the list of its requests."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"text\nfrom afar\n")

        do_HEAD = do_GET  # noqa: N815 -- named by http.server

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_card_names_files_of_its_folder_only(words: Path, address: tuple[str, list[str]]) -> None:
    """An address, an absolute name, a way up and a chain of file systems are refused, and nothing is asked."""
    place, asked = address
    secret = words.parent / "secret.csv"
    for name in (f"{place}/x.csv", str(secret), "../secret.csv", "../**", f"file://{secret}", f"simplecache::{place}/x",
                 "more/../../secret.csv", "C:x.csv", "", 7):  # fmt: skip
        for data_files in (
            name,
            [name],
            [{"split": "test", "path": name}],
            [{"split": "test", "path": ["a.csv", name]}],
        ):
            _card(words, f"configs: {json.dumps([{'config_name': 'default', 'data_files': data_files}])}")
            with pytest.raises(InputError) as caught:
                _texts(words)
            assert "README.md" in caught.value.message
    assert [] == asked


def test_card_assigns_files_to_splits(words: Path) -> None:
    """Files are named by path or pattern and per configuration; separator and label names are read too."""
    (words / "more" / "c.csv").write_text("text;label\nlast;1\n")
    _card(
        words,
        """configs:
- config_name: one
  default: true
  data_files:
  - split: test
    path: "**/b.*"
  - split: train
    path: ["a.csv"]
- config_name: two
  data_dir: more
  data_files: c*
  sep: ";"
  converters: x
dataset_info:
- config_name: two
  features:
  - {name: text, dtype: string}
  - name: label
    dtype: {class_label: {names: {'0': bad, '1': good}}}
language: [en
""",
    )
    assert ["deeper"] == _texts(words)
    assert ["inside"] == _texts(words, split="train")
    with open_data_set(DataSetRequest(str(words), config="two")) as data_set:
        assert [{"text": "last", "label": 1}] == list(data_set.rows())
        assert ["bad", "good"] == data_set.features["label"].names
        assert ("README.md sets 'converters' for the files, which is ignored",) == data_set.notes
    with pytest.raises(UsageError) as caught:
        _texts(words, config="three")
    assert "one, two" in caught.value.hint


@pytest.mark.parametrize(
    "facts",
    [
        "configs: [",
        "configs:\n- config_name: !!python/object/apply:os.system [id]",
        "configs: !!int x",
        f"configs: {'[' * 5000}",
        "configs:\n- &a {config_name: a}\n- *a",
        "configs: 3",
        "configs:\n- data_files: a.csv",
        "configs:\n- {config_name: a, data_files: [{split: ../x, path: a.csv}]}",
        "configs:\n- {config_name: a, data_files: gone.csv}",
        "configs:\n- {config_name: a}\n- {config_name: b}",
        f"configs: {'x' * 300_000}",
        "dataset_info: {features: 3}",
        "dataset_info: {features: [{name: text, dtype: no such type}]}",
        "dataset_info: {features: [{name: text, list: {list: {list: 3}}}]}",
    ],
)
def test_damaged_card_is_refused_in_words(words: Path, facts: str) -> None:
    """The message is about the folder, without an internal error."""
    _card(words, facts)
    with pytest.raises(WinMLError) as caught:
        _texts(words)
    assert isinstance(caught.value, (InputError, UsageError))
    assert str(words) in caught.value.message


def test_other_descriptions_are_not_obeyed(words: Path) -> None:
    """Deep JSON, a script of the name of the folder and facts for the Hub's viewer do not matter."""
    (words / "dataset_infos.json").write_text("[" * 100_000)
    (words / "words.py").write_text("raise SystemExit('run')")
    (words / ".huggingface.yaml").write_text("configs: [{config_name: a, data_files: ../secret.csv}]")
    assert ["inside", "deeper"] == _texts(words)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such names")
def test_special_characters_in_names_are_no_patterns(tmp_path: Path) -> None:
    folder = tmp_path / "a[1]*"
    folder.mkdir()
    for name in ("x[2].csv", "y?.csv"):
        (folder / name).write_text(f"text\n{name[0]}\n")
    assert ["x", "y"] == _texts(folder)
    assert ["x"] == _texts(folder / "x[2].csv")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither pipes in folders nor links for everybody")
def test_links_out_of_the_folder_and_pipes_are_not_read(words: Path, tmp_path: Path) -> None:
    """Tables are refused; a link within the folder, and into the blobs of a snapshot, is read."""
    (words / "link.csv").symlink_to("a.csv")
    assert ["inside", "inside", "deeper"] == _texts(words)
    for make in (lambda path: path.symlink_to(tmp_path / "secret.csv"), os.mkfifo):
        make(words / "z.csv")
        with pytest.raises(InputError, match=r"z\.csv"):
            _texts(words)
        (words / "z.csv").unlink()
    snapshot = tmp_path / "repository" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    shutil.copytree(words, tmp_path / "repository" / "blobs")
    (snapshot / "a.csv").symlink_to("../../blobs/a.csv")
    assert ["inside"] == _texts(snapshot)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file written whenever the program ``gs`` starts."""
    trace = tmp_path / "started"
    (tmp_path / "programs").mkdir()
    path = tmp_path / "programs" / "gs"
    path.write_text(f"#!/bin/sh\necho >> {trace}\ncat > /dev/null\nexit 1\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    return trace


def _png(shade: int = 0) -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.full((6, 8, 3), shade, np.uint8)).save(content, "png")
    return content.getvalue()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes in folders")
def test_image_of_another_format_starts_no_program(tmp_path: Path, program: Path) -> None:
    """EPS images in a folder, in bytes and in nested lists are unreadable; pipes and outward links are skipped."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, content in {"a.png": _png(1), "b.png": EPS, "c.png": _png(3)}.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "d.png")
    (folder / "e.png").symlink_to("/etc/passwd")
    with open_data_set(DataSetRequest(str(folder))) as data_set:
        rows = list(data_set.rows())
        assert [1, 3] == [row["image"].getpixel((0, 0))[0] for row in rows]
        assert ["b.png"] == [item.name for item in data_set.unreadable.values()]
        assert [True, True] == ["d.png" in note or "e.png" in note for note in data_set.notes]
    cells = [{"bytes": EPS, "path": None}, {"bytes": _png(), "path": None}]
    features = datasets.Features({"image": datasets.Image(), "more": datasets.List(datasets.Image())})
    table = datasets.Dataset.from_dict({"image": cells, "more": [cells, cells]}, features=features)
    table.to_parquet(tmp_path / "a.parquet")
    with open_data_set(DataSetRequest(str(tmp_path / "a.parquet"))) as data_set:
        (row,) = data_set.rows()
        assert (8, 6) == row["image"].size
        assert EPS == row["more"][0]["bytes"]
    assert not program.exists()
    (tmp_path / "user.eps").write_bytes(EPS)
    assert isinstance(open_image(str(tmp_path / "user.eps"), None, "x"), Unreadable)
    assert not program.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes in folders")
def test_cells_name_regular_files_of_the_folder_only(tmp_path: Path) -> None:
    """Cells with a pipe, a device, an outward link or any other file of this machine are not opened."""
    folder = tmp_path / "data"
    (folder / "p").mkdir(parents=True)
    (folder / "p" / "x.png").write_bytes(_png())
    (tmp_path / "other.png").write_bytes(_png())
    soundfile.write(folder / "p" / "x.wav", np.zeros(8), 8000)
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(tmp_path / "other.png")
    foreign = ["pipe", "link", str(tmp_path / "other.png"), "../other.png", "/etc/passwd", "/dev/zero",
               "http://127.0.0.1:9/x.png", "p", ""]  # fmt: skip
    for role, name in (("image", "p/x.png"), ("audio", "./p/x.wav")):
        rows = "".join(f'"{item}",0\n' for item in (name, *foreign))
        (folder / "list.csv").write_text(f"path,label\n{rows}")
        with open_data_set(DataSetRequest(str(folder / "list.csv"), columns={role: "path"})) as data_set:
            assert 1 == len(list(data_set.rows(match_columns(data_set, (role,)))))
            assert list(range(1, len(foreign) + 1)) == sorted(data_set.unreadable)
    assert isinstance(open_recording(str(folder / "pipe"), None, "x"), Unreadable)


def _flac(frames: int) -> bytes:
    """Return a recording of eight samples with another number in its header."""
    content = io.BytesIO()
    soundfile.write(content, np.zeros(8), 8000, format="FLAC")
    flac = bytearray(content.getvalue())
    assert b"fLaC" == flac[:4]
    packed = int.from_bytes(flac[18:26], "big")  # 20 bits of rate, 3 of channels, 5 of bits, 36 of samples
    flac[18:26] = (packed >> 36 << 36 | frames).to_bytes(8, "big")
    return bytes(flac)


def test_recordings_with_false_headers_are_left_out(tmp_path: Path) -> None:
    """Other recordings are read."""
    wav = io.BytesIO()
    soundfile.write(wav, np.zeros(8), 8000, format="WAV")
    lying = bytearray(wav.getvalue())
    lying[4:8] = lying[40:44] = struct.pack("<I", 0xFFFFFFF0)
    folder = tmp_path / "sounds"
    folder.mkdir()
    for name, content in {"a.wav": wav.getvalue(), "b.flac": _flac(2**36 - 1), "c.wav": bytes(lying)}.items():
        (folder / name).write_bytes(content)
    with open_data_set(DataSetRequest(str(folder))) as data_set:
        rows = list(data_set.rows())
        assert all(isinstance(row["audio"], Recording) and 8 == len(row["audio"].samples) for row in rows)
        assert 1 in data_set.unreadable
        assert 1 <= len(rows) <= 2


def test_parquet_file_that_declares_too_much_is_refused(tmp_path: Path) -> None:
    """Size is checked in the footer and again while reading."""
    rows = 2**18
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["x" * 1000]))
    pq.write_table(pa.table({"text": texts}), tmp_path / "repeated.parquet", store_schema=False)
    nothing = pa.table({"n": pa.nulls(2**22, pa.int64())})
    with pq.ParquetWriter(tmp_path / "declared.parquet", nothing.schema) as file:
        for _ in range(5):
            file.write_table(nothing)
    for name, words in (("declared", "declares 167.8 MB of values"), ("repeated", "contains more than 134.2 MB")):
        with pytest.raises(InputError, match=words) as caught:
            open_data_set(DataSetRequest(str(tmp_path / f"{name}.parquet")))
        assert f"{name}.parquet" in caught.value.message


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("state.json", {"_data_files": [{"filename": "../../secret.arrow"}]}),
        ("state.json", {"_data_files": [{"filename": "http://127.0.0.1:9/x.arrow"}]}),
        ("state.json", {"_data_files": 3}),
        ("state.json", []),
        ("dataset_info.json", []),
        ("../dataset_dict.json", {"splits": ["../../other"]}),
        ("../dataset_dict.json", {"splits": ["a::http://127.0.0.1:9/x"]}),
        ("../dataset_dict.json", {"splits": 3}),
        ("state.json", None),
        ("dataset_info.json", {"features": {"text": {"_type": "NoSuchType"}}}),
    ],
)
def test_saved_data_set_names_files_of_its_folder_only(tmp_path: Path, file: str, content: Any) -> None:
    """Changed metadata of save_to_disk are refused; `None` stands for deeply nested JSON."""
    table = datasets.Dataset.from_dict({"text": ["secret"]})
    datasets.DatasetDict(train=table).save_to_disk(str(tmp_path / "saved"))
    shutil.copy(next((tmp_path / "saved" / "train").glob("*.arrow")), tmp_path / "secret.arrow")
    path = tmp_path / "saved" / "train" / file
    changed = {**json.loads(path.read_text()), **content} if isinstance(content, dict) else content
    path.write_text("[" * 100_000 if content is None else json.dumps(changed))
    with pytest.raises(InputError) as caught:
        open_data_set(DataSetRequest(str(tmp_path / "saved")))
    assert str(tmp_path / "saved") in caught.value.message
