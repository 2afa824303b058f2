"""Prefills and stores on one machine, and what compression does to answers."""
