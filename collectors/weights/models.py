"""Models: what a model id means to a collector, and weights that are copied into such a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase

from asyncsync.model.binding import Binding
from asyncsync.model.strategy import WeightStrategy, flat_weights
from asyncsync.model.update import Prepared
from asyncsync.schemes.context import follow

__all__ = ["belongs_to", "find_model", "fitted"]


def belongs_to(owner: str, model_id: str) -> bool:
    """Whether this is the model called ``owner``, or a path into it."""
    return model_id == owner or model_id.startswith((f"{owner}.", f"{owner}["))


def find_model(collector: Any, model_id: str, policy: Any) -> Any:
    """The model of this name: ``"policy"``; an attribute path from the collector, such as ``postproc`` or
    ``env.transform[0].module``; or one from the policy, such as ``actor`` for ``policy.actor``.

    Args:
        collector: whose model.
        model_id: its name.
        policy: which of the collector's policies is meant: the one that acts, or the one that was registered.

    Raises:
        LookupError: there is none.
    """
    kind = type(collector).__name__
    ways = [(collector, model_id), (policy, model_id)]
    if belongs_to("policy", model_id):
        if policy is None:
            raise LookupError(
                f"this {kind} has no policy in this process: pass the weights to send, or give the constructor a policy"
            )
        ways = [(policy, model_id.removeprefix("policy").removeprefix("."))]
    for start, path in ways:
        try:
            return follow(start, path)
        except (AttributeError, LookupError, TypeError):
            continue
    raise LookupError(
        f"{kind} has no model {model_id!r}: a model id is 'policy', an attribute path from the policy ('actor' for "
        "policy.actor), or one from the collector ('env.transform[0].module', 'postproc')"
    )


def fitted(model: Any, source: Any) -> Prepared | None:
    """What copies these weights into the model, checked; None: the model is their source itself.

    Raises:
        SchemaMismatch: they do not fit.
    """
    if source is model:
        return None
    is_state_dict = isinstance(source, Mapping) and not isinstance(source, TensorDictBase)
    strategy = WeightStrategy("state_dict" if is_state_dict else "tensordict")
    prepared = Binding(model, strategy).prepare_flat(flat_weights(strategy, source))
    prepared.resolve()
    return prepared
