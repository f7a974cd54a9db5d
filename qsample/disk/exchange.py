"""Swaps two folders in one step, which the standard library cannot: Linux's renameat2, macOS's renamex_np."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path
from typing import Any, Final

_AT_FDCWD: Final = -100  # Linux: paths are relative to the working directory
_LINUX_EXCHANGE: Final = 2  # RENAME_EXCHANGE of renameat2(2)
_MACOS_SWAP: Final = 2  # RENAME_SWAP of renamex_np(2)
# What a system, a file system or a sandbox that lacks the call answers. EPERM may also be meant: then the renames that
# take its place fail as well, and say so.
_UNSUPPORTED: Final = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)


def exchange(first: Path, second: Path) -> bool:
    """Give two folders of one file system each other's name, at once: nobody sees one of the names missing.

    Returns False, and changes nothing, where the system or the file system cannot: Windows, a C library without the
    call (glibc before 2.28), NFS and other file systems. Raises OSError where it can and may not.
    """
    problem = _exchange(os.fsencode(first), os.fsencode(second))
    if problem in _UNSUPPORTED:
        return False
    if problem:
        raise OSError(problem, os.strerror(problem), str(first), None, str(second))
    return True


def _exchange(first: bytes, second: bytes) -> int:
    """The system call; 0, or why it failed, as in `errno`."""
    name = {"linux": "renameat2", "darwin": "renamex_np"}.get(sys.platform)
    call: Any = getattr(ctypes.CDLL(None, use_errno=True), name, None) if name else None
    if call is None:
        return errno.ENOSYS
    if sys.platform == "darwin":
        failed = call(ctypes.c_char_p(first), ctypes.c_char_p(second), ctypes.c_uint(_MACOS_SWAP))
    else:
        folder, flags = ctypes.c_int(_AT_FDCWD), ctypes.c_uint(_LINUX_EXCHANGE)
        failed = call(folder, ctypes.c_char_p(first), folder, ctypes.c_char_p(second), flags)
    return ctypes.get_errno() if failed else 0
