"""The scheduler side, in the process of vLLM's scheduler: what is looked up, claimed, named and captured."""
