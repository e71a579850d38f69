"""The kvasir command; thin over the components."""
