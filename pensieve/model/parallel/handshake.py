"""Connect a rank on another machine to rank 0: both prove that they know a secret, then compare models.

    rank                                             rank 0
                      <──  challenge  nonce_0
    proof  nonce, HMAC(secret, "rank", nonce_0, nonce)  ──>    closes the connection if it is wrong
                      <──  proof      HMAC(secret, "rank 0", nonce_0, nonce)
    arrival  versions, fingerprint of the model, its host  ──>
                      <──  accepted, or refused with the reason

The operator puts the secret into a file on each machine; it is never sent.  A proof covers a nonce of each
side and names the side that makes it.  So a recorded proof is useless for another connection, and rank 0's
own proof cannot be sent back to it.  Before its proof, a peer may send frames of at most FRAME_BYTES_MAX
bytes.  The whole handshake must end within HANDSHAKE_SECONDS.

Later traffic on the connection, and the activations, are neither encrypted nor authenticated: an attacker who
can change packets between the ranks can change replies.  The network between ranks must be private
(docs/gpus.md).

Frames are those of rank_messages.py.  Nothing is unpickled, before or after the handshake.
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
FRAME_BYTES_MAX = 4096  # limit of a frame until the peer has proved its identity
NONCE_BYTES = 32
KEEPALIVE_SECONDS = 5  # a machine that does not answer for four times as long counts as dead
COMPARED_FIELDS = ("protocol", "pensieve", "torch", "transformers", "device", "model")


class RankIdentity(NamedTuple):
    """A rank's description of itself; the fields in COMPARED_FIELDS must equal rank 0's."""

    protocol: int
    pensieve: str
    torch: str
    transformers: str
    device: str  # cpu or cuda
    model: str  # fingerprint of the weights
    host: str
    device_index: int
    folder: str  # folder of the model on the rank's machine
    num_threads: int


class RankRefused(DeviceError):
    """The peer does not know the secret, or differs from this rank."""


def described(
    device: str, model: str, folder: str, device_index: int, threads: int
) -> RankIdentity:
    """Describe this process as a rank."""
    versions = (metadata.version("torch"), metadata.version("transformers"))
    # Torch's versions for GPU and CPU differ after the plus; `device` is compared separately.
    torch, transformers = (each.partition("+")[0] for each in versions)
    return RankIdentity(
        *(PROTOCOL, __version__, torch, transformers, device, model),
        *(platform.node(), device_index, folder, threads),
    )


def tuned(sock: socket.socket) -> socket.socket:
    """Configure a connection between ranks: send small frames at once, and notice a dead machine."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_SECONDS),
        ("TCP_KEEPINTVL", KEEPALIVE_SECONDS),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 4000 * KEEPALIVE_SECONDS),
    ):
        if hasattr(socket, name):  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


def receive_rank(pipe: RankPipe, secret: bytes, expected: RankIdentity) -> RankIdentity:
    """Run rank 0's side until the verdict; RankRefused says why a rank was not accepted."""
    ours = secrets.token_bytes(NONCE_BYTES)
    pipe.send("challenge", nonce=ours.hex())
    values = _receive(pipe, "proof")
    theirs = _from_hex(values, "nonce")
    if not hmac.compare_digest(_from_hex(values, "mac"), _mac(secret, b"rank", ours, theirs)):
        raise RankRefused("it does not know the secret of --cluster-secret")
    pipe.send("proof", mac=_mac(secret, b"rank 0", ours, theirs).hex())
    values = _receive(pipe, "arrival")
    try:
        arrival = _parse_arrival(values)
        _compare(arrival, expected)
    except RankRefused as error:
        pipe.send("refused", text=str(error))
        raise
    return arrival


def present(pipe: RankPipe, secret: bytes, own: RankIdentity) -> None:
    """Run the rank's side until it is accepted; RankRefused says why it was not."""
    theirs, ours = _from_hex(_receive(pipe, "challenge"), "nonce"), secrets.token_bytes(NONCE_BYTES)
    pipe.send("proof", nonce=ours.hex(), mac=_mac(secret, b"rank", theirs, ours).hex())
    values = _receive(pipe, "proof")
    if not hmac.compare_digest(_from_hex(values, "mac"), _mac(secret, b"rank 0", theirs, ours)):
        raise RankRefused("the server at this address does not know the secret of --cluster-secret")
    pipe.send("arrival", **own._asdict())
    _receive(pipe, "accepted")


def _receive(pipe: RankPipe, name: str) -> Mapping[str, object]:
    """Return the values of the next message; raise RankRefused if the peer sends any other message."""
    try:
        frame = pipe.receive()
    except (ValueError, TypeError, RecursionError) as error:
        raise RankRefused("its message is not understood") from error
    if frame is None:
        raise RankRefused("it closed the connection: perhaps its secret differs")
    if not isinstance(frame, ControlMessage) or not isinstance(frame.values, dict):
        raise RankRefused("its message is not understood")
    if frame.name == "refused":
        raise RankRefused(str(frame.values.get("text")))
    if frame.name != name:
        raise RankRefused(f"it sent {frame.name!r} instead of {name!r}")
    return frame.values


def _parse_arrival(values: Mapping[str, object]) -> RankIdentity:
    kinds = get_type_hints(RankIdentity)
    if {name: type(value) for name, value in values.items()} != kinds:
        raise RankRefused(
            "its description is not understood. Does it run another version of pensieve?"
        )
    return RankIdentity(**values)  # type: ignore[arg-type]


def _compare(arrival: RankIdentity, expected: RankIdentity) -> None:
    for name in COMPARED_FIELDS:
        theirs, ours = getattr(arrival, name), getattr(expected, name)
        if theirs != ours:
            label = {"model": "other weights:", "device": "another device:"}.get(name, name)
            raise RankRefused(f"{arrival.host} has {label} {theirs}, and rank 0 has {ours}")


def _from_hex(values: Mapping[str, object], name: str) -> bytes:
    try:
        found = bytes.fromhex(str(values.get(name)))
    except ValueError as error:
        raise RankRefused("its message is not understood") from error
    if len(found) != NONCE_BYTES:
        raise RankRefused("its message is not understood")
    return found


def _mac(secret: bytes, side: bytes, nonce_0: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + b"\0" + nonce_0 + nonce, hashlib.sha256)
