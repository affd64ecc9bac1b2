"""Prometheus metrics on an address of their own (`--metrics`). `collector` has the names, `http` the listener."""
