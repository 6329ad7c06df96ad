"""What several test folders share: tiny checkpoints, the oracle's answers, and servers run as real processes."""
