"""Operations on tensors: each in plain PyTorch, which serves everywhere, and as a kernel for devices that have one."""
