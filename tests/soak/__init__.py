"""Mixed traffic for a long time on tiny models: `make soak MINUTES=30`."""
