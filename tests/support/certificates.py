"""Certificates for TLS tests, made by OpenSSL's command: elliptic curves, which take no time."""

import subprocess
from pathlib import Path


class Authority:
    """Signs certificates; ``file`` is its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.file = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        _openssl(
            "req", "-x509", *_new_key(self._key), "-subj", f"/CN={name}", "-days", "2",
            "-out", str(self.file),
        )  # fmt: skip

    def issue(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Return certificate and key of *name*, good for localhost and 127.0.0.1."""
        certificate, key, request = (folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        extensions = folder / f"{name}.ext"
        extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        _openssl("req", *_new_key(key), "-subj", f"/CN={name}", "-out", str(request))
        _openssl(
            "x509", "-req", "-in", str(request), "-CA", str(self.file), "-CAkey", str(self._key),
            "-CAcreateserial", "-days", "2", "-extfile", str(extensions),
            "-out", str(certificate),
        )  # fmt: skip
        return certificate, key


def _new_key(path: Path) -> list[str]:
    return [
        "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(path),
    ]  # fmt: skip


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)
