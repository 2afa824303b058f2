"""The server: OpenAI's API over the embedded engine, a chunk API, metrics, and a page to try it on."""
