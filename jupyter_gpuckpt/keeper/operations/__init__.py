"""What a keeper does with its kernel: each operation's steps, to be read from top to bottom."""
