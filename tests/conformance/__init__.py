"""Every client plays the same scenarios against the same server; see clients/conformance."""
