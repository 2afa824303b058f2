"""How the model that ships is trained. Runs from a checkout only: it is not part of the wheel.

python -m training.train --out FOLDER --seed 2
"""
