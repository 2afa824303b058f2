"""The server's routes, one module per subject; each adds its routes to an app, over a `ServerState`."""
