"""Where a context keeps its models: ``get_model(model_id)``, or an attribute path such as
``env.transform[0].module``."""

from __future__ import annotations

import logging
import re
from typing import Any

__all__ = ["find_model", "follow", "resolve_model"]

logger = logging.getLogger("asyncsync")

_STEP = re.compile(
    r"""(?:^|\.)(?P<name>[^.\[\]]+) | \[(?P<index>-?\d+)\]
      | \[(?P<quote>['"])(?P<key>.*?)(?P=quote)\] | \[(?P<bare>[^\]]+)\]""",
    re.VERBOSE,
)


def resolve_model(context: Any, model_id: str | None) -> Any:
    """The model that a context knows under this name: ``context.get_model(model_id)``, else the attribute path.

    Raises:
        ValueError: it knows none.
    """
    model, reason = _look(context, model_id)
    if model is not None:
        return model
    kind = type(context).__name__
    kind = "the context" if kind.startswith("_") else kind
    if not model_id:
        raise ValueError(
            f"{kind} cannot tell which model is meant: pass model_id (a name for its get_model(), or an attribute path)"
        )
    hint = "get_model() does not know it either" if hasattr(context, "get_model") else "it has no get_model()"
    raise ValueError(f"{kind} has no model {model_id!r}: {reason}; {hint}") from reason


def find_model(context: Any, model_id: str | None) -> Any:
    """The model that a context knows under this name; None: there is none, or no context."""
    return None if context is None else _look(context, model_id)[0]


def _look(context: Any, model_id: str | None) -> tuple[Any, Exception | None]:
    """The model, or why there is none."""
    get_model = getattr(context, "get_model", None)
    if get_model is not None:
        try:
            model = get_model(model_id)
        except LookupError as error:
            logger.debug("%s.get_model(%r) raised %r", type(context).__name__, model_id, error)
        else:
            if model is not None:
                return model, None
    if not model_id:
        return None, None
    try:
        return follow(context, model_id), None
    except (AttributeError, LookupError, TypeError) as error:
        return None, error


def follow(target: Any, path: str) -> Any:
    """What an attribute path leads to: names, ``[0]`` and ``['key']``, from this object on. Nothing is evaluated.

    Raises:
        AttributeError, LookupError, TypeError: it leads nowhere.
    """
    position = 0
    while position < len(path):
        step = _STEP.match(path, position)
        if step is None or path.startswith("."):
            raise AttributeError(f"{path!r} is no attribute path: {path[position:]!r} is neither a name nor an index")
        position = step.end()
        if (name := step["name"]) is not None:
            target = getattr(target, name)
        elif (index := step["index"]) is not None:
            target = target[int(index)]
        else:
            target = target[step["key"] if step["bare"] is None else step["bare"]]
    return target
