"""What runs models. Modules here are shared by the engines `hf` and `vllm`, which do not import each other."""
