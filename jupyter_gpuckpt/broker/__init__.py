"""The broker: a root service that does for ordinary users the few things of a save and a restore that need root.

Everything here runs as root, or gives root up; `docs/security.md` says what it is trusted with. It imports little, and
a user's input reaches it in two ways alone: requests (`deputy`), and the images of a restore (`images`).
"""
