"""What an engine fills in (`runner`: its layers, one at a time), and attention of any rows of a prompt."""
