"""What an engine fills in (`runner`: its layers, one at a time), and attention weights for those who look at them."""
