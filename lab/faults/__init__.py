"""Faults on purpose in vLLM with the plug-in, and what becomes of the requests: the programs of `run`.

Each child process holds one engine in its own process (`engine`), so that it decides which requests arrive in which
engine step, and writes one JSON line for each trial. `injection` raises errors and delays inside the workers.
"""
