"""Workloads, measurements and the models to measure on."""
