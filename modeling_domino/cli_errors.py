"""How the command line says that something went wrong."""

import sys
from contextlib import contextmanager

import typer


@contextmanager
def plain_errors(command: str = "domino"):
    """One sentence and exit code 2 for what a user can mend; a traceback only for what is our fault."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


__all__ = ["plain_errors"]
