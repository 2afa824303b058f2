"""Stored KV to the device and back: layers streamed ahead of the layer loop, keys moved to their positions, and
computed KV made into blocks for the store."""
