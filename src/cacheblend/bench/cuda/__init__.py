"""What blending brings on a GPU, in one run: `bench cuda`."""
