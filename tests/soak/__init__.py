"""A server under mixed load for a long time: `python -m tests.soak --minutes 30`, or `make soak MINUTES=30`."""
