"""Other engines, each run by its own Python in its own environment, for comparison."""
