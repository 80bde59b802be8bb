"""Other projects' test suites, run over kernels and jobs that are ours: ``make test-peers``."""
