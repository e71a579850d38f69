"""Fixtures that tests of every tier may ask for."""

pytest_plugins = ["cluster.fixtures"]
