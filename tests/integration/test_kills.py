"""Files after a kill at any moment: the old or the new ones, and tidied up by the next command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from typing import Any

import pytest

import killing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the harness forks, and reads /proc"),
]

_SEVERAL_MODELS = {"extract", "build"}
"""Commands that replace several models in sequence; each model is complete by itself."""


@pytest.fixture(scope="module")
def killed_states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Command → states of the folder after each kill."""
    place = tmp_path_factory.mktemp("kills")
    (place / "work").mkdir()
    (place / "temporary").mkdir()
    variables = {
        **os.environ,
        "TMPDIR": str(place / "temporary"),
        "WINML_CACHE": str(place / "cache"),
        # A process with threads cannot be forked.
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, killing.__file__, str(place / "work"), *killing.VERBS]
    done = subprocess.run(
        command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=900
    )
    assert 0 == done.returncode, done.stderr
    records = defaultdict(list)
    for line in done.stdout.splitlines():
        record = json.loads(line)
        records[record["verb"]].append(record)
    return records


@pytest.mark.parametrize("verb", killing.VERBS)
def test_killed_verb_leaves_old_or_new_files(verb: str, killed_states: dict[str, list[dict[str, Any]]]) -> None:
    """Every model loads and has old or new outputs; the next command completes the set and leaves no other files."""
    records = killed_states[verb]
    assert [True] * (len(records) - 1) + [False] == [record["killed"] for record in records]
    allowed = {"old", "new", "new+old"} if verb in _SEVERAL_MODELS else {"old", "new"}
    if verb == "unlinked":
        # If links are refused, the file is missing at one moment, while the earlier file is aside.
        at_once = [record for record in records if record["at_once"] != "any"]
        assert len(records) - 1 == len(at_once)
    else:
        at_once = records
    assert [] == [record for record in at_once if record["at_once"] not in allowed]
    assert [] == [record for record in records if record["set"] not in {"old", "new"}]
    assert [] == [record for record in records if record["left"]]
    # The commit is one moment between the old and the new state of the folder.
    states = [record["at_once"] for record in at_once]
    assert sorted(states, key=["old", "new+old", "new"].index) == states
    assert {"old", "new"} <= set(states)
