"""Probes: small generated tasks that tell mixers apart."""
