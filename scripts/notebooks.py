"""Runs the notebooks of examples/ anew and keeps their outputs, without what tells of the machine.

python scripts/notebooks.py [NAME ...]          (all if none is named; needs `pip install ".[dev]"`)
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def main() -> None:
    """See the module's text."""
    for path in [FOLDER / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}).execute()
        for cell in notebook.cells:
            cell.metadata = {}
        notebook.metadata = METADATA
        nbformat.write(notebook, path)
        print(path.name)


if __name__ == "__main__":
    main()
