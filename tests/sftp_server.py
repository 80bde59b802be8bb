"""A server of SFTP for tests, at a free port: ``sftp_server.py FOLDER``.

It makes a key of its own, and in FOLDER/home/.ssh what somebody has who knows the server and is known to it: one may
log in with that key, or with the password of the tests.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import asyncssh
from remote_servers import SECRET


class Server(asyncssh.SSHServer):
    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return password == SECRET


async def serve(folder: Path) -> None:
    os.chdir(folder)  # where everybody's home is
    own, person = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    ssh = folder / "home/.ssh"
    ssh.mkdir(parents=True, mode=0o700)
    person.write_private_key(ssh / "id_ed25519")
    person.write_public_key(folder / "allowed")
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    (ssh / "known_hosts").write_text(f"[127.0.0.1]:{listening.getsockname()[1]} {own.export_public_key().decode()}")
    listener = await asyncssh.listen(
        sock=listening,
        server_factory=Server,
        server_host_keys=[own],
        authorized_client_keys=str(folder / "allowed"),
        sftp_factory=True,
    )
    await listener.wait_closed()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
