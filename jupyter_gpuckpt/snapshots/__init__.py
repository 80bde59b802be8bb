"""What a snapshot says of the kernel in it: whose it is, what it needs, what changed since another."""
