"""Which files of the package use private names of other folders, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def defined(files: list[Path]) -> set[str]:
    """Names that these files give to functions, classes, variables and attributes of `self`."""
    return {name for path in files for node in ast.walk(ast.parse(path.read_text())) if (name := _given(node))}


def used(path: Path) -> Iterator[tuple[str, bool]]:
    """Private names that a file takes from objects and modules, and whether from `self`, `cls` or `super()`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and _private(node.attr):
            yield node.attr, ast.unparse(node.value) in ("self", "cls", "super()")
        if isinstance(node, ast.ImportFrom):
            yield from ((alias.name, False) for alias in node.names if _private(alias.name))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            of, name = ast.unparse(node.args[0]), node.args[1]
            if isinstance(name, ast.Constant) and _private(str(name.value)):
                yield str(name.value), of == "self"


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _given(node: ast.AST) -> str | None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    own = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    return node.attr if own and isinstance(node, ast.Attribute) else None
