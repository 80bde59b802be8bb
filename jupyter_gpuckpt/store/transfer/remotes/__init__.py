"""The places that snapshots are sent to and fetched from: one module a kind of place."""
