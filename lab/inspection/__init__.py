"""Measures and draws what blending does to one prompt."""
