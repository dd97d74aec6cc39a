"""Generated sequences that several tasks read: probes, and Long Range Arena as documents."""
