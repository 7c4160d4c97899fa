"""TLS 1.3 between the hosts of a job, with a certificate derived from the token.

    context = make_context(token, server_side=True)    # on host 0
    context = make_context(token, server_side=False)   # on another host

Every host derives the same Ed25519 key and the same self-signed certificate, so no certificate has to be distributed. Both
sides of a connection present this certificate and accept no other certificate. Only hosts with the token can therefore
complete a handshake. TLS 1.3 creates new session keys for each connection: a recorded connection cannot be decrypted, even
with the token.
"""

import hmac
import os
import ssl
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from weft.errors import RendezvousError
from weft.launch.rendezvous import token_key
from weft.launch.scratch import scratch_folder

SERVER_NAME = "weft"
# A wide range, because the clocks of hosts need not agree.
VALID = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
GLOO_TRANSPORT = "GLOO_DEVICE_TRANSPORT"
GLOO_FILES = ("PKEY", "CERT", "CA_FILE")
PROBE = "import sys; import torch.distributed as dist; dist.ProcessGroupGloo.create_device(interface=sys.argv[1])"


def make_context(token: str, *, server_side: bool) -> ssl.SSLContext:
    """Create a TLS context that presents the certificate of the job and requires it from the other side.

    Raises:
        RendezvousError: the library `cryptography` is not installed.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if server_side:
        context.num_tickets = 0  # no session is resumed: each connection proves possession of the key
    # OpenSSL reads only files. The scratch folder is in memory, so that the key is never on a disk.
    with scratch_folder() as folder:
        file = folder / "launchers.pem"
        file.write_bytes(derive_identity(token, "launchers"))
        context.load_cert_chain(file)
        context.load_verify_locations(file)
    return context


def gloo_variables(token: str, folder: Path, interface: str) -> dict[str, str]:
    """Environment variables that make gloo encrypt the connections of ranks; empty if gloo of this PyTorch has no TLS.

    Args:
        folder: directory for the key, which must be private to this user and exist as long as ranks run.
        interface: network interface of this host.

    Raises:
        RendezvousError: the library `cryptography` is not installed.
    """
    file = folder / "ranks.pem"
    variables = {GLOO_TRANSPORT: "TCP_TLS"} | {f"{GLOO_TRANSPORT}_TCP_TLS_{name}": str(file) for name in GLOO_FILES}
    if not _has_gloo_transport(variables, interface):
        return {}
    file.write_bytes(derive_identity(token, "ranks"))
    return variables


def _has_gloo_transport(variables: dict[str, str], interface: str) -> bool:
    """True if gloo can create a device with these variables. Tried in a new process: gloo caches its first transport."""
    command = [sys.executable, "-c", PROBE, interface]
    return subprocess.run(command, env=os.environ | variables, capture_output=True).returncode == 0


def derive_identity(token: str, purpose: str) -> bytes:
    """Derive the Ed25519 private key and the self-signed certificate from the token, in PEM; the same bytes on every host.

    Args:
        purpose: "launchers" or "ranks". Their keys differ, so that a rank cannot impersonate a launcher.

    Raises:
        RendezvousError: the library `cryptography` is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    except ImportError:
        raise RendezvousError(
            "the library cryptography is not installed",
            where="cluster.encrypt = true",
            rule="cluster.encrypt needs it to create the TLS certificate",
            fix='pip install "weft-train[encrypt]" on every host, or set cluster.encrypt = false',
        ) from None
    seed = hmac.digest(token_key(token, "token of TLS"), f"weft TLS key of {purpose}".encode(), "sha256")
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, SERVER_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(VALID[0])
        .not_valid_after(VALID[1])
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .sign(key, None)
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return secret + certificate.public_bytes(Encoding.PEM)
