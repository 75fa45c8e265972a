"""Renders a chat template in a process of its own: the program of :func:`~.chat_templates.rendered_chat`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from winml.modelkit.ort.processes import answer_questions


def _render(template: str, messages: list[dict[str, object]], variables: Mapping[str, Any]) -> dict[str, str]:
    """Render a chat template; return ``text``, or ``error`` if the template fails."""
    # Does not import torch.
    from transformers.utils.chat_template_utils import render_jinja_template

    from winml.modelkit.errors import first_line

    try:
        rendered: Any = render_jinja_template(  # declared as text, and is a list of them with their indices
            [messages], chat_template=template, add_generation_prompt=True, **variables
        )
        return {"text": str(rendered[0][0])}
    except Exception as error:  # a template is code of the model's author and may raise any error
        return {"error": first_line(error)}


if __name__ == "__main__":
    import transformers.utils.chat_template_utils  # noqa: F401  # its time does not count

    answer_questions(lambda question, _content: _render(**question))
