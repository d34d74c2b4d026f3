"""Runs first in every Python of the one file, children's too."""

import os
import sys

CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Red Hat
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # Alpine
)


def _stay():
    """Nobody removes the folder while this process lives: the lock goes with it."""
    import fcntl

    try:
        descriptor = os.open(f"{sys.base_prefix}.lock", os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        pass  # a file system without locks: there nobody removes anything


def _trust():
    """Whom TLS trusts: this machine's list, wherever its system has it; our own where there is none."""
    if not os.environ.get("SSL_CERT_FILE") and not os.environ.get("SSL_CERT_DIR"):
        ours = os.path.join(os.path.dirname(__file__), "site-packages/pip/_vendor/certifi/cacert.pem")
        found = next((place for place in CERTIFICATES if os.path.exists(place)), ours)
        os.environ["SSL_CERT_FILE"] = found


_stay()
_trust()
