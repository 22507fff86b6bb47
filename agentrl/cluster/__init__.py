"""Runtimes: Ray actors on a cluster, or plain objects in this process. The only package that imports ray."""
