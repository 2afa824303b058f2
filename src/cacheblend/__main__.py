"""`python -m cacheblend`: the command line, without an installed script."""

from cacheblend.cli import main

main()
