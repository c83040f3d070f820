"""The command line: one file per verb, none of which knows how a stage works."""

from __future__ import annotations

import sys

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


def main() -> None:
    """Entry point of the `kvrecall` script."""
    try:
        from kvrecall.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        print('error: the command line needs typer and rich. Run `pip install "kvrecall[cli]"`.', file=sys.stderr)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    app()
