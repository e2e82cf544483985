"""Whether certificate and key files serve for TLS. Files in, an error out; nothing else."""

from __future__ import annotations

import ssl
from pathlib import Path

from llmc.artifacts.errors import UsageError


def check_tls(certificate: Path | None, key: Path | None) -> None:
    """Raises UsageError where one is missing, cannot be read, or they do not belong together."""
    if certificate is None:
        if key is not None:
            raise UsageError("--ssl-keyfile needs --ssl-certfile beside it")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty pass phrase: without one, OpenSSL would ask for it on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        files = f"--ssl-certfile {certificate}" + (f", --ssl-keyfile {key}" if key is not None else "")
        hint = "PEM files that belong together are needed, the key without a pass phrase"
        raise UsageError(f"{files}: cannot be loaded: {error}; {hint}") from error
