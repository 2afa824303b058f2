"""The generator of the texts that the model that ships was trained on, and its training."""
