"""The method: plan a prompt, load stored KV, select rows, run layers, fuse. Knows tensors and the protocols that stores
and engines implement; knows no engine, no file format and no terminal."""
