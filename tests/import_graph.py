"""Which module of the package imports which, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

Graph = dict[str, set[str]]


def graphs(package: Path, types: bool = False) -> tuple[Graph, Graph]:
    """Imports between the modules of a package, by dotted names: those that run with the module, and those inside functions.

    What stands under `if TYPE_CHECKING` never runs and is in neither, or among the first with `types`.
    """
    modules = {_name(path, package): path for path in sorted(package.rglob("*.py"))}
    loaded: Graph = {name: set() for name in modules}
    called: Graph = {name: set() for name in modules}
    for name, path in modules.items():
        for node, inside in _imports(ast.parse(path.read_text()), False, types):
            (called if inside else loaded)[name].update(_targets(node, modules) - {name})
    return loaded, called


def by_folder(graph: Graph) -> Graph:
    """The same between the folders and files at the top of the package."""
    found: Graph = {}
    for name, targets in graph.items():
        found.setdefault(_top(name), set()).update({_top(target) for target in targets} - {_top(name)})
    return found


def cycle(graph: Graph) -> list[str]:
    """One cycle of imports, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def reaches(graph: Graph, start: str, end: str) -> bool:
    """Whether `start` imports `end`, itself or through others."""
    seen, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name == end:
            return True
        if name not in seen:
            seen.add(name)
            waiting += graph.get(name, ())
    return False


def _name(path: Path, package: Path) -> str:
    return ".".join([package.name, *path.relative_to(package).with_suffix("").parts]).removesuffix(".__init__")


def _top(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _targets(node: ast.Import | ast.ImportFrom, modules: dict[str, Path]) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & set(modules)
    inner = {f"{node.module}.{alias.name}" for alias in node.names}
    return {name if name in modules else str(node.module) for name in inner} & set(modules)


def _imports(node: ast.AST, inside: bool, types: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if not types and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, inside
        yield from _imports(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef), types)
