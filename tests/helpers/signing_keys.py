"""Keys and certificates for signatures, made when a test needs them."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

TERM = (-1, 1)  # days from now, in which a certificate is valid


def key_pair(
    folder: Path, curve: ec.EllipticCurve | None = None, password: bytes | None = None
) -> tuple[Path, Path]:
    """The files of a private key, and of its public key."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(curve or ec.SECP256R1())
    encryption: Any = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private, public = folder / "private.key", folder / "public.pem"
    private.write_bytes(key.private_bytes(pem, pkcs8, encryption))
    public.write_bytes(
        key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


def authority(
    folder: Path, name: str, term: tuple[int, int] = TERM
) -> tuple[Any, x509.Certificate, Path]:
    """The key of a certificate authority, its certificate, and the certificate's file."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    own = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = _certificate(own, own, key.public_key(), key, term, authority=True)
    path = folder / f"{name}.pem"
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return key, certificate, path


def signing_certificate(
    private: Path, issuer: tuple[Any, x509.Certificate, Path], term: tuple[int, int] = TERM
) -> Path:
    """The file of a certificate for the key in the file `private`."""
    key: Any = serialization.load_pem_private_key(private.read_bytes(), None)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a publisher")])
    certificate = _certificate(
        name, issuer[1].subject, key.public_key(), issuer[0], term, authority=False
    )
    path = private.with_name("certificate.crt")
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path


def _certificate(
    subject: Any, issuer: Any, public: Any, key: Any, term: tuple[int, int], *, authority: bool
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
        ),
        False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days=term[0]))
        .not_valid_after(now + datetime.timedelta(days=term[1]))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not authority,
                key_cert_sign=authority,
                crl_sign=authority,
                decipher_only=False,
                **usage,
            ),
            critical=True,
        )
        .sign(key, hashes.SHA256())
    )
