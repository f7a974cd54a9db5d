"""The errors that qsample raises on purpose; their message says what was given, what is accepted and what to do."""

from __future__ import annotations


class QsampleError(Exception):
    """Base of every error below, for a caller who wants to catch them all."""


class UnsupportedModelError(QsampleError):
    """The model does something that the decode graph cannot express. Raised before any long work."""


class ParityError(QsampleError):
    """The exported graph does not compute what the Hugging Face model computes; nothing was published."""


class CompileError(QsampleError):
    """A package cannot be compiled as asked, or the compiled graph failed its self-test."""


class PackageError(QsampleError):
    """A package on disk is missing, damaged, of another version, or cannot be written."""
