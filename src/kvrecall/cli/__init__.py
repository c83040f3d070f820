"""The command line: one file per verb."""

from __future__ import annotations

import sys

from kvrecall.cli.process import EXIT_ERROR, EXIT_INTERRUPTED, discard_stdout, open_streams, wait_passively
from kvrecall.core.errors import install_command


def main() -> None:
    """Entry point of the `kvrecall` script."""
    wait_passively()
    try:
        from kvrecall.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        print(f"error: the command line needs typer and rich. Run {install_command('cli')}.", file=sys.stderr)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    open_streams()
    try:
        app()
    except OSError as error:  # from help texts; verbs report their own errors
        discard_stdout()
        print(f"error: {error.strerror or error}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
