"""Blending inside unmodified vLLM, as a KV connector. Importing this imports no vLLM."""
