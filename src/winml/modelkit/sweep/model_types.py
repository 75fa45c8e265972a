"""Which model types does transformers have, and what does a name stand for?"""

from __future__ import annotations

from winml.modelkit.errors import UsageError
from winml.modelkit.load.checkpoints.task import canonical_task
from winml.modelkit.options import nearest

__all__ = ["model_types"]

_ALL = "*"
_GENERATION = "text-generation"


def model_types(name: str, task: str | None = None) -> tuple[str, ...]:
    """Return the model types that a name stands for.

    Args:
        name: A model type, or ``*`` for every one with a base model.
        task: Where it is one of models that generate text, ``*`` means every type with a class for that.

    Raises:
        UsageError: there is no such model type.
    """
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name == _ALL:
        generating = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        is_generating = task is not None and canonical_task(task) == _GENERATION
        return tuple(sorted(generating if is_generating else modeling_auto.MODEL_MAPPING_NAMES))
    if name not in CONFIG_MAPPING:
        guess = nearest(name, list(CONFIG_MAPPING.keys()))
        raise UsageError(
            f"random:{name}: transformers has no model type {name!r}",
            hint=f"Did you mean {guess!r}?" if guess else "random:* is every type.",
        )
    return (name,)
