"""The cluster's runtime: what a ModelService becomes in Kubernetes, and how it is kept so.

names, objects and plan are pure; client, workers and handlers act.
"""
