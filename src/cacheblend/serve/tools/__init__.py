"""Tool calls: what a request says of its tools, and the calls that a model writes into its answer's text."""
