"""Where a context keeps its models: ``get_model(model_id)``, or an attribute path such as
``env.transform[0].module``."""

from __future__ import annotations

from typing import Any

__all__ = ["resolve_model"]


def resolve_model(context: Any, model_id: str | None) -> Any:
    """The model that a context knows under this name: ``context.get_model(model_id)``, else the attribute path.

    Raises:
        ValueError: it knows none.
    """
    get_model = getattr(context, "get_model", None)
    if get_model is not None:
        model = get_model(model_id)
        if model is not None:
            return model
    target = context
    for name in (model_id or "").replace("[", ".[").split("."):
        try:
            target = target[_index(name[1:-1])] if name.startswith("[") else getattr(target, name)
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"{type(context).__name__} has no model {model_id!r}: {error}") from error
    return target


def _index(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text.strip("'\"")
