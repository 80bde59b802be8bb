"""What is said at the broker's socket.

Every connection to the broker's socket is a deputy of its own, for one sleeper. Messages are JSON, one a packet
(``SOCK_SEQPACKET``), and files travel as descriptors, which the caller has opened with the caller's own rights. There
is no way to name a path, an option or a program. A request is ``{"do": VERB, ...}``; the answer is ``{"done": value}``
or ``{"error": GpuckptError.as_dict()}``, before which there may be ``{"started": pid}``, or ``{"prove": pid}``: that is
answered with ``{"proof": text}``, which stands as `PROOF` in the environment of that process of the same user.

==========  ==================  ===========================  ============================================
verb        arguments           descriptors                  value
==========  ==================  ===========================  ============================================
criu                                                         version and program of the criu that is used
start                           run folder, bound socket     the pid of a new sleeper
hold        pid                                              true: an earlier deputy started that sleeper
next_pid    after                                            true
dump        pid, left, seconds  images, snapshot folders     criu's exit status
check                           images folder                true: a restore of these would not be refused
restore     left, seconds       images folder                criu's exit status
==========  ==================  ===========================  ============================================
"""

from __future__ import annotations

__all__ = ["MESSAGE_LIMIT", "PROOF"]

MESSAGE_LIMIT = 64 << 10
"""The longest message, in bytes."""
PROOF = "GPUCKPT_PROOF"
"""The variable, in a process's environment, that proves whose it is."""
