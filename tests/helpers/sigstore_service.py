"""A sigstore of its own, without a network: an authority like Fulcio, a log of certificates, and a log of signatures
like Rekor, whose keys are in a trust configuration. Signatures are written from sigstore's specifications
(https://github.com/sigstore/architecture-docs, RFC 6962)."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

ISSUER_OF_ACCOUNT = ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
SCT_LIST = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
SHA256 = ec.ECDSA(hashes.SHA256())
ORIGIN = "rekor.test"
BEGINNING = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def der(key: ec.EllipticCurvePublicKey) -> bytes:
    encoding = serialization.Encoding.DER
    return key.public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@dataclass(frozen=True)
class SigstoreService:
    """The private keys of the authority and of both logs."""

    authority: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    certificate_log: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    signature_log: ec.EllipticCurvePrivateKey = field(default_factory=new_key)

    @property
    def name(self) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "a test of sigstore")])

    def root(self) -> x509.Certificate:
        public = self.authority.public_key()
        usage = key_usage(key_cert_sign=True, crl_sign=True)
        return (
            x509.CertificateBuilder()
            .subject_name(self.name)
            .issuer_name(self.name)
            .public_key(public)
            .serial_number(1)
            .not_valid_before(BEGINNING)
            .not_valid_after(BEGINNING.replace(year=2120))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(usage, critical=True)
            .sign(self.authority, hashes.SHA256())
        )

    def trust_config(self, path: Path, *, signature_log: Any = None) -> Path:
        """The file of a trust configuration. signature_log: the key of another log."""
        period = {"start": "2020-01-01T00:00:00Z"}

        def log(key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
            public = der(key.public_key())
            return {
                "baseUrl": "https://log.invalid",
                "hashAlgorithm": "SHA2_256",
                "publicKey": {
                    "rawBytes": b64(public),
                    "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                    "validFor": period,
                },
                "logId": {"keyId": b64(hashlib.sha256(public).digest())},
            }

        root = self.root().public_bytes(serialization.Encoding.DER)
        authority = {
            "subject": {"organization": "test", "commonName": "test"},
            "uri": "https://authority.invalid",
            "certChain": {"certificates": [{"rawBytes": b64(root)}]},
            "validFor": period,
        }
        document = {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "trustedRoot": {
                "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
                "tlogs": [log(signature_log or self.signature_log)],
                "certificateAuthorities": [authority],
                "ctlogs": [log(self.certificate_log)],
                "timestampAuthorities": [],
            },
            "signingConfig": {"mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json"},
        }
        path.write_text(json.dumps(document), encoding="utf-8")
        return path

    def certificate(
        self, public: ec.EllipticCurvePublicKey, account: str, issuer: str, began: datetime.datetime
    ) -> x509.Certificate:
        """A certificate of ten minutes for an account that `issuer` confirmed, with the promise of
        the log of certificates."""
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(began)
            .not_valid_after(began + datetime.timedelta(minutes=10))
            .add_extension(key_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority.public_key()),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName([x509.RFC822Name(account)]), critical=True)
            .add_extension(
                x509.UnrecognizedExtension(ISSUER_OF_ACCOUNT, issuer.encode()), critical=False
            )
        )
        unlogged = builder.sign(self.authority, hashes.SHA256()).tbs_certificate_bytes
        promise = self._promise(unlogged, began)
        logged = builder.add_extension(x509.UnrecognizedExtension(SCT_LIST, promise), False)
        return logged.sign(self.authority, hashes.SHA256())

    def _promise(self, certificate: bytes, time: datetime.datetime) -> bytes:
        """A list with the log's timestamp of a certificate (RFC 6962, 3.2 and 3.3)."""
        issuer = hashlib.sha256(der(self.authority.public_key())).digest()
        log = hashlib.sha256(der(self.certificate_log.public_key())).digest()
        milliseconds = int(time.timestamp() * 1000)
        entry = issuer + len(certificate).to_bytes(3) + certificate
        signed = struct.pack("!BBQH", 0, 0, milliseconds, 1) + entry + b"\0\0"
        signature = self.certificate_log.sign(signed, SHA256)
        timestamp = b"\0" + log + struct.pack("!QH", milliseconds, 0)
        timestamp += b"\4\3" + len(signature).to_bytes(2) + signature
        timestamps = len(timestamp).to_bytes(2) + timestamp
        timestamps = len(timestamps).to_bytes(2) + timestamps
        length = len(timestamps)
        return b"\4" + (b"\x81" + bytes([length]) if length > 127 else bytes([length])) + timestamps

    def signature(
        self,
        statement: bytes,
        account: str,
        issuer: str,
        *,
        began: datetime.datetime | None = None,
        logged_after: float = 60,
    ) -> dict[str, Any]:
        """A bundle with the signature of a statement.

        began: the first second of the certificate; now by default. logged_after: the seconds from
        then to the entry in the log.
        """
        began = (began or datetime.datetime.now(datetime.UTC)).replace(microsecond=0)
        key = new_key()
        certificate = self.certificate(key.public_key(), account, issuer, began)
        kind = "application/vnd.in-toto+json"
        message = f"DSSEv1 {len(kind)} {kind} {len(statement)} ".encode() + statement
        signature = b64(key.sign(message, SHA256))
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        body = {
            "apiVersion": "0.0.1",
            "kind": "dsse",
            "spec": {
                "envelopeHash": {"algorithm": "sha256", "value": "0" * 64},
                "payloadHash": {
                    "algorithm": "sha256",
                    "value": hashlib.sha256(statement).hexdigest(),
                },
                "signatures": [{"signature": signature, "verifier": b64(pem)}],
            },
        }
        entry = self._entry(canonical(body), int(began.timestamp() + logged_after))
        return {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {
                "certificate": {
                    "rawBytes": b64(certificate.public_bytes(serialization.Encoding.DER))
                },
                "tlogEntries": [entry],
            },
            "dsseEnvelope": {
                "payload": b64(statement),
                "payloadType": kind,
                "signatures": [{"sig": signature}],
            },
        }

    def _entry(self, body: bytes, time: int) -> dict[str, Any]:
        """The only entry of a log, with the proof that it is there."""
        log = hashlib.sha256(der(self.signature_log.public_key())).digest()
        root = hashlib.sha256(b"\0" + body).digest()
        note = f"{ORIGIN}\n1\n{b64(root)}\n"
        signed_note = log[:4] + self.signature_log.sign(note.encode(), SHA256)
        checkpoint = f"{note}\n\u2014 {ORIGIN} {b64(signed_note)}\n"
        promised = {
            "body": b64(body),
            "integratedTime": time,
            "logID": log.hex(),
            "logIndex": 0,
        }
        promise = self.signature_log.sign(canonical(promised), SHA256)
        return {
            "logIndex": "0",
            "logId": {"keyId": b64(log)},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"},
            "integratedTime": str(time),
            "inclusionPromise": {"signedEntryTimestamp": b64(promise)},
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": b64(root),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": checkpoint},
            },
            "canonicalizedBody": b64(body),
        }


def canonical(document: Any) -> bytes:
    """JSON in the form of RFC 8785, as far as these documents need it."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def key_usage(**used: bool) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**(dict.fromkeys(names, False) | used))
