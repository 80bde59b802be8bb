"""The machine's files that a kernel uses: which a snapshot needs, which it keeps, and putting these in place."""
