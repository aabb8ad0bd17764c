"""What TorchRL's classes have, read from its source: importing it takes seconds, and warns."""

import ast
import importlib.util
from pathlib import Path


def _class(module: str, name: str) -> ast.ClassDef:
    """A class of a module below torchrl, such as ``collectors/_base.py``."""
    root = importlib.util.find_spec("torchrl")
    tree = ast.parse((Path(root.origin).parent / module).read_text())
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def parameters(module: str, name: str) -> dict[str, set[str]]:
    """Of each method that the class defines, public ones and the constructor, its parameters' names."""
    functions = [node for node in _class(module, name).body if isinstance(node, ast.FunctionDef)]
    return {
        node.name: {one.arg for one in [*node.args.args, *node.args.kwonlyargs]}
        for node in functions
        if node.name == "__init__" or not node.name.startswith("_")
    }


def fields(module: str, name: str) -> set[str]:
    """The fields of a dataclass."""
    body = _class(module, name).body
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
