"""Servers as their clients see them: ours, and vLLM with the plug-in and without."""
