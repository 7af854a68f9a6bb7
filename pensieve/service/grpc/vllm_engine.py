"""The methods of vLLM's VllmEngine, so that routers which speak to vLLM can route to this daemon.

Each translates, calls the daemon, and translates.  A request is an unstored turn (service/unstored.py), or
several with the same prompt, which end as soon as their call does: nobody can attach to them again.  What
they have computed stays for the next request that begins like them.

`Abort` names requests by the id that their caller gave; those of another tenant do not exist.  Several at
once may have the same id, and are ended together.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from datetime import UTC, datetime
from functools import partial
from typing import Any

import grpc

from pensieve import __version__
from pensieve.core.turn import TurnOptions
from pensieve.errors import DeadlineExceeded, Loading
from pensieve.service.choices import begin_unstored
from pensieve.service.constraints import Constraints
from pensieve.service.daemon import LOADING, Daemon
from pensieve.service.engine_client import Ready
from pensieve.service.grpc import vllm_values
from pensieve.service.grpc.auth import caller
from pensieve.service.live_turn import LiveTurn
from pensieve.service.tokenizer_archive import model_config, tokenizer_archive
from pensieve.v1.routers import smg_common_pb2 as common
from pensieve.v1.routers import vllm_engine_pb2 as pb
from pensieve.v1.routers import vllm_engine_pb2_grpc

NAME = "vllm.grpc.engine.VllmEngine"
PIECE_BYTES = 64 << 10  # of the tokenizer's archive
NO_EMBEDDINGS = "this server computes no embeddings"


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):
    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self._constraints: Constraints | None = None  # once a model was loaded
        self._archive: tuple[bytes, str] | None = None  # of the tokenizer, and its digest
        self._packing = asyncio.Lock()
        self._running: dict[tuple[str, str], list[LiveTurn]] = {}  # by tenant and request

    async def _check(self, options: TurnOptions, tenant: str) -> None:
        """The constraint, which all choices share."""
        if self._constraints is None:
            self._constraints = Constraints(self.daemon.conversations.turns.tokenizer)
        if not self._constraints.knows(options):
            check = partial(self._constraints.check, options)
            await self.daemon.threads.in_text_pool(tenant, check)

    async def Generate(  # type: ignore[override]  # it writes to the context instead of yielding
        self, request: pb.GenerateRequest, context: Any
    ) -> None:
        daemon, by = self.daemon, caller()
        tenant = by.tenant
        requested = vllm_values.requested(request, daemon.context_max, by.priority_max)
        await self._check(requested.choices[0], tenant)
        key, lives = (tenant, requested.request_id), list[LiveTurn]()
        others = self._running.setdefault(key, [])
        try:
            seconds_left = context.time_remaining()
            prompt, choices = requested.prompt, requested.choices
            async for live in begin_unstored(daemon, prompt, choices, tenant, seconds_left):
                lives.append(live)
                others.append(live)
            writing = asyncio.Lock()
            calls = [
                self._answer(live, index, requested, context, writing)
                for index, live in enumerate(lives)
            ]
            await _all_of(calls)
        finally:
            for live in lives:
                others.remove(live)
                daemon.conversations.cancel(live)  # of one that has ended nothing is cancelled
            if not others and self._running.get(key) is others:
                del self._running[key]

    async def _answer(
        self,
        live: LiveTurn,
        index: int,
        requested: vllm_values.Requested,
        context: Any,
        writing: asyncio.Lock,
    ) -> None:
        """All of one choice; a stream's end repeats its last chunk, as vLLM's does."""
        first = 0

        async def write(start: int, stop: int) -> None:
            nonlocal first
            for each in vllm_values.chunks(live, start, stop, index):
                first = stop - len(each.chunk.token_ids)
                async with writing:
                    await context.write(each)

        async def keep(start: int, stop: int) -> None:
            """Nothing is sent before the end."""

        conversations = self.daemon.conversations
        await conversations.follow(live, write if requested.is_streamed else keep)
        tokenizer, options = conversations.turns.tokenizer, requested.choices[index]
        end = vllm_values.complete(live, first, index, options, tokenizer)
        async with writing:
            await context.write(end)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        tenant = caller().tenant
        for request_id in request.request_ids:
            for live in self._running.get((tenant, request_id), ()):
                self.daemon.conversations.cancel(live)
        return pb.AbortResponse()

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, NO_EMBEDDINGS)
        raise AssertionError("an abort raises")

    async def SubscribeKvEvents(  # type: ignore[override]  # likewise
        self, request: common.SubscribeKvEventsRequest, context: Any
    ) -> None:
        """A stream counts on from where its caller was, and tells all that is held first.

        So a caller misses nothing and has nothing twice, whoever served it before.
        """
        numbered = vllm_values.Numbered(request.start_sequence_number, self._ready.chunk_tokens)
        stall_seconds = self.daemon.config.stall_seconds
        with self.daemon.kv_events.subscribed(caller().tenant) as subscription:
            while True:
                for each in await subscription.batches():
                    batch = numbered.batch(each, datetime.now(UTC).timestamp())
                    try:
                        async with asyncio.timeout(stall_seconds):
                            await context.write(batch)
                    except TimeoutError:
                        raise DeadlineExceeded("nothing was taken of what was watched") from None

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: Any
    ) -> pb.HealthCheckResponse:
        serving = self.daemon.serving
        return pb.HealthCheckResponse(
            healthy=serving, message="serving" if serving else "takes no requests at present"
        )

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Any
    ) -> pb.GetModelInfoResponse:
        daemon, ready = self.daemon, self._ready
        config = await asyncio.to_thread(model_config, daemon.engine.model_folder)
        recommended = dict(daemon.recommended)
        return pb.GetModelInfoResponse(
            model_path=daemon.engine.model_name,
            served_model_name=daemon.engine.model_name,
            is_generation=True,
            max_context_length=ready.context_max,
            max_req_input_len=ready.context_max - 1,
            vocab_size=ready.vocab_size,
            model_type=str(config.get("model_type") or ""),
            architectures=[str(each) for each in config.get("architectures") or ()],
            eos_token_ids=sorted(daemon.conversations.turns.tokenizer.eos_token_ids),
            pad_token_id=_token_id(config.get("pad_token_id")),
            bos_token_id=_token_id(config.get("bos_token_id")),
            default_sampling_params_json=json.dumps(recommended) if recommended else "",
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            active_requests=self.daemon.num_turns,
            is_paused=not self.daemon.serving,
            uptime_seconds=asyncio.get_running_loop().time() - self.daemon.started_at,
            server_type="pensieve",
            data_parallel_size=1,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Any) -> pb.GetLoadsResponse:
        ready, answer = self._ready, await self.daemon.stats()
        lives = self.daemon.conversations.turns.all_live()
        load = vllm_values.load(answer.figures, lives, ready.chunk_tokens)
        now = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(
            timestamp=now, version=__version__, dp_rank_count=1, loads=[load]
        )

    async def GetTokenizer(  # type: ignore[override]
        self, request: common.GetTokenizerRequest, context: Any
    ) -> None:
        async with self._packing:  # once for all that ask
            if self._archive is None:
                folder = self.daemon.engine.model_folder
                data = await asyncio.to_thread(tokenizer_archive, folder)
                self._archive = data, hashlib.sha256(data).hexdigest()
        data, digest = self._archive
        for start in range(0, len(data), PIECE_BYTES):
            piece = common.GetTokenizerChunk(data=data[start : start + PIECE_BYTES])
            if start + PIECE_BYTES >= len(data):
                piece.sha256 = digest
            await context.write(piece)

    @property
    def _ready(self) -> Ready:
        if self.daemon.loading or self.daemon.engine.ready is None:
            raise Loading(LOADING)
        return self.daemon.engine.ready


async def _all_of(calls: list[Any]) -> None:
    """The first that fails ends the others."""
    if len(calls) == 1:
        await calls[0]
        return
    tasks = [asyncio.ensure_future(each) for each in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _token_id(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
