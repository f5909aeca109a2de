"""`python -m stage`."""

from .cli import main

main()
