"""Workloads, load generator and reports behind `kvasir bench`."""
