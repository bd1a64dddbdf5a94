"""The command `echelon`, which is also `python -m echelon`."""

import sys


def main() -> None:
    """Load the command, which takes seconds, and run it; an interrupt meanwhile ends it without a trace of calls."""
    try:
        from echelon.cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
