"""When kernels that nobody uses are put to sleep, hibernated or ended by themselves, or all before a machine goes."""
