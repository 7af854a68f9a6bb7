"""How a rank of another machine comes to rank 0: both prove that they know a secret, then they are compared.

    rank                                             rank 0
                      <──  challenge  nonce_0
    proof  nonce, HMAC(secret, "rank", nonce_0, nonce)  ──>    else it is closed
                      <──  proof      HMAC(secret, "rank 0", nonce_0, nonce)
    arrival  versions, fingerprint of the model, its host  ──>
                      <──  accepted, or refused with the reason

The secret is in a file that the operator puts on each machine; it never travels.  A proof is about two
nonces, one of each side, and names the side that makes it, so one that was seen once is of no use for
another connection, and rank 0's own proof cannot be sent back to it.  Until it has proved itself a peer may
send frames of FRAME_BYTES_MAX bytes, and has HANDSHAKE_SECONDS for all of it.

What follows on the connection is neither encrypted nor authenticated, nor are the activations: who can change
packets between the ranks can change replies.  The network between ranks is to be private (docs/gpus.md).

Frames are those of rank_messages.py: nothing is unpickled, before or after.
"""

from __future__ import annotations

import hashlib
import hmac
import platform
import secrets
import socket
from collections.abc import Mapping
from importlib import metadata
from typing import NamedTuple, get_type_hints

from pensieve import __version__
from pensieve.errors import DeviceError
from pensieve.model.parallel.rank_messages import ControlMessage, RankPipe

PROTOCOL = 1
HANDSHAKE_SECONDS = 10.0
FRAME_BYTES_MAX = 4096  # of one frame, until it is known who sends it
NONCE_BYTES = 32
KEEPALIVE_SECONDS = 5  # a machine that does not answer for four times as long is gone
COMPARED = ("protocol", "pensieve", "torch", "transformers", "device", "model")


class RankIdentity(NamedTuple):
    """What a rank says of itself; the first six have to be what rank 0 has."""

    protocol: int
    pensieve: str
    torch: str
    transformers: str
    device: str  # cpu or cuda
    model: str  # fingerprint of the weights
    host: str
    device_index: int
    folder: str  # of the model, there
    num_threads: int


class RankRefused(DeviceError):
    """The other side does not know the secret, or has something else than this one."""


def described(
    device: str, model: str, folder: str, device_index: int, threads: int
) -> RankIdentity:
    """This process as a rank."""
    versions = (metadata.version("torch"), metadata.version("transformers"))
    # a GPU's torch and a CPU's differ behind the plus, and the kind of device is compared itself
    torch, transformers = (each.partition("+")[0] for each in versions)
    return RankIdentity(
        *(PROTOCOL, __version__, torch, transformers, device, model),
        *(platform.node(), device_index, folder, threads),
    )


def tuned(sock: socket.socket) -> socket.socket:
    """A connection between ranks: frames are small and go at once, and a dead machine is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_SECONDS),
        ("TCP_KEEPINTVL", KEEPALIVE_SECONDS),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 4000 * KEEPALIVE_SECONDS),
    ):
        if hasattr(socket, name):  # Linux has them all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


def receive_rank(pipe: RankPipe, secret: bytes, expected: RankIdentity) -> RankIdentity:
    """Rank 0's side, up to the verdict; Refused says why a rank was not accepted."""
    ours = secrets.token_bytes(NONCE_BYTES)
    pipe.send("challenge", nonce=ours.hex())
    values = _next(pipe, "proof")
    theirs = _from_hex(values, "nonce")
    if not hmac.compare_digest(_from_hex(values, "mac"), _mac(secret, b"rank", ours, theirs)):
        raise RankRefused("it does not know the secret of --cluster-secret")
    pipe.send("proof", mac=_mac(secret, b"rank 0", ours, theirs).hex())
    values = _next(pipe, "arrival")
    try:
        arrival = _arrival(values)
        _compare(arrival, expected)
    except RankRefused as error:
        pipe.send("refused", text=str(error))
        raise
    return arrival


def present(pipe: RankPipe, secret: bytes, own: RankIdentity) -> None:
    """The rank's side, until it is accepted; Refused says why it was not."""
    theirs, ours = _from_hex(_next(pipe, "challenge"), "nonce"), secrets.token_bytes(NONCE_BYTES)
    pipe.send("proof", nonce=ours.hex(), mac=_mac(secret, b"rank", theirs, ours).hex())
    values = _next(pipe, "proof")
    if not hmac.compare_digest(_from_hex(values, "mac"), _mac(secret, b"rank 0", theirs, ours)):
        raise RankRefused("what listens there does not know the secret of --cluster-secret")
    pipe.send("arrival", **own._asdict())
    _next(pipe, "accepted")


def _next(pipe: RankPipe, name: str) -> Mapping[str, object]:
    """The values of the next message; whatever else comes is no rank of ours."""
    try:
        frame = pipe.receive()
    except (ValueError, TypeError, RecursionError) as error:
        raise RankRefused("what it sends is not understood") from error
    if frame is None:
        raise RankRefused("it closed the connection: its secret may be another one")
    if not isinstance(frame, ControlMessage) or not isinstance(frame.values, dict):
        raise RankRefused("what it sends is not understood")
    if frame.name == "refused":
        raise RankRefused(str(frame.values.get("text")))
    if frame.name != name:
        raise RankRefused(f"it sends {frame.name!r} where {name!r} is next")
    return frame.values


def _arrival(values: Mapping[str, object]) -> RankIdentity:
    kinds = get_type_hints(RankIdentity)
    if {name: type(value) for name, value in values.items()} != kinds:
        raise RankRefused("what it says of itself is not understood: another version of pensieve?")
    return RankIdentity(**values)  # type: ignore[arg-type]


def _compare(arrival: RankIdentity, expected: RankIdentity) -> None:
    for name in COMPARED:
        there, here = getattr(arrival, name), getattr(expected, name)
        if there != here:
            what = {"model": "other weights:", "device": "another device:"}.get(name, name)
            raise RankRefused(f"{arrival.host} has {what} {there}, and rank 0 has {here}")


def _from_hex(values: Mapping[str, object], name: str) -> bytes:
    try:
        found = bytes.fromhex(str(values.get(name)))
    except ValueError as error:
        raise RankRefused("what it sends is not understood") from error
    if len(found) != NONCE_BYTES:
        raise RankRefused("what it sends is not understood")
    return found


def _mac(secret: bytes, side: bytes, nonce_0: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + b"\0" + nonce_0 + nonce, hashlib.sha256)
