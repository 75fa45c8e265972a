"""HTML pages in a browser: width, sort, filter and zoom, with names as plain text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from browser import Browser
from winml.modelkit.compare.diff_table import diff_document
from winml.modelkit.compare.records import ChangedModule, ComparedFile, StructureDiff, WeightChange
from winml.modelkit.evaluate.records import EvaluatedData, EvaluatedSide, Evaluation, Limit, MetricResult
from winml.modelkit.evaluate.table import evaluation_document
from winml.modelkit.profile.statistics import Ratio, Summary
from winml.modelkit.quantize.records import BudgetChoice, BudgetSearch, BudgetTrial, QuantizedFile
from winml.modelkit.quantize.table import budget_document
from winml.modelkit.report.document import (
    Box,
    Boxes,
    Column,
    Document,
    Dot,
    Dots,
    Fields,
    Figure,
    Fold,
    Linked,
    Section,
    Shades,
    Table,
)
from winml.modelkit.report.html import render_html
from winml.modelkit.tags.tagging import Coverage
from winml.modelkit.transform.records import GraphSummary
from winml.modelkit.tune.records import (
    Candidate,
    CandidateFacts,
    CandidateStatus,
    MeasuredLatency,
    TunedCandidate,
    TuneResult,
    Winner,
)
from winml.modelkit.tune.table import tuning_document
from winml.modelkit.verdicts import Verdict

NAMES = ("<script>document.title='run'</script>", "<img src=x onerror=alert(1)>", "</script><b>", '"quoted" & \u2028')
LONG = "encoder.layer.11.attention.intermediate.dense_projection_of_everything_in_one_word_without_a_break"
LAYERS = 4
MOST_BYTES = 1_500_000
"""Specified by the project: the size of the page of a large model."""


def _boxes() -> list[Box]:
    """A model of equal layers: attention and output, the first of which is larger."""
    boxes = [Box("/M", "", "M", 1.0, 0.0, kind="Model", lines=("M",))]
    for layer in range(LAYERS):
        tag = f"/M/L.{layer}"
        boxes.append(Box(tag, "/M", f"L.{layer}", 0.0, 0.0, kind="Layer", lines=(f"layer.{layer}",)))
        for name, size in (("Attention", 3.0), ("Output", 1.0)):
            key, path = f"{tag}/{name}", f"layer.{layer}.{name.lower()}"
            boxes.append(Box(key, tag, name, size, size, kind=name, lines=(path, f"self {size}")))
    return boxes


def _table(rows: int = LAYERS) -> Table:
    columns = [Column("module", "name"), Column("class"), *(Column(f"number {n}", "ms") for n in range(7))]
    names = [f"layer.{n}.{part}" for n in range(rows) for part in ("attention", "output")]
    cells = [[name, f"Class{n % 3}", *(float((7 * n + k) % 11) for k in range(7))] for n, name in enumerate(names)]
    return Table(columns, [*cells, *([name, LONG, *[1.0] * 7] for name in (*NAMES, LONG))], "modules", "Modules",
                 is_searched=True)  # fmt: skip


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page with every kind of block, in which names are hostile or long."""
    names = (*NAMES, LONG)
    dots = [
        Dot(name, "good", n - 1.0, n - 1.5, n, 1.0, 5.0 - n, "5 MB", "0.5", (name,)) for n, name in enumerate(names)
    ]
    hostile = [Box(name, "/M", name, 1.0, 1.0, kind=name, lines=(name,)) for name in names]
    document = Document(
        [
            Fields([("model", LONG), ("note", NAMES[0])]),
            Boxes([*_boxes(), *hostile], "Time by module", "", "time", "ms", Shades("self time", folded="sum"), True),
            Dots(dots, "Candidates", "latency", "size", 0.0, 3.0),
            Section(LONG, [_table()]),
        ],
        title=LONG,
        subject="time by module",
        introduction=" ".join(NAMES),
        figures=[Figure(name, "12.345 ms", name) for name in names],
        links=[Linked(LONG, "javascript:alert(1)", "javascript:alert(1)")],
    )
    path = tmp_path / "page.html"
    path.write_text(render_html(document), encoding="utf-8")
    return path


def _boxes_of(browser: Browser) -> list[str]:
    names: list[str] = browser.run(
        "[...document.querySelectorAll('.plot button span:first-child')].map(box => box.textContent)"
    )
    return names


def _focused(browser: Browser) -> str:
    label: str = browser.run("document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent")
    return label


@pytest.mark.reader("chromium")
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 800, 1280])
def test_page_fits_the_window_without_an_error(browser: Browser, page: Path, width: int, is_dark: bool) -> None:
    """Long names break, tables become cards on a telephone, and dark mode is dark."""
    browser.open(page, width=width, is_dark=is_dark)
    assert [] == browser.problems
    assert [] == browser.wider_elements()
    red, *_ = browser.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert is_dark == (red < 128)


@pytest.mark.reader("chromium")
def test_names_are_text(browser: Browser, page: Path) -> None:
    """No element, script or address of a foreign name is obeyed: not in a table, a chart, a title or a link."""
    browser.open(page)
    assert LONG in browser.run("document.title")
    assert 0 == browser.run("document.querySelectorAll('img, b > b').length")
    assert {*NAMES[:3]} <= {*browser.column("modules", 0)}
    assert {*NAMES[:3]} <= {*_boxes_of(browser)}
    assert "file:" == browser.run("document.querySelector('.files a').protocol")


@pytest.mark.reader("chromium")
def test_keys_sort_and_filter_the_table(browser: Browser, page: Path) -> None:
    """Enter on a head sorts by it, the second time the other way; typing filters."""
    browser.open(page)
    browser.run("document.querySelectorAll('#modules th button')[2].focus()")
    browser.press("Enter")
    numbers = [float(number) for number in browser.column("modules", 2)]
    assert sorted(numbers, reverse=True) == numbers
    browser.press("Enter")
    assert numbers != [float(number) for number in browser.column("modules", 2)]
    assert "ascending" == browser.run("document.querySelectorAll('#modules th')[2].getAttribute('aria-sort')")
    browser.run("document.getElementById('filter').focus()")
    browser.press(*"output")
    assert {f"layer.{n}.output" for n in range(LAYERS)} == {*browser.column("modules", 0)}
    assert browser.run("document.getElementById('count').textContent").startswith(f"{LAYERS} of ")


@pytest.mark.reader("chromium")
def test_keys_select_and_zoom_modules(browser: Browser, page: Path) -> None:
    """The chart is one stop of Tab; arrows go from module to module, Enter zooms in and Escape out."""
    browser.open(page)
    assert f"L.0 … .3 ({LAYERS} ×)" in _boxes_of(browser)
    browser.run("document.querySelector('.plot [tabindex=\"0\"]').focus()")
    assert _focused(browser).startswith("M, ")
    browser.press("ArrowDown", "ArrowDown", "ArrowRight")
    assert _focused(browser).startswith(f"Output ({LAYERS} ×), 4 ms")
    browser.press("ArrowUp", "Enter")
    assert [f"L.0 … .3 ({LAYERS} ×)", f"Attention ({LAYERS} ×)", f"Output ({LAYERS} ×)"] == _boxes_of(browser)
    assert 1 == browser.run("document.querySelectorAll('.plot [tabindex=\"0\"]').length")
    browser.press("Escape")
    assert "M" == _boxes_of(browser)[0]
    browser.run("document.querySelector('.fold').focus()")
    browser.press(" ")
    assert LAYERS == sum(name.startswith("L.") for name in _boxes_of(browser))


@pytest.mark.reader("chromium")
def test_colours_represent_classes_or_self_time(browser: Browser, page: Path) -> None:
    """The choice recolours the boxes, and the legend explains the colours."""
    browser.open(page)
    legend = "document.querySelector('.legend').textContent"
    assert "Attention" in browser.run(legend)
    assert 0 == browser.run("document.querySelectorAll('.plot .heat').length")
    browser.run(
        "{const c = document.querySelector('.colour'); c.value = 'shade 0'; c.dispatchEvent(new Event('change'))}"
    )
    assert "self time" in browser.run(legend)
    assert 0 < browser.run("document.querySelectorAll('.plot .heat').length")


@pytest.mark.reader("chromium")
def test_rows_of_a_module_are_shown_from_the_chart(browser: Browser, page: Path) -> None:
    """The button below the chart filters the table by the module that is selected."""
    browser.open(page)
    browser.run("document.querySelector('.fold').click()")
    browser.run("document.querySelector('.plot [tabindex=\"0\"]').focus()")
    browser.press("ArrowDown", "ArrowRight", "ArrowDown", "Tab", "Enter")
    assert ["layer.1.attention"] == browser.column("modules", 0)


@pytest.mark.reader("chromium")
def test_fold_opens_and_a_filter_lists_every_row(browser: Browser, tmp_path: Path) -> None:
    """Equal layers are one row with the rows of its inner modules; a filtered or sorted table has no fold."""
    rows = [[f"layer.{number}{inner}", float(number)] for number in range(3) for inner in ("", ".inner")]
    fold = Fold(1, 7, [["layers", 3.0], ["layers inside", 3.0]])
    table = Table(
        [Column("module", "name"), Column("time", "ms")],
        [["embedding", 1.0], *rows],
        "modules",
        folds=[fold],
        is_searched=True,
    )
    path = tmp_path / "fold.html"
    path.write_text(render_html(Document([table])), encoding="utf-8")

    def names() -> list[str]:
        visible = "[...document.querySelectorAll('#modules tbody tr')].filter(row => row.offsetParent !== null)"
        found: list[str] = browser.run(f"{visible}.map(row => row.cells[0].textContent.replace(/[▸▾] /, ''))")
        return found

    browser.open(path)
    assert ["embedding", "layers", "layers inside"] == names()
    browser.run("document.querySelector('.opener').click()")
    assert ["embedding", "layers", *(row[0] for row in rows)] == names()
    browser.run("document.querySelector('.opener').click()")
    browser.run("document.getElementById('filter').focus()")
    browser.press(*"inner")
    assert [row[0] for row in rows[1::2]] == names()
    assert browser.run("document.getElementById('count').textContent") == "3 of 7 rows"
    assert [] == browser.problems


def test_page_of_a_large_model_is_small() -> None:
    """The page has two thousand modules in a chart and a table of a thousand rows."""
    boxes = [Box(f"/M.{n}", "", f"M.{n}", 1.0, 0.5, "", (LONG, "self 1.000 ms"), kind="Module") for n in range(2000)]
    page = render_html(Document([Boxes(boxes, "Time", shades=Shades("self time")), _table(1000)]))
    assert 200_000 < len(page.encode()) < MOST_BYTES


def _budget() -> Document:
    choices = [
        BudgetChoice(f"/M/L.{n}/Linear", form, 32, 1000, 530, {"int4": 20.0 + n, "int8": 40.0})
        for n, form in enumerate(("int8", "int4", "int4"))
    ]
    trials = [
        BudgetTrial(form, bits, int(1000 * bits), db, is_chosen=bits == 4.5, is_mixture=form == "mixed")
        for form, bits, db in (("int4", 4.1, 18.5), ("mixed", 4.5, 24.0), ("mixed", 6.0, 29.0), ("int8", 8.1, 38.0))
    ]
    search = BudgetSearch("at most 4.5 bits", 4.5, "mixed", tuple(choices), tuple(trials), 12, 8, "random")
    graph = GraphSummary({"MatMul": 3}, {}, 16_000, 17)
    file = QuantizedFile(
        Path("model.onnx"), Path("mixed.onnx"), (), is_copy=False, is_plain=True, normalizations=0, before=graph,
        after=graph, coverage=Coverage(3, 3, {}), comparison=None, functions=None, steps=(), notes=("a note",),
        precision="int4", modes=("weight-only",), calibration=None, modules=(), budget=search,
    )  # fmt: skip
    return budget_document(file)


def _evaluation() -> Document:
    times = Summary(4.0, 0.1, 3.9, 4.0, 4.1, 4.2, 4.3, 4.4)
    metrics = [
        MetricResult(name, 0.9, True, (0.85, 0.95), 0.92, (0.87, 0.96), (-0.04, 0.01)) for name in ("accuracy", "f1")
    ]
    return evaluation_document(
        Evaluation(
            "0", "1", "text-classification", "from the file", EvaluatedData("reviews.csv", "test", {}, 50, 50), 8, 0,
            EvaluatedSide("int8.onnx", "onnx", times), tuple(metrics), EvaluatedSide("pytorch", "pytorch", times), 0.98,
            "equal classes", limits=(Limit("max_drop", "f1", 0.01, 0.02),),
        )
    )  # fmt: skip


def _candidate(
    name: str, status: CandidateStatus, size: int, sqnr: float, ms: float, ratio: Ratio | None
) -> TunedCandidate:
    return TunedCandidate(
        Candidate(name, "dynamic" if ratio else "plain", f"what {name} is"),
        status,
        facts=CandidateFacts(size, 100.0, 1000, 1000, 5000, 9.0, sqnr, "y"),
        latency=MeasuredLatency(ms, ms - 0.1, ms + 0.1, ratio, 9, "forms"),
        is_on_front=True,
    )


def _tuning() -> Document:
    ratio = Ratio(0.52, 0.50, 0.55, 0.95, 30)
    candidates = [
        _candidate("plain", "slower", 9_000_000, 200.0, 8.0, None),
        _candidate("int8", "won", 3_000_000, 31.0, 4.2, ratio),
    ]
    winner = Winner(
        "int8", "tuned", "config.json", "it is the fastest", "winml build", None, False, ratio, 31.0, 3_000_000
    )
    machine = {"processor": "a processor", "cores": 2, "providers": ["CPUExecutionProvider"]}
    limits = {"min_sqnr_db": 20.0, "min_agreement": None, "max_drop": {}, "dataset": None, "max_peak_bytes": None}
    return tuning_document(
        TuneResult(
            "model.onnx",
            "0",
            "1",
            "latency",
            limits,
            machine,
            {"x": (1, 8)},
            1,
            5,
            Verdict.of("int8 is faster than the plain file", True, "0.52 of the time"),
            winner,
            tuple(candidates),
            0,
        )
    )


def _difference() -> Document:
    before, after = (ComparedFile(Path(name), 1000, 9, 100, 400, 17, "tags") for name in ("a.onnx", "b.onnx"))
    weights = (WeightChange("w", "changed", "float32[8]", "int8[8]"),)
    changed = ChangedModule("changed", LONG, "/M/L.0", "L", (4, 6), (8, 8), (400, 100), {"MatMul": (2, 1)},
                            {"float32": (400, 0), "int8": (0, 100)}, weights)  # fmt: skip
    return diff_document(StructureDiff(before, after, {"MatMul": (2, 1), "Cast": (0, 3)}, (), (changed,), 3))


@pytest.mark.reader("chromium")
@pytest.mark.parametrize("describe", [_budget, _evaluation, _tuning, _difference])
def test_pages_of_verbs_have_a_summary_a_chart_and_a_table(
    describe: Callable[[], Document], browser: Browser, tmp_path: Path
) -> None:
    """No element is wider than the page at either width; figures, table rows and, except of a diff, marks exist."""
    path = tmp_path / "page.html"
    path.write_text(render_html(describe()), encoding="utf-8")
    for width in (1280, 390):
        browser.open(path, width=width)
        assert [] == browser.problems + browser.wider_elements()
    charts = [] if describe is _difference else [".plot button, .dots .row:not(.head)"]
    selectors = [".figures li", "tbody tr", *charts]
    counts = {what: browser.run(f"document.querySelectorAll('{what}').length") for what in selectors}
    assert all(counts.values()), counts
    size = "getComputedStyle(document.querySelector('.figures b')).fontSize"
    assert float(browser.run(size).removesuffix("px")) > 16
