"""When kernels that nobody uses are put to sleep or hibernated by themselves, or all of them before a machine goes."""
