"""The worker side, in each of vLLM's worker processes: fills the paged cache and captures chunks."""
