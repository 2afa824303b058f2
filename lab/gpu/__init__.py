"""What blending brings on a GPU, in one run: `lab cuda`."""
