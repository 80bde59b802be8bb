"""What can be done with a kernel and its snapshots: each operation is described here, once.

`requests` has the description of each: its arguments with the words for people, where each of them is offered, and what
it waits for. From it come the keeper's requests and its queue, what ``%gpuckpt`` and ``jupyter gpuckpt`` read, and what
the REST API takes. How an operation is done is written elsewhere (`keeper.operations`).
"""
