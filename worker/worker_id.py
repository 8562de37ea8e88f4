"""A worker's name, new at every start of its process."""

import os
import secrets
import socket


def new_worker_id() -> str:
    """A name that no other worker has or had: host, process and something random."""
    return f"{safe_name(socket.gethostname())}-{os.getpid()}-{secrets.token_hex(4)}"


def safe_name(hostname: str) -> str:
    """A host's name, cut and made to fit a consumer's name."""
    return "".join(char if char.isascii() and (char.isalnum() or char in "_.-") else "-" for char in hostname[:32])
