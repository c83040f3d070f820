"""Exit codes of the command line."""

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
"""A shell's exit code for a program ended by SIGPIPE."""
