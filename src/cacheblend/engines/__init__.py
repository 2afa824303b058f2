"""What runs models. Here lies what two engines share; `hf` and `vllm` do not know each other."""
