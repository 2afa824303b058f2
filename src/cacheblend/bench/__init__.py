"""Speed on a user's own machine: prefills, stores and servers, as tables and as JSON."""
