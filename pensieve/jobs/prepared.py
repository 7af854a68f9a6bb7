"""Convert a line of a job to tokens for the engine, and the engine's answer to a result line.

A line gives the same tokens and seeds whenever it is read. If the template writes a date, it is the date of
the job's creation. If the body has no seed, the seed is derived from the file, the line and the choice. So a
line that is computed again, for example after a crash, gets the same answer.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NamedTuple

from pensieve.api.json_fields import one_line
from pensieve.api.openai.answer import Heading, answer
from pensieve.api.openai.request import Served, tokens_of
from pensieve.conversations.constraints import ConstraintChecker
from pensieve.conversations.live_turn import PromptTokens, ReplyTokens
from pensieve.core.turn import TurnOptions
from pensieve.engine.batch_run import Finished
from pensieve.errors import ContextFull, PensieveError
from pensieve.jobs.batch_line import (
    BatchLine,
    LineError,
    answer_line,
    error_line_json,
    error_of_request,
    read_line,
)
from pensieve.jobs.job_records import JobLine, JobUsage, NewAnswer, NewRefusal, StoredJob
from pensieve.sampling import Sampling
from pensieve.text import CallStyle, ChatTemplate, PartMarker

PROMPT_TAIL_TOKENS = 16  # a template may open the thinking in these last tokens of a prompt


@dataclass(frozen=True, slots=True)
class PreparedLine:
    line: BatchLine  # without messages
    tokens: array[int]  # 'I': the prompt
    samplings: tuple[Sampling, ...]  # one for each choice

    def options(self, choice: int) -> TurnOptions:
        options = self.line.request.turn.options
        return replace(options, sampling=self.samplings[choice], background=True)


class LineReader(NamedTuple):
    """Reads the lines of one job, in any thread."""

    job: StoredJob
    served: Served
    template: ChatTemplate
    context_max: int
    constraints: ConstraintChecker

    def read_all(self, lines: Sequence[JobLine]) -> list[PreparedLine | LineError]:
        found = map(self.read, lines)
        return [each for each in found if each is not None]

    def read(self, line: JobLine) -> PreparedLine | LineError | None:
        """Prepare a line; None if it is blank."""
        found = read_line(line.number, line.text, self.served, self.job.options.get("endpoint", ""))
        if not isinstance(found, BatchLine):
            return found
        request = found.request
        try:
            self.constraints.check(request.turn.options)
            began = datetime.fromtimestamp(self.job.created_at, UTC)
            tokens = tokens_of(request, self.template, self.context_max, began)
            if len(tokens) >= self.context_max:
                raise ContextFull(len(tokens) + 1, self.context_max)
        except PensieveError as error:
            return error_of_request(found, error)
        samplings = tuple(self._sampling(found, n) for n in range(request.num_choices))
        without_prompt = replace(request, turn=replace(request.turn, messages=()), prompt=None)
        return PreparedLine(
            BatchLine(found.line, found.custom_id, without_prompt), array("I", tokens), samplings
        )

    def _sampling(self, line: BatchLine, choice: int) -> Sampling:
        sampling = line.request.sampling
        has_seed = "seed" in (line.request.turn.given_sampling or ())
        if choice == 0 and has_seed:
            return sampling
        seed_source = sampling.seed if has_seed else self.job.sha256
        words = f"{seed_source}/{line.line}/{choice}".encode()
        return replace(
            sampling, seed=int.from_bytes(hashlib.blake2b(words, digest_size=7).digest())
        )


class ResultWriter(NamedTuple):
    """Converts the engine's answers to results, in any thread."""

    template: ChatTemplate
    model: str
    now: float  # seconds since 1970
    style: CallStyle | None = None  # how the model writes tool calls

    def result(self, prepared: PreparedLine, choices: Sequence[Finished]) -> NewAnswer | NewRefusal:
        failure = next((each.failure for each in choices if each.failure), None)
        if failure is not None:
            return refusal(engine_error(prepared.line, failure))
        line, request = prepared.line, prepared.line.request
        num_cached = [each.usage.device_tokens + each.usage.host_tokens for each in choices]
        replies = [self._reply(prepared, each) for each in choices]
        line_id = f"{line.line}"
        body = answer(
            request,
            replies,
            PromptTokens(len(prepared.tokens), num_cached[0]),
            Heading(_answer_id(prepared), int(self.now), request.model or self.model),
            self.template.tokenizer,
            self.style,
        )
        usage = JobUsage(
            len(prepared.tokens) * len(choices),
            sum(num_cached),
            sum(len(each.samples) for each in choices),
        )
        text = one_line(answer_line(line_id, line.custom_id, body)).rstrip()
        return NewAnswer(line.line, text, usage)

    def _reply(self, prepared: PreparedLine, finished: Finished) -> ReplyTokens:
        tail = prepared.tokens[-PROMPT_TAIL_TOKENS:]
        marker = PartMarker(self.template.tokenizer, tail)
        samples = finished.samples
        with_logprobs = prepared.line.request.sampling.logprobs is not None
        return ReplyTokens(
            [each.token_id for each in samples],
            [each.text for each in samples],
            finished.finish,
            [marker.push(each.token_id) for each in samples],
            [(each.logprob or 0.0, each.top_logprobs) for each in samples] if with_logprobs else (),
        )


def refusal(error: LineError) -> NewRefusal:
    return NewRefusal(error.line, one_line(error_line_json(f"{error.line}", error)).rstrip())


def engine_error(line: BatchLine, reason: str) -> LineError:
    """Describe a request that the engine could not answer."""
    return LineError(line.line, line.custom_id, reason.lower(), f"the request failed ({reason})")


def _answer_id(prepared: PreparedLine) -> str:
    """Return an id that is the same whenever the line is answered."""
    words = f"{prepared.line.custom_id}/{prepared.line.line}/{prepared.samplings[0].seed}".encode()
    return hashlib.blake2b(words, digest_size=12).hexdigest()
