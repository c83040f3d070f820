"""Prints the lowest releases that pyproject.toml allows, as constraints for pip, one `name==release` per line.

python -m venv lowest
lowest/bin/pip install torch==2.11.0
python scripts/lowest.py > lowest/constraints.txt
lowest/bin/pip install -e ".[demo,serve]" -c lowest/constraints.txt pytest hypothesis pytest-timeout pytest-benchmark triton
lowest/bin/python -m pytest tests/cli/test_options.py tests/models tests/layer tests/engine/test_serving.py
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

APART = {"torch", "vllm"}
"""torch is installed before, since a build for CPUs has a label of its own; vLLM has an environment of its own."""


def requirements(project: dict[str, Any]) -> list[str]:
    """Those of the package and of all extras that users install, but for names of other extras."""
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *(each for extra, names in extras.items() if extra != "dev" for each in names)]
    return [each for each in listed if not each.startswith("kvrecall[")]


def lowest(requirement: str) -> tuple[str, str] | None:
    """Name and lower bound of a requirement, None if it has no bound."""
    found = re.match(r"([\w-]+)(?:\[[\w,-]+\])?>=([\d.]+)", requirement)
    return (found[1], found[2]) if found else None


def main() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    for name, release in filter(None, map(lowest, requirements(tomllib.loads(text)["project"]))):
        if name not in APART:
            print(f"{name}=={release}")


if __name__ == "__main__":
    main()
