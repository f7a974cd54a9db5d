"""Prefixes outside of the slots: files of the caller, and a folder that keeps the beginnings of
conversations.

The folder has a file for each part of a conversation that was read anew: the first turn's tokens, then
the tokens that the second turn added, and so on, each with the tokens before it but not their keys and
values. The name of a file is a hash of the package, of all tokens and of their adapter, so several
processes may write the same file. The files that were used longest ago are deleted if the folder
becomes too large. A file is used if a later part of its conversation is used, so the latest parts are
deleted first.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qsample.checks import check_count
from qsample.contract.arrays import Array
from qsample.errors import PackageError
from qsample.ort.session import Sessions
from qsample.package.disk.space import trim
from qsample.package.package import Package
from qsample.runtime.decode.prefix_file import PrefixFile, PrefixPart, signature_of, write_prefix
from qsample.runtime.decode.prefixes import Pieces, shared_pieces

DEFAULT_BYTES: Final = 8 << 30
_FILE_NAME: Final = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.safetensors")
# The most prefixes in memory that wait for the disk. Further prefixes are not kept.
_MAX_UNWRITTEN_PREFIXES: Final = 2
_log: Final = logging.getLogger("qsample.prefixes")


@dataclass(frozen=True, slots=True, eq=False)
class _UnwrittenPrefix:
    """A prefix that waits for the disk; see `write_prefix`."""

    path: Path
    tokens: Array
    states: Mapping[str, Array]
    start: int
    adapter: str


class StoredPrefixes:
    """The prefixes that an engine can load into a slot. Only one thread may use it. `close` waits for
    the disk."""

    def __init__(
        self,
        package: Package,
        sessions: Sessions,
        files: Iterable[str | Path] = (),
        folder: str | Path | None = None,
        max_bytes: int = DEFAULT_BYTES,
    ) -> None:
        """Open and verify the caller's files.

        Args:
            package: the package.
            sessions: the graphs of the package.
            files: files of `CausalLM.save_prefix`.
            folder: the folder for the beginnings of conversations, made if it is missing; None to keep
                none.
            max_bytes: the most bytes of the files in the folder, of all packages.

        Raises:
            PackageError: If a file is missing, damaged or of another package, or the folder cannot be
                used.
            ValueError: If `max_bytes` is not a positive integer.
        """
        check_count("prefix_cache_bytes", max_bytes)
        self._interface = package.interface
        self._pieces = Pieces.of(sessions)
        self._signature = signature_of(package, sessions)
        signature = json.dumps(self._signature, sort_keys=True)
        self._signature_hash = hashlib.sha256(signature.encode()).hexdigest()[:16]
        self._caller_files: list[PrefixFile] = []
        for path in files:
            file = PrefixFile.open(Path(path), self._signature, self._interface)
            if file.start != 0:
                raise PackageError(
                    f"{path} is a part of a conversation; give a file that `qsample prefix` wrote"
                )
            self._caller_files.append(file)
        self._folder = None if folder is None else _usable(Path(folder))
        self._max_bytes = max_bytes
        # The files of the folder by name, without their states.
        self._folder_files: dict[str, PrefixFile] = {}
        self._unwritten_names: set[str] = set()
        self._queue: queue.Queue[_UnwrittenPrefix | None] = queue.Queue(_MAX_UNWRITTEN_PREFIXES)
        self._writer: threading.Thread | None = None

    @property
    def keeps(self) -> bool:
        """Whether `keep` keeps anything."""
        return self._folder is not None

    def held(self) -> list[PrefixFile]:
        """All prefixes that exist now; files of the folder come without their states."""
        self._update_index()
        return [*self._caller_files, *self._folder_files.values()]

    def read(self, prefix: PrefixFile, count: int) -> list[PrefixPart]:
        """Read and verify the states of the first `count` tokens of a prefix. With recurrent states,
        `count` is the number of all of its tokens.

        Returns:
            The parts, the last part first; [] if some of their files are damaged or gone.
        """
        parts: list[PrefixPart] = []
        paths: list[Path] = []
        part: PrefixFile | None = prefix
        stop = count
        while part is not None:
            states = part.states
            if not states:
                try:
                    states = self._read_states(part)
                except PackageError as error:
                    _log.warning("a kept prefix is not used: %s", error)
                    _delete(part.path)
                    return []
                paths.append(part.path)
            parts.append(PrefixPart(part.start, stop, states))
            if part.start == 0:
                _mark_used(paths)
                return parts
            stop = part.start
            part = self._part_before(part)
        return []

    def keep(
        self, tokens: Array, read: Callable[[int, int], Mapping[str, Array]], adapter: str = ""
    ) -> None:
        """Write the states of the first tokens of a prompt to the folder in another thread, except
        states that it has.

        Args:
            tokens: the identities of whole pieces, [n] int64.
            read: returns a copy of the states of the tokens [start, stop), see `PrefixPart.states`.
            adapter: see `PrefixFile.adapter`.
        """
        assert self._folder is not None
        self._update_index()
        start = max(
            (
                shared_pieces(file.tokens, tokens, self._pieces)
                for file in self._folder_files.values()
                if file.adapter == adapter
            ),
            default=0,
        )
        digest = hashlib.sha256(tokens.tobytes() + adapter.encode()).hexdigest()[:32]
        path = self._folder / f"{self._signature_hash}-{digest}.safetensors"
        is_too_short = len(tokens) - start < self._pieces.size
        if is_too_short or path.name in self._unwritten_names or self._queue.full():
            return
        states = read(start, len(tokens))
        if sum(array.nbytes for array in states.values()) > self._max_bytes:
            return
        self._start_writer()
        self._unwritten_names.add(path.name)
        self._queue.put(_UnwrittenPrefix(path, tokens.copy(), states, start, adapter))

    def close(self) -> None:
        """Wait for the disk."""
        if self._writer is not None:
            self._queue.put(None)
            self._writer.join()
            self._writer = None

    def _start_writer(self) -> None:
        """Start the writing thread unless it runs."""
        if self._writer is None:
            self._writer = threading.Thread(
                target=self._write_all, name="qsample-prefixes", daemon=True
            )
            self._writer.start()

    def _update_index(self) -> None:
        """Bring the index up to date with the folder, to which other processes write."""
        if self._folder is None:
            return
        try:
            names = {
                name
                for name in os.listdir(self._folder)
                if name.startswith(self._signature_hash) and _FILE_NAME.fullmatch(name)
            }
        except OSError as error:
            _log.warning("cannot read %s: %s", self._folder, error)
            names = set()
        if names == self._folder_files.keys():
            return
        files: list[PrefixFile] = []
        for name in names:
            file = self._folder_files.get(name) or self._open_header(self._folder / name)
            if file is not None:
                files.append(file)
        self._folder_files = {}
        for file in sorted(files, key=lambda file: file.start):
            if file.start != 0 and self._part_before(file) is None:
                _delete(file.path)  # the part before it is gone
            else:
                self._folder_files[file.path.name] = file

    def _open_header(self, path: Path) -> PrefixFile | None:
        """Open a file that is new in the folder, without its states; None if it is gone, or was
        deleted because it cannot be used."""
        try:
            return PrefixFile.open(path, self._signature, self._interface, with_states=False)
        except PackageError as error:
            if path.exists():
                _log.warning("a kept prefix is not used: %s", error)
                _delete(path)
            return None

    def _read_states(self, header: PrefixFile) -> Mapping[str, Array]:
        """The states of a file whose header was read. Raises PackageError."""
        file = PrefixFile.open(header.path, self._signature, self._interface)
        is_same = (
            file.sha256 == header.sha256
            and file.start == header.start
            and file.adapter == header.adapter
        )
        if not is_same:
            raise PackageError(f"{header.path} was replaced")
        return file.states

    def _part_before(self, part: PrefixFile) -> PrefixFile | None:
        """A file of the folder with the states before the states of `part`."""
        for file in self._folder_files.values():
            if file.adapter == part.adapter and file.start < part.start:
                if part.start <= shared_pieces(file.tokens, part.tokens, self._pieces):
                    return file
        return None

    # From here on, the writing thread.

    def _write_all(self) -> None:
        """Write prefixes until `close`."""
        while True:
            unwritten = self._queue.get()
            if unwritten is None:
                return
            try:
                self._write(unwritten)
            except Exception as error:
                # Errors of any kind: without this thread, `close` would wait for ever.
                _log.warning("a prefix is not kept: %s", error)
            self._unwritten_names.discard(unwritten.path.name)

    def _write(self, unwritten: _UnwrittenPrefix) -> None:
        """Write a prefix, and delete the files that were used longest ago if there are too many."""
        path = unwritten.path
        write_prefix(
            path,
            self._signature,
            unwritten.tokens,
            unwritten.states,
            unwritten.start,
            unwritten.adapter,
        )
        files = (file for file in path.parent.iterdir() if _FILE_NAME.fullmatch(file.name))
        trim(files, self._max_bytes, _delete)


def _mark_used(paths: list[Path]) -> None:
    """Make files the newest of the folder. paths: the parts of a conversation, the last part first; a
    part is never older than the parts after it."""
    now = time.time_ns()
    for index, path in enumerate(paths):
        with suppress(OSError):
            os.utime(path, ns=(now + index, now + index))


def _delete(path: Path) -> bool:
    """Delete a file of the folder. False if Windows keeps it, because another process reads it."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        return True
    return False


def _usable(folder: Path) -> Path:
    """The folder, made if it is missing. Raises PackageError if it cannot be written to."""
    try:
        # Only the owner may read it: it has private texts.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PackageError(
            f"cannot make {folder} ({error.strerror}); choose another folder for prefixes"
        ) from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PackageError(f"cannot write to {folder}; choose another folder for prefixes")
    return folder
