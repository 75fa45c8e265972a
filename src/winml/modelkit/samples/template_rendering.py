"""Renders a chat template in a process of its own: the program of :func:`~.chat_templates.rendered_chats`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

from winml.modelkit.ort.foreign_libraries import has_transformers
from winml.modelkit.ort.processes import answer_questions


def _render(template: str, messages: list[dict[str, object]], variables: Mapping[str, Any]) -> dict[str, str]:
    """Render a chat template; return ``text``, or ``error`` if the template fails."""
    from winml.modelkit.errors import first_line

    values = {"add_generation_prompt": True, **variables}
    try:
        if not has_transformers():
            return {"text": _render_with_jinja(template, messages, values)}
        # Does not import torch.
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(  # declared as text, and is a list of them with their indices
            [messages], chat_template=template, **values
        )
        return {"text": str(rendered[0][0])}
    except Exception as error:  # a template is code of the model's author and may raise any error
        return {"error": first_line(error)}


def _render_with_jinja(template: str, messages: list[dict[str, object]], values: Mapping[str, Any]) -> str:
    """Render a chat template with the settings, functions and blocks that transformers specifies for them."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlocks(Extension):
        """Blocks around the text of the assistant, which have no effect on the text."""

        tags = frozenset({"generation"})  # type: ignore[assignment]  # declared as a set

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # local, as specified
    return environment.from_string(template).render(messages=messages, tools=None, documents=None, **values)


if __name__ == "__main__":
    if has_transformers():
        import transformers.utils.chat_template_utils  # noqa: F401  # its time does not count

    def _answer(question: Mapping[str, Any], _content: object) -> dict[str, object]:
        """Render each of the chats of a question."""
        return {"answers": [_render(question["template"], **chat) for chat in question["chats"]]}

    answer_questions(_answer)
