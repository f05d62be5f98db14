# SPDX-License-Identifier: Apache-2.0
"""Hosts made of Linux namespaces: each has a network, `/dev/shm` and name of its own.

A cable (a veth pair) joins two of them. No rights are needed beyond user namespaces.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import subprocess
from multiprocessing.connection import Connection
from pathlib import Path

# <linux/sched.h>, <sys/mount.h>
_USER, _NETWORK, _MOUNTS, _NAME = 0x10000000, 0x40000000, 0x00020000, 0x04000000
_PRIVATE = (1 << 18) | (1 << 14)  # MS_PRIVATE on all mounts below
_OWN = {"net": _NETWORK, "mnt": _MOUNTS, "uts": _NAME}
_libc = ctypes.CDLL(None, use_errno=True)
PATIENCE_S = 30


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _ip(*words: str) -> None:
    try:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise OSError(f"ip {' '.join(words)}: {error.stderr.strip()}") from error


def _become_owner() -> None:
    """Enter a user namespace in which this process may do everything."""
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(_USER), "unshare(user)")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _join(process: int, names: list[str]) -> None:
    for name in names:
        with open(f"/proc/{process}/ns/{name}") as file:
            _check(_libc.setns(file.fileno(), 0), f"setns({name})")


def _make_host(number: int) -> None:
    _check(_libc.unshare(_NETWORK | _MOUNTS | _NAME), "unshare(network, mounts, name)")
    name = f"host{number}".encode()
    _check(_libc.sethostname(name, len(name)), "sethostname")
    _check(_libc.mount(b"none", b"/", None, _PRIVATE, None), "mount(private)")
    _check(_libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=64m"), "mount(/dev/shm)")
    _ip("link", "set", "lo", "up")


def _try(answer: Connection) -> None:
    try:
        _become_owner()
        _make_host(0)
        _ip("link", "add", "eth0", "type", "veth", "peer", "eth1")
    except OSError as error:
        answer.send(str(error))
    else:
        answer.send("")


def why_not() -> str:
    """Try it in a process of its own; return why this machine does not let us, "" if it does."""
    fork = mp.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_try, args=(theirs,))
    process.start()
    theirs.close()
    why: str = ours.recv()
    process.join()
    return why


class Hosts:
    """Two hosts with equally many ranks; make it before the ranks are forked.

    Args:
        world: Number of ranks; the first half gets the first host.
    """

    def __init__(self, world: int) -> None:
        fork = mp.get_context("fork")
        self._each = world // 2
        self._ids = fork.Array("i", world)
        self._barrier = fork.Barrier(world)

    def enter(self, rank: int) -> None:
        """Put this rank on its host (collective); gloo may then use `eth0`.

        It comes before this process starts any thread: Linux asks for that.

        Raises:
            OSError: This machine does not let us.
        """
        self._ids[rank] = os.getpid()
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        first, second = 0, self._each
        steps = [
            (rank == first, self._begin),
            (0 < rank < second, lambda: _join(self._ids[first], ["user", *_OWN])),
            (rank >= second, lambda: _join(self._ids[first], ["user"])),
            (rank == second, lambda: _make_host(1)),
            (rank > second, lambda: _join(self._ids[second], list(_OWN))),
            (rank == first, lambda: self._plug(self._ids[second])),
            (rank in (first, second), lambda: self._address(rank)),
        ]
        for mine, do in steps:  # what one rank has made the next can join
            if mine:
                do()
            self._barrier.wait(PATIENCE_S)

    def _begin(self) -> None:
        _become_owner()
        _make_host(0)

    def _plug(self, peer: int) -> None:
        _ip("link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", str(peer))

    def _address(self, rank: int) -> None:
        _ip("address", "add", f"10.77.0.{1 + rank // self._each}/24", "dev", "eth0")
        _ip("link", "set", "eth0", "up")
