"""Every use of vLLM's internals, which each version of it may move. Imports nothing of it by itself.

interface: the connector's interface, requests, events, what is refused
decoder, weight_loader: the loaded model; attention_shim: its attention; lora: adapters
kv_cache, prefix_cache: types of numbers in its cache; groups, and vLLM's own prefix cache
tensor_parallel: ranks

`versions.TESTED` holds the versions that the connector starts on, docs/vllm-reference.md what was run on each.
"""
