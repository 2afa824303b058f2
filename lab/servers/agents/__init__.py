"""`lab agent`: an agent of many turns, as its server's clients see it."""
