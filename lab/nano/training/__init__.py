"""How the model that ships is trained: `python -m lab train`."""
