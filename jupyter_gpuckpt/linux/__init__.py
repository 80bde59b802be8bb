"""What Linux gives: processes, namespaces, ports, sockets, folders. It knows nothing else of this package."""
