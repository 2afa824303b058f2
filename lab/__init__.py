"""How the figures in docs/results are made: `python -m lab NAME`, from the root of a checkout after `make lab`."""
