"""Torch's own DistributedTest, run against a backend of choice in ranks that stay alive."""
