"""Cluster engines: Slurm, Ray, Kubernetes."""
