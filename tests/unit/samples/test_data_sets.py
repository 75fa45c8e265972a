"""Samples of data sets: file formats, splits, random choice, and messages about unusable requests."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import soundfile
from PIL import Image

from architecture.sources import REPOSITORY
from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.samples.columns import ROLE_COLUMNS, match_columns, parse_columns
from winml.modelkit.samples.data_sets import DataSet, DataSetRequest, open_data_set
from winml.modelkit.samples.data_sources import find_source
from winml.modelkit.samples.media import Recording, resampled
from winml.modelkit.version import install_command

TEXTS = ["the first", "the second", "a third", "and the last"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set in every supported format."""
    root = tmp_path_factory.mktemp("data")
    rows = [{"sentence": text, "label": number % 2} for number, text in enumerate(TEXTS)]
    (root / "a.csv").write_text("sentence,label\n" + "".join(f"{r['sentence']},{r['label']}\n" for r in rows))
    (root / "a.tsv").write_text("sentence\tlabel\n" + "".join(f"{r['sentence']}\t{r['label']}\n" for r in rows))
    (root / "a.json").write_text(json.dumps(rows))
    (root / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(root / "a.parquet")
    table.save_to_disk(str(root / "saved"))
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(str(root / "both"))
    (root / "a.arrow").write_bytes(next((root / "saved").glob("*.arrow")).read_bytes())
    (root / "a.txt").write_text("\n\n".join(TEXTS))
    (root / "tables").mkdir()
    for split in ("train", "validation"):
        (root / "tables" / f"{split}.csv").write_text("text\nonly one\n")
    (root / "tables" / "README.md").write_text("# What this is\n")
    _save_pictures(root / "pictures")
    for split in ("train", "test"):
        (root / "sounds" / split).mkdir(parents=True)
        soundfile.write(root / "sounds" / split / "x.wav", np.full((80, 2), 0.25), 8000)
        (root / "sounds" / split / "metadata.csv").write_text("file_name,transcription\nx.wav,hello\n")
    return root


def _save_pictures(folder: Path) -> None:
    for number, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for shade in (10, 200):
            Image.fromarray(np.full((6, 8, 3), shade + number, np.uint8)).save(folder / name / f"{shade}.png")


@pytest.fixture
def opened(data: Path) -> Iterator[Any]:
    """A function that opens data sets by name; all are closed afterwards."""
    sets: list[DataSet] = []

    def open_one(name: str, **asked: Any) -> DataSet:
        sets.append(open_data_set(DataSetRequest(str(data / name), **asked)))
        return sets[-1]

    yield open_one
    for data_set in sets:
        data_set.close()


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.json", "a.jsonl", "a.parquet", "a.arrow", "saved"])
def test_table_of_any_form_gives_its_rows(opened: Any, name: str) -> None:
    """All formats give the same rows, by column or by role."""
    data_set = opened(name)
    assert (name, ("sentence", "label"), 4) == (data_set.name, data_set.columns, len(data_set))
    roles = match_columns(data_set, ("text", "label"))
    assert {"text": "sentence", "label": "label"} == roles
    assert [(text, number % 2) for number, text in enumerate(TEXTS)] == [
        (row["text"], row["label"]) for row in data_set.rows(roles)
    ]


def test_non_empty_lines_of_a_text_are_samples(opened: Any) -> None:
    """The column is called text."""
    assert [{"text": text} for text in TEXTS] == list(opened("a.txt").rows())


def test_pictures_are_opened_and_their_folders_are_labels(opened: Any) -> None:
    """Images are decoded with all pixels when their row is read."""
    data_set = opened("pictures")
    rows = list(data_set.rows(match_columns(data_set, ("image", "label"))))
    assert ["cat", "dog"] == data_set.features["label"].names
    assert [10, 200, 11, 201] == [row["image"].getpixel((0, 0))[0] for row in rows]
    assert [0, 0, 1, 1] == [row["label"] for row in rows]
    assert data_set.unreadable_note is None


def test_label_of_pictures_in_one_folder_is_its_name(tmp_path: Path) -> None:
    _save_pictures(tmp_path / "p")
    shutil.rmtree(tmp_path / "p" / "dog")
    with open_data_set(DataSetRequest(str(tmp_path / "p"))) as data_set:
        assert data_set.features["label"].names == ["cat"]


def test_recordings_are_opened_with_the_metadata_of_the_folder(opened: Any) -> None:
    """Channels are mixed; metadata gives the other columns; folders are splits."""
    data_set = opened("sounds")
    assert "test" == data_set.split
    (row,) = data_set.rows(match_columns(data_set, ("audio", "reference")))
    assert ((80,), 8000, "hello") == (row["audio"].samples.shape, row["audio"].rate_hz, row["reference"])
    assert 0.25 == pytest.approx(float(row["audio"].samples[0]), abs=1e-3)
    assert (160,) == resampled(row["audio"], 16000).shape


def test_resampled_tone_stays_the_tone() -> None:
    """A sine of 400 Hz has the same values at another rate, away from the ends."""
    times = np.arange(8000) / 8000
    tone = Recording(np.sin(2 * np.pi * 400 * times).astype(np.float32), 8000)
    again = resampled(tone, 16000)
    expected = np.sin(2 * np.pi * 400 * np.arange(16000) / 16000)
    np.testing.assert_allclose(again[200:-200], expected[200:-200], atol=0.01)


def test_split_is_chosen_in_order_with_a_note(opened: Any) -> None:
    """Validation comes before test, test before train; the hint of an unknown split lists the existing ones."""
    data_set = opened("tables")
    assert "validation" == data_set.split
    assert ("split validation of tables is used by default; other splits: train",) == data_set.notes
    assert "train" == opened("tables", split="train").split
    assert 1 == len(opened("both"))
    with pytest.raises(UsageError, match="'dev'") as caught:
        opened("both", split="dev")
    assert "Its splits: train, test." == caught.value.hint
    assert () == opened("a.csv").notes


def test_split_without_rows_is_noted_and_left_out(opened: Any, data: Path) -> None:
    """A table with a header only has no types of columns, which a library reads."""
    (data / "half").mkdir()
    (data / "half" / "train.csv").write_text("text,label\n")
    (data / "half" / "test.csv").write_text("text,label\none,1\n")
    data_set = opened("half")
    assert ("test", 1) == (data_set.split, len(data_set))
    assert any("split train has no rows" in note for note in data_set.notes)


def test_draw_depends_on_the_seed(opened: Any) -> None:
    """Chosen samples keep the order of the data; more samples than rows are refused."""

    def texts(seed: int) -> list[str]:
        return [row["sentence"] for row in opened("a.parquet", samples=2, seed=seed).rows()]

    draws = [texts(seed) for seed in range(6)]
    assert draws[0] == texts(0)
    assert len({tuple(draw) for draw in draws}) > 1
    assert all(TEXTS.index(first) < TEXTS.index(second) for first, second in draws)
    with pytest.raises(UsageError, match=r"4 samples.*--samples.* 5"):
        opened("a.parquet", samples=5)


def test_pictures_that_do_not_open_are_counted_and_named(tmp_path: Path) -> None:
    """Other images are read; if no image opens, the data set is refused."""
    _save_pictures(tmp_path / "p")
    files = sorted((tmp_path / "p").rglob("*.png"))
    files[0].write_bytes(files[0].read_bytes()[:40])
    files[3].write_bytes(b"no picture")
    with open_data_set(DataSetRequest(str(tmp_path / "p"))) as data_set:
        assert 2 == len(list(data_set.rows()))
        assert (
            "2 of 4 samples of p cannot be opened and are skipped: cat/10.png, dog/200.png" == data_set.unreadable_note
        )
    for file in files:
        file.write_bytes(b"")
    with (
        open_data_set(DataSetRequest(str(tmp_path / "p"))) as data_set,
        pytest.raises(InputError, match="of 4 files"),
    ):
        list(data_set.rows())


def test_table_may_name_files_of_pictures(tmp_path: Path) -> None:
    """Paths are relative to the table; the role declares the column as images."""
    _save_pictures(tmp_path / "p")
    (tmp_path / "list.csv").write_text("path,label\np/cat/10.png,0\np/cat/gone.png,0\n")
    with open_data_set(DataSetRequest(str(tmp_path / "list.csv"), columns={"image": "path"})) as data_set:
        (row,) = data_set.rows(match_columns(data_set, ("image",)))
        assert (8, 6) == row["image"].size
        assert "1 of 2 samples of list.csv cannot be opened and is skipped: p/cat/gone.png" == data_set.unreadable_note


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("a.parquet", b"PAR1 and no more", InputError, "as parquet"),
        ("a.json", b"{ no json", InputError, "as json"),
        ("a.csv", b"text,label\n", UsageError, "no sample"),
        ("a.csv", b"text\ncaf\xe9\n", InputError, "csv: 'utf-8'"),
        ("a.txt", b"", UsageError, "empty file"),
        ("a.doc", b"x", UsageError, "\\.doc"),
        ("gone.csv", None, UsageError, "no such"),
        ("gone/..", None, UsageError, "no such"),
    ],
)
def test_data_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, content: bytes | None, error: type[Exception], words: str
) -> None:
    """The message names the option and the file; nothing of the reading is left."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=words) as caught:
        open_data_set(DataSetRequest(str(tmp_path / name), option="--calibration-data"))
    assert str(caught.value).startswith(f"--calibration-data {tmp_path / name}: ")


@pytest.mark.parametrize(
    "text", ["C:\\data\\reviews.csv", "C:reviews", "data\\reviews", "owner/name:a/b", "name:b.csv"]
)
def test_malformed_path_is_no_hub_name(text: str) -> None:
    """A letter of a drive, a backslash and a file name are of a path; a configuration is a plain word."""
    with pytest.raises(UsageError, match="no such"):
        find_source(text)
    assert ("hub", "glue", "stsb") == ((found := find_source("glue:stsb")).kind, found.name, found.config)


def test_reading_leaves_no_file(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file remains beside the data or among temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = sorted(data.rglob("*"))
    with open_data_set(DataSetRequest(str(data / "a.csv"))) as data_set:
        assert 4 == len(list(data_set.rows()))
        assert any(tmp_path.iterdir())
    assert [] == list(tmp_path.iterdir())
    assert before == sorted(data.rglob("*"))


def test_missing_column_is_refused_with_the_existing_columns(opened: Any) -> None:
    """The message lists the columns, and the hint suggests the nearest."""
    with pytest.raises(UsageError, match=r"image; .*sentence, label"):
        match_columns(opened("a.csv"), ("text", "image"))
    with pytest.raises(UsageError, match="'sentense'") as caught:
        match_columns(opened("a.csv", columns={"text": "sentense"}), ("text",))
    assert "Did you mean 'sentence'? Its columns: sentence, label." == caught.value.hint
    with pytest.raises(UsageError, match="--columns txt") as caught:
        parse_columns(["txt=sentence"])
    assert caught.value.hint.startswith("Did you mean 'text'? ")


def test_missing_package_is_reported_with_its_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before the data are read."""
    (tmp_path / "a.csv").write_text("text\nthe\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="package datasets") as caught:
        open_data_set(DataSetRequest(str(tmp_path / "a.csv")))
    assert install_command("eval") in caught.value.hint


def test_guide_lists_the_known_column_names() -> None:
    """Every role, with its names in order."""
    guide = (REPOSITORY / "docs" / "reference" / "data_sets.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", guide, re.MULTILINE))
    assert {role: list(names) for role, names in ROLE_COLUMNS.items()} == {
        role: re.findall(r"`(\w+)`", names) for role, names in rows.items()
    }


def test_recordings_outside_of_their_folder_are_refused(tmp_path: Path) -> None:
    """Metadata names files of its own folder only."""
    (tmp_path / "sounds").mkdir()
    soundfile.write(tmp_path / "sounds" / "x.wav", np.zeros(8), 8000)
    (tmp_path / "sounds" / "metadata.csv").write_text("file_name,text\n../other.wav,hello\n")
    with pytest.raises(InputError, match="outside"):
        open_data_set(DataSetRequest(str(tmp_path / "sounds")))
