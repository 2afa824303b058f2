"""`lab peers`: other ways to reuse KV, on the same requests."""
