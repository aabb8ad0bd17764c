"""Where a sender's weights come from: an argument of the call, the registered source, or a context. A context has a
method ``get_model(model_id)``, or has its models under attribute paths such as ``env.transform[0].module``."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from asyncsync.schemes.torchrl import TorchRLContext
from asyncsync.weights.tree import FlatWeights, Path

logger = logging.getLogger("asyncsync")

_STEP = re.compile(
    r"""(?:^|\.)(?P<name>[^.\[\]]+) | \[(?P<index>-?\d+)\]
      | \[(?P<quote>['"])(?P<key>.*?)(?P=quote)\] | \[(?P<bare>[^\]]+)\]""",
    re.VERBOSE,
)


class Sources:
    """The sources of one model's weights, from the arguments of ``init_on_sender``. ``registered``: the model, or the
    weights; None: neither was given. Raises ValueError for several sources, or for ``weights`` that look like
    ``{worker_idx: weights}``."""

    def __init__(
        self,
        model_id: str | None = None,
        context: Any = None,
        params_map: Mapping[int, Any] | None = None,
        weights: Any = None,
        model: Any = None,
        device_map_fn: Callable[[int, Any], Any] | None = None,
    ) -> None:
        given = [n for n, v in (("params_map", params_map), ("weights", weights), ("model", model)) if v is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; give one source of weights")
        if is_per_worker(weights) and any(map(is_plain_dict, weights.values())):
            raise ValueError(
                f"weights has the keys {sorted(weights)}: pass {{worker_idx: weights}} as params_map; one dict for all "
                "workers must have strings as keys"
            )
        self.model = model
        self.weights = weights if params_map is None else dict(params_map)
        self.registered = self.weights if model is None else model
        self.device_map_fn = device_map_fn
        self.is_params_map = params_map is not None
        self.model_id = model_id
        self.context = context

    def count_workers(self, num_workers: int | None, devices: Sequence[Any] | None, known: int | None) -> int | None:
        """The number of workers by the arguments of ``init_on_sender``, else by the context; None: neither tells.
        ``known``: the number that the bus has already. Raises ValueError if the arguments contradict each other."""
        if self.device_map_fn is not None and devices is not None:
            raise ValueError("devices and device_map_fn exclude each other")
        params_map = self.weights if self.is_params_map else None
        for name, entries in (("devices", devices), ("params_map", params_map)):
            if entries is not None:
                if num_workers not in (None, len(entries)):
                    raise ValueError(f"{name} has {len(entries)} entries, but num_workers={num_workers}")
                num_workers = len(entries)
        if params_map is not None and set(params_map) != set(range(len(params_map))):
            raise ValueError(f"params_map must have the keys 0 to {len(params_map) - 1}, not {sorted(params_map)}")
        if num_workers is None:
            num_workers = getattr(self.context, "num_workers", None)
        if self.device_map_fn is not None and num_workers is None and known is None:
            raise ValueError("device_map_fn needs num_workers")
        return num_workers

    def has_default(self) -> bool:
        """Whether ``send()`` without an argument has weights to send."""
        if self.registered is not None:
            return True
        if hasattr(self.context, "get_model") and not isinstance(self.context, TorchRLContext):
            return True
        return find_model(self.context, self.model_id) is not None

    def resolve(self, weights: Any, model_id: str | None, context: Any) -> Any:
        """The source that an argument names: None names the registered source or the context's model, a string a path
        in the context, anything else itself. Raises ValueError if there is no such source."""
        if weights is None:
            weights = self.registered
        if weights is None and context is not None:
            weights = resolve_model(context, model_id)
        if isinstance(weights, str):
            if context is None:
                raise ValueError(
                    f"there is no model {weights!r}: a string is a path in the context, and init_on_sender() had none"
                )
            weights = resolve_model(context, weights)
        if weights is None:
            raise ValueError(
                "there are no weights to send: pass some, or register a model, weights or context with init_on_sender()"
            )
        return weights

    def given(self, weights: Any, workers: list[int] | None, count: int | None) -> Any:
        """The argument ``weights`` of a call for these ``workers``, or the registered dict if it is None; of weights
        for single workers, only those. ``count``: how many workers there are, if that is fixed. Raises ValueError if
        the argument has weights for single workers, but not for these."""
        if weights is None and self.model is None and isinstance(self.weights, dict):
            weights = self.weights
            if workers is not None and is_per_worker(weights):
                weights = {worker: given for worker, given in weights.items() if worker in workers}
        if not is_per_worker(weights):
            return weights
        known = range(max(weights) + 1 if count is None else count)
        if wrong := [w for w in weights if w not in known or (workers is not None and w not in workers)]:
            raise ValueError(f"weights for workers {sorted(wrong)}, which do not exist or are not among worker_ids")
        if without := sorted(set(workers or ()) - weights.keys()):
            raise ValueError(f"worker_ids names workers {without}, for which there are no weights")
        return weights

    def check_integer_keys(self, plain: list[int], flat: Mapping[int, FlatWeights], known: set[Path]) -> None:
        """Raise ValueError if one of the ``plain`` dicts has no key of this model: what looks like ``{worker_idx:
        weights}`` may be one dict with integer keys then, such as an optimiser's state."""
        if wrong := [worker for worker in plain if known.isdisjoint(flat[worker].keys())]:
            raise ValueError(
                f"weights has the keys {sorted(flat)}: is it {{worker_idx: weights}}, or one dict, such as an "
                f"optimiser's state? The dicts under {wrong} have no key in common with {self.model_id!r} as it was "
                "sent or registered. To send each worker its own weights, pass modules, TensorDicts, or params_map= of "
                "init_on_sender(). To send one dict to all workers, use strings as its keys"
            )


def is_per_worker(weights: Any) -> bool:
    """Whether these are ``{worker_idx: weights}``."""
    return is_plain_dict(weights) and len(weights) > 0 and all(isinstance(key, int) for key in weights)


def is_plain_dict(weights: Any) -> bool:
    """Whether this is a mapping, but neither a module nor a TensorDict."""
    return isinstance(weights, Mapping) and not isinstance(weights, TensorDictBase | nn.Module)


# -- contexts ---------------------------------------------------------------------------------------------------------


def resolve_model(context: Any, model_id: str | None) -> Any:
    """The model that the context has under this name: ``context.get_model(model_id)``, else the attribute path. Raises
    ValueError if it has none."""
    model, reason = _look_up_model(context, model_id)
    if model is not None:
        return model
    kind = type(context.target if isinstance(context, TorchRLContext) else context).__name__
    kind = "the context" if kind.startswith("_") else kind
    if not model_id:
        raise ValueError(
            f"{kind} cannot tell which model is meant: pass model_id (a name for its get_model(), or an attribute path)"
        )
    hint = "get_model() does not know it either" if hasattr(context, "get_model") else "it has no get_model()"
    if isinstance(context, nn.Module):
        hint += "; if this is the model itself, pass it as model="
    raise ValueError(f"{kind} has no model {model_id!r}: {reason}; {hint}") from reason


def find_model(context: Any, model_id: str | None) -> Any:
    """The model that the context has under this name; None: it has none, or there is no context."""
    return None if context is None else _look_up_model(context, model_id)[0]


def _look_up_model(context: Any, model_id: str | None) -> tuple[Any, Exception | None]:
    """The model; or None, and the exception that tells why, if there was one."""
    get_model = getattr(context, "get_model", None)
    if get_model is not None:
        try:
            model = get_model(model_id)
        except LookupError as error:
            if isinstance(context, TorchRLContext):
                return None, error
            logger.debug("%s.get_model(%r) raised %r", type(context).__name__, model_id, error)
        else:
            if model is not None:
                return model, None
    if not model_id:
        return None, None
    try:
        return follow_path(context, model_id), None
    except (AttributeError, LookupError, TypeError) as error:
        return None, error


def follow_path(target: Any, path: str) -> Any:
    """The object at the end of an attribute path that starts at ``target``. The path has names, ``[0]`` and
    ``['key']``; nothing in it is evaluated. Raises AttributeError, LookupError or TypeError if it leads nowhere."""
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
