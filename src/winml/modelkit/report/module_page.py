"""Renders what was measured of each module as one HTML page with a chart and tables, readable without a network.

The chart library plotly is inside the page. One template for all measurements; the page of the times of modules is made
here. Computes no time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.hierarchy import address
from winml.modelkit.measure.module_profile import ModuleProfile, ModuleTime
from winml.modelkit.report.module_times import fused_words
from winml.modelkit.results.module_perf import ProfiledModules
from winml.modelkit.words import printable

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = [
    "ModulePage",
    "NumberInWords",
    "Section",
    "chart_html",
    "chart_text",
    "icicle_chart",
    "module_page",
    "nearest_parent",
    "profile_facts",
    "profile_page",
    "render_page",
]

TEMPLATE = "module_page.html"

MODULE_COLUMNS = (
    ("module", False), ("class", False), ("total ms", True), ("share %", True), ("self ms", True), ("kernels", True),
    ("output bytes", True), ("operators of its own", False),
)  # fmt: skip
CLASS_COLUMNS = (
    ("class", False), ("instances", True), ("total ms", True), ("share %", True), ("self ms", True), ("kernels", True),
    ("operators of its own", False),
)  # fmt: skip
"""Name of each column, and whether it holds numbers."""

SMALLEST_DECIMAL = 0.001
"""Chosen: what three decimals still show; smaller numbers are written with a power of ten."""
LEVEL_PIXELS = 60
"""Chosen: two lines of words fit into the box of a module."""
COLOURS = "YlOrRd"
"""Chosen: a plotly scale that darkens with the value, so it can be read without colour."""


@dataclass(frozen=True)
class NumberInWords:
    """A number of a table that is shown as words, and sorted by its value."""

    value: float
    words: str

    def __float__(self) -> float:
        """Return the number."""
        return self.value

    def __str__(self) -> str:
        """Return the number as a script reads it."""
        return str(self.value)


@dataclass(frozen=True)
class Section:
    """One table with a heading."""

    name: str
    """Name of the table in the page; the first can be filtered."""
    heading: str
    columns: Sequence[tuple[str, bool]]
    """Name of each column, and whether it holds numbers."""
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class ModulePage:
    """What stands on a page."""

    title: str
    """Name of the measured model; usually that of its file."""
    subject: str
    """What was measured, in the title of the window."""
    introduction: str
    facts: Sequence[tuple[str, str]]
    """Lines under the title."""
    chart_heading: str
    chart: str
    """HTML."""
    sections: Sequence[Section]
    filter_words: str = "Filter by module, class or operator"
    """What stands in the empty field above the first table."""


def render_page(page: ModulePage) -> str:
    """Return the page as HTML."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_shown)
    environment.filters["measured"] = _format_number
    environment.filters["pieces"] = _pieces
    template = environment.from_string(files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8"))
    return template.render(page=page)


def profile_page(profiled: ProfiledModules) -> str:
    """Return the page of a profiled model, with the facts of the measurement under its title."""
    return module_page(profiled.profile, title=Path(profiled.result.model).name, facts=profile_facts(profiled))


def profile_facts(profiled: ProfiledModules) -> dict[str, str]:
    """Return what stands under the title of a profiled model, besides its times."""
    result = profiled.result
    return {
        "runs on": f"{result.provider.provider.name}, ONNX Runtime {result.onnxruntime_version}",
        "inputs": ", ".join(f"{name} {list(shape)}" for name, shape in result.measured_shapes.items()),
        "modules from": profiled.tree_source,
        "made by": f"winml {result.tool_version}",
    }


def module_page(profile: ModuleProfile, *, title: str, facts: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        profile: The measured times.
        title: Name of the measured model; usually that of its file.
        facts: Further lines under the title, such as versions and the execution provider.
    """
    sections = [
        Section(
            "modules", "Modules", MODULE_COLUMNS,
            [_module_row(module, profile.kernel_ms) for module in profile.modules()],
        ),
        Section("classes", "Classes", CLASS_COLUMNS, _class_rows(profile)),
    ]  # fmt: skip
    if profile.unattributed:
        columns = (("node", False), ("ms", True))
        sections.append(
            Section("unattributed", "Nodes without a module", columns, list(profile.unattributed.items()))
        )  # fmt: skip
    introduction = "Kernel times of ONNX Runtime, charged to the PyTorch module each node came from; means over "
    page = ModulePage(
        title=title,
        subject="time by module",
        introduction=f"{introduction}{len(profile.run_ms)} runs.",
        facts=[*facts.items(), *_time_sums(profile)],
        chart_heading="Where the time goes",
        chart=icicle_chart(profile),
        sections=sections,
    )
    return render_page(page)


def _shown(value: Any) -> Any:
    """Return what stands on the page: texts with every character printable, and what is HTML already as it is."""
    return printable(value) if type(value) is str else value


def chart_text(text: str) -> str:
    """Return a text for the chart, which reads some HTML in its texts."""
    return escape(printable(text))


def _format_number(value: float | NumberInWords | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, NumberInWords):
        return value.words
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.1e}" if 0.0 < abs(value) < SMALLEST_DECIMAL else f"{value:.3f}"


def _pieces(text: str) -> list[str]:
    """Return the pieces of a text between which a narrow column breaks it first: after dots and slashes."""
    return re.split(r"(?<=[./])(?=.)", text)


def _count(per_run: float) -> float:
    """Return a mean of counts; a whole one as the integer it is, which is shown without decimals."""
    return int(per_run) if per_run == int(per_run) else per_run


def _time_sums(profile: ModuleProfile) -> Iterator[tuple[str, str]]:
    mean_ms = sum(profile.run_ms) / len(profile.run_ms)
    yield "one run", f"{mean_ms:.3f} ms with profiling on"
    yield "kernels", f"{profile.kernel_ms:.3f} ms"
    yield "outside kernels", f"{profile.outside_ms:.3f} ms"
    yield "unattributed", f"{profile.unattributed_ms:.3f} ms ({profile.unattributed_share:.2%} of kernel time)"


def icicle_chart(profile: ModuleProfile, *, with_library: bool = True) -> str:
    """Return the icicle chart: one box per module, as wide as its time; the part without children is its self time.

    Args:
        profile: The measured times.
        with_library: Whether the chart library goes with it, which a page needs once.
    """
    import plotly.graph_objects as charts

    modules = list(profile.modules())
    figure = charts.Figure(
        charts.Icicle(
            ids=[module.tag for module in modules],
            labels=[chart_text(module.tag.rpartition(address.SEPARATOR)[2]) for module in modules],
            parents=[_parent_tag(module.tag, profile.roots) for module in modules],
            # plotly adds up the self times, so rounding cannot make the children exceed their parent.
            values=[module.self_ms for module in modules],
            branchvalues="remainder",
            customdata=[
                [
                    chart_text(module.path or module.tag),
                    module.total_ms,
                    module.self_ms,
                    _kernel_percent(module.total_ms, profile),
                ]
                for module in modules
            ],
            hovertemplate="%{customdata[0]}<br>total %{customdata[1]:.3f} ms (%{customdata[3]:.1f} %)"
            "<br>self %{customdata[2]:.3f} ms<extra></extra>",
            marker={"colors": [module.total_ms for module in modules], "colorscale": COLOURS, "showscale": False},
            tiling={"orientation": "v"},
            sort=False,
        )
    )
    return chart_html(figure, levels=_tree_depth(profile.roots), with_library=with_library)


def chart_html(
    figure: Figure, *, levels: int, level_pixels: int = LEVEL_PIXELS, top: int = 10, with_library: bool = True
) -> str:
    """Return a chart as HTML, as high as its levels ask for and as wide as the page.

    Args:
        figure: The chart; its margins and height are set.
        levels: Levels of its tree, or rows.
        level_pixels: Height of one.
        top: Pixels above the chart.
        with_library: Whether the chart library goes with it, which a page needs once.
    """
    from plotly.io import to_html

    figure.update_layout(margin={"t": top, "l": 0, "r": 0, "b": 0}, height=max(320, level_pixels * levels))
    shown = {"displaylogo": False, "responsive": True}
    html: str = to_html(figure, include_plotlyjs=with_library, full_html=False, config=shown)
    return html


def nearest_parent(tag: str, tags: Collection[str]) -> str:
    """Return the nearest module above one that is shown as well; empty where there is none."""
    return max((other for other in tags if other != tag and address.is_within(tag, other)), key=len, default="")


def _parent_tag(tag: str, roots: Sequence[ModuleTime]) -> str:
    return "" if any(root.tag == tag for root in roots) else tag.rpartition(address.SEPARATOR)[0]


def _tree_depth(modules: Sequence[ModuleTime]) -> int:
    return 1 + max((_tree_depth(module.children) for module in modules), default=0)


def _kernel_percent(milliseconds: float, profile: ModuleProfile) -> float:
    return 100.0 * milliseconds / profile.kernel_ms if profile.kernel_ms else 0.0


def _module_row(module: ModuleTime, kernel_ms: float) -> tuple[Any, ...]:
    share = 100.0 * module.total_ms / kernel_ms if kernel_ms else 0.0
    return (
        module.path or module.tag,
        module.class_name,
        module.total_ms,
        share,
        module.self_ms,
        _count(module.kernels),
        module.output_bytes,
        ", ".join(module.operators) + fused_words(module),
    )


def _class_rows(profile: ModuleProfile) -> list[tuple[Any, ...]]:
    return [
        (
            entry.class_name,
            entry.instances,
            entry.total_ms,
            _kernel_percent(entry.total_ms, profile),
            entry.self_ms,
            _count(entry.kernels),
            ", ".join(entry.operators),
        )
        for entry in profile.by_class()
    ]
