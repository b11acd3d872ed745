"""Record a function once, run it as a graph."""
