"""The local runtime: carries out a plan as supervised processes on this machine."""
