"""Rounds a model to int4 with the help of a text, once, and writes it as a checkpoint.

Workers know nothing of it: they read a checkpoint whose weights lie on int4's grid, and keep them.
"""
