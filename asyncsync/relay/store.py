"""The store: a relay's newest weights in a file, from which it serves its workers when the trainer is away.

The file is of the safetensors format, and its tensors are those that were published, by their dotted names (of several
models, behind the model's name): anybody can read it. What the format has no place for is in its metadata, as texts:
epoch, versions, layouts, and other names of tied weights. It is written under another name first, so that it is always
whole.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from pathlib import Path

from asyncsync.errors import ProtocolError
from asyncsync.relay.passing import Kept
from asyncsync.weights import files
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab
from asyncsync.weights.tree import Path as KeyPath
from asyncsync.weights.tree import dotted
from asyncsync.wire.messages import Epoch

KEY = "asyncsync"


def _name(model_id: str, path: KeyPath, *, alone: bool) -> str:
    return dotted(path) if alone else f"{model_id}.{dotted(path)}"


def save(path: Path, epoch: Epoch, kept: Kept) -> None:
    """Write the file anew. Raises OSError; ValueError: the format has no such dtype, or two tensors have one name."""
    tensors, texts, models = {}, {"format": "pt"}, {}
    alone = len(kept) == 1
    for model_id, (version, slab, metadata) in kept.items():
        entries = slab.layout.entries
        for entry, view in zip(entries, slab.views, strict=True):
            if (name := _name(model_id, entry.path, alone=alone)) in tensors:
                raise ValueError(f"several tensors have one name in a file: {name}")
            tensors[name] = view
        for other, i in slab.layout.aliases.items():
            texts[_name(model_id, other, alone=alone)] = _name(model_id, entries[i].path, alone=alone)
        binary = {"layout": slab.layout.encoded, "digest": slab.layout.digest, "values": slab.values}
        texts_of = {name: b64encode(value).decode() for name, value in {**binary, "metadata": metadata}.items()}
        models[model_id] = {"version": version, "origin": slab.origin, **texts_of}
    texts[KEY] = json.dumps({"epoch": epoch, "models": models})
    files.write(path, tensors, texts)


def load(path: Path) -> tuple[Epoch, Kept] | None:
    """What the file holds, each slab with one reference; None: there is no file. Removes what a killed relay has left
    half written. Raises OSError; ValueError: it is not one of a relay's."""
    files.remove_half_written(path)
    if not path.exists():
        return None
    tensors, texts = files.read(path)
    kept: Kept = {}
    try:
        found = json.loads(texts[KEY])
        start, drawn = found["epoch"]
        alone = len(found["models"]) == 1
        for model_id, model in found["models"].items():
            blobs = {name: b64decode(model[name]) for name in ("layout", "digest", "values", "metadata")}
            layout = Layout.decode(blobs["layout"], blobs["digest"])
            slab = Slab.of(layout)
            for entry, view in zip(layout.entries, slab.views, strict=True):
                view.copy_(tensors[_name(model_id, entry.path, alone=alone)])
            slab.values, slab.origin = blobs["values"], model["origin"]
            kept[model_id] = int(model["version"]), slab, blobs["metadata"]
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ProtocolError) as error:
        raise ValueError(f"{path} is not a file that a relay has kept: {error!r}") from error
    return (int(start), int(drawn)), kept
