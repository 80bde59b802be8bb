"""Judge the machine, and install what it lacks: CRIU, rights, namespaces, driver, store."""
