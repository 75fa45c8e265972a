"""Command ``winml view``: writes a page of the modules and the graph of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import WinMLCommand
from winml.modelkit.cli._folders import end_dry_run
from winml.modelkit.cli._options import request_options, result_options
from winml.modelkit.cli._progress import show_wait
from winml.modelkit.cli._requests import stated_fields
from winml.modelkit.cli._streams import page_text, show_result, write_answer
from winml.modelkit.view.verb import ViewRequest, plan_view, run_view

if TYPE_CHECKING:
    from winml.modelkit.view.records import ModelPage


@click.command(name="view", cls=WinMLCommand)
@request_options(ViewRequest)
@result_options()
def command(**options: Any) -> None:
    """Write a page that shows the modules and the graph of a model, or of two side by side.

    The page needs no network and no server: it opens in any browser. An output that ends in .svg or .png is a picture
    of the modules, for a README.

    Exit codes: 0 success, 1 invalid files, 2 usage error.

    Examples:
      winml view model.onnx -o page.html
      winml view model.onnx quantized.onnx -o pair.html --open
      winml view model.onnx -o picture.svg --width nodes
    """
    plan = plan_view(ViewRequest(**stated_fields(ViewRequest, options)))
    end_dry_run(plan, options)
    with show_wait("measuring" if options["measure"] else "reading"):
        page = run_view(plan)
    texts = {"output": lambda path: _file_content(page, path)}
    paths = write_answer(plan.files, texts, overwrite=options["overwrite"])
    show_result(page.as_record(), options, lambda: page.document().with_files(paths))
    if options["open"]:
        click.launch(paths[0].absolute().as_uri())


def _file_content(page: ModelPage, path: Path) -> str | bytes:
    """Return the page, or the picture if the name of the file ends in ``.svg`` or ``.png``."""
    match path.suffix.lower():
        case ".svg":
            return page.svg()
        case ".png":
            return page.png()
        case _:
            return page_text(page.document(), path, {})
