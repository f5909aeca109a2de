"""`python -m screen`: in an active environment the script `screen` hides GNU screen, this does not."""

from .cli import main

main()
