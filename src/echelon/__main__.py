"""`python -m echelon` is the command `echelon`."""

from echelon.cli import main

main()
