"""Prefixes that no slot has to hold: files of the caller, and a folder that keeps the beginnings of conversations.

The folder has a file for each part of a conversation that was read anew: the first turn's tokens, then the tokens that
the second turn added, and so on, each with the tokens before it but not their keys and values. Its name is a hash of
the package, of all tokens and of their adapter, so several processes may write the same file. The files that were used
longest ago go if the folder becomes too large; a file is used if a later part of its conversation is, so the latest
parts go first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from qsample.checks import check_count
from qsample.contract.arrays import Array
from qsample.disk.space import trim
from qsample.errors import PackageError
from qsample.ort.session import Sessions
from qsample.package.package import Package
from qsample.runtime.decode.prefix_file import PrefixFile, signature_of, write_prefix
from qsample.runtime.decode.prefixes import Pieces, shared_pieces

DEFAULT_BYTES: Final = 8 << 30
_NAME: Final = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.safetensors")
_UNWRITTEN: Final = 2  # prefixes in memory that wait for the disk; more are not kept
_log: Final = logging.getLogger("qsample.prefixes")


class Part(NamedTuple):
    """The states of the tokens [start, stop) of a prompt; see `PrefixFile.states`; these may have more tokens."""

    start: int
    stop: int
    states: Mapping[str, Array]


_Unwritten = tuple[Path, Array, Mapping[str, Array], int, str]  # the arguments of `write_prefix`


class StoredPrefixes:
    """The prefixes that an engine can load into a slot. For a single thread; `close` waits for it."""

    def __init__(
        self,
        package: Package,
        sessions: Sessions,
        files: Iterable[str | Path] = (),
        folder: str | Path | None = None,
        max_bytes: int = DEFAULT_BYTES,
    ) -> None:
        """Open and verify the caller's files, of `save_prefix`.
        folder: for the beginnings of conversations, made if it is missing; by default they are not kept. max_bytes: of
        the files in the folder, of all packages. Raises PackageError for a file that is missing, damaged or of another
        package, and a folder that cannot be used; ValueError if `max_bytes` is not a positive integer."""
        check_count("prefix_cache_bytes", max_bytes)
        self._interface, self._pieces = package.interface, Pieces.of(sessions)
        self._signature = signature_of(package, sessions)
        self._key = hashlib.sha256(
            json.dumps(self._signature, sort_keys=True).encode()
        ).hexdigest()[:16]
        self._given: list[PrefixFile] = []
        for path in files:
            file = PrefixFile.open(Path(path), self._signature, self._interface)
            if file.start:
                raise PackageError(
                    f"{path} is a part of a conversation; give a file that `qsample prefix` wrote"
                )
            self._given.append(file)
        self._folder = None if folder is None else _usable(Path(folder))
        self._max_bytes = max_bytes
        self._kept: dict[str, PrefixFile] = {}  # by file name
        self._unwritten: set[str] = set()
        self._queue: queue.Queue[_Unwritten | None] = queue.Queue(_UNWRITTEN)
        self._writer: threading.Thread | None = None

    @property
    def keeps(self) -> bool:
        """Whether `keep` keeps anything."""
        return self._folder is not None

    def held(self) -> list[PrefixFile]:
        """All prefixes that are there now, files of the folder without their states."""
        self._look()
        return [*self._given, *self._kept.values()]

    def read(self, held: PrefixFile, count: int) -> list[Part]:
        """The states of the first `count` tokens of a prefix, verified, the last part first; [] if files of it are
        damaged or gone. With recurrent states, `count` is all of its tokens."""
        parts: list[Part] = []
        paths: list[Path] = []
        stop, at = count, held
        try:
            while True:
                states = at.states
                if not states:
                    file = PrefixFile.open(at.path, self._signature, self._interface)
                    if (file.sha256, file.start, file.adapter) != (at.sha256, at.start, at.adapter):
                        raise PackageError(f"{at.path} was replaced")
                    paths.append(at.path)
                    states = file.states
                parts.append(Part(at.start, stop, states))
                if at.start == 0:
                    break
                stop, before = at.start, self._before(at)
                if before is None:
                    return []
                at = before
        except PackageError as error:
            _log.warning("a kept prefix is not used: %s", error)
            _delete(at.path)
            return []
        now = time.time_ns()
        for index, path in enumerate(paths):  # those before it are never older
            with suppress(OSError):
                os.utime(path, ns=(now + index, now + index))
        return parts

    def keep(
        self, tokens: Array, read: Callable[[int, int], Mapping[str, Array]], adapter: str = ""
    ) -> None:
        """Write the states of the first tokens of a prompt to the folder in another thread, except states that it has.
        tokens: [n] int64 identities, whole pieces. read: returns a copy of the states of the tokens [start, stop), see
        `PrefixFile.states`, and `PrefixFile.adapter`."""
        assert self._folder is not None
        self._look()
        kept = [one.tokens for one in self._kept.values() if one.adapter == adapter]
        start = max((shared_pieces(one, tokens, self._pieces) for one in kept), default=0)
        name = hashlib.sha256(tokens.tobytes() + adapter.encode()).hexdigest()
        path = self._folder / f"{self._key}-{name[:32]}.safetensors"
        if (
            len(tokens) - start < self._pieces.size
            or path.name in self._unwritten
            or self._queue.full()
        ):
            return
        states = read(start, len(tokens))
        if sum(array.nbytes for array in states.values()) > self._max_bytes:
            return
        if self._writer is None:
            self._writer = threading.Thread(
                target=self._write_all, name="qsample-prefixes", daemon=True
            )
            self._writer.start()
        self._unwritten.add(path.name)
        self._queue.put((path, tokens.copy(), states, start, adapter))

    def close(self) -> None:
        """Wait for the disk."""
        if self._writer is not None:
            self._queue.put(None)
            self._writer.join()
            self._writer = None

    def _look(self) -> None:
        """Bring the index up to date with the folder, to which other processes write."""
        if self._folder is None:
            return
        try:
            names = {
                name
                for name in os.listdir(self._folder)
                if name.startswith(self._key) and _NAME.fullmatch(name)
            }
        except OSError as error:
            _log.warning("cannot read %s: %s", self._folder, error)
            names = set()
        if names == self._kept.keys():
            return
        found = [
            self._kept[name] if name in self._kept else self._opened(self._folder / name)
            for name in names
        ]
        self._kept = {}
        for held in sorted((one for one in found if one is not None), key=lambda one: one.start):
            if held.start and self._before(held) is None:
                _delete(held.path)  # the part before it is gone
            else:
                self._kept[held.path.name] = held

    def _opened(self, path: Path) -> PrefixFile | None:
        """A file that is new in the folder; None if it is not usable, and deleted, or is gone."""
        try:
            return PrefixFile.open(path, self._signature, self._interface, with_states=False)
        except PackageError as error:
            if path.exists():
                _log.warning("a kept prefix is not used: %s", error)
                _delete(path)
            return None

    def _before(self, held: PrefixFile) -> PrefixFile | None:
        """A file with the states before the states of `held`."""
        kept = (one for one in self._kept.values() if one.adapter == held.adapter)
        shared = ((one, shared_pieces(one.tokens, held.tokens, self._pieces)) for one in kept)
        return next((one for one, tokens in shared if one.start < held.start <= tokens), None)

    # From here on, the writing thread.

    def _write_all(self) -> None:
        while (unwritten := self._queue.get()) is not None:
            path, tokens, states, start, adapter = unwritten
            try:
                write_prefix(path, self._signature, tokens, states, start, adapter)
                trim(
                    (file for file in path.parent.iterdir() if _NAME.fullmatch(file.name)),
                    self._max_bytes,
                    _delete,
                )
            except (
                Exception
            ) as error:  # of any kind: without this thread, `close` would wait for ever
                _log.warning("a prefix is not kept: %s", error)
            self._unwritten.discard(path.name)


def _delete(path: Path) -> bool:
    """Delete a file of the folder; False if Windows keeps it, because another process reads it."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        return True
    return False


def _usable(folder: Path) -> Path:
    """An existing folder that can be written to. Raises PackageError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it has private texts
    except OSError as error:
        raise PackageError(
            f"cannot make {folder} ({error.strerror}); choose another folder for prefixes"
        ) from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PackageError(f"cannot write to {folder}; choose another folder for prefixes")
    return folder
