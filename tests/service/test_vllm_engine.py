"""The service that routers speak to vLLM, over the wire: token ids in, token ids out, nothing stored."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import zipfile
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from pensieve.builtin import MODEL_PATH
from pensieve.core.constraint import Constraint, ConstraintKind, choice_of
from pensieve.core.iteration import Logprob
from pensieve.core.sampling import Sampling
from pensieve.core.turn import FinishReason, TurnOptions
from pensieve.errors import InvalidArgument
from pensieve.launch.programs import ENGINE
from pensieve.service.daemon_config import DaemonConfig
from pensieve.service.grpc import auth, vllm_values
from pensieve.service.grpc.server import Listening
from pensieve.service.grpc.sizes import RESPONSE_BYTES_MAX
from pensieve.service.limits import Limits
from pensieve.service.live_turn import LiveTurn
from pensieve.text import Part
from pensieve.v1 import conversation_pb2, status_pb2
from pensieve.v1.routers import smg_common_pb2 as common
from pensieve.v1.routers import vllm_engine_pb2 as pb
from pensieve.v1.routers import vllm_engine_pb2_grpc
from tests.service.rig_daemon import ECHO, DaemonRig, details, wait_for
from tests.service.test_daemon import END_ID, TOKENIZER
from tests.service.test_unstored import expected, on_disk, run

SECRET = "The treasure lies under the old oak."
PROMPT = tuple(TOKENIZER.encode(SECRET).ids)
SLOW = (*ECHO, "--seconds=0.005")
MANY = 90_000
AUTHORIZED = (("authorization", "Bearer one"),)


def listening(data: Path, **more: Any) -> Listening:
    return Listening("127.0.0.1:0", data / "admin.sock", vllm_engine=True, **more)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonRig]:
    data = tmp_path_factory.mktemp("daemon") / "data"
    with DaemonRig(data, listening=listening(data)) as rig:
        yield rig


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[DaemonRig]:
    """Its iterations take 5 ms, and a turn without a reader would stay for an hour."""
    data, config = tmp_path / "data", DaemonConfig(grace_seconds=3600)
    with DaemonRig(data, listening=listening(data), config=config, program=SLOW) as rig:
        yield rig


def stub(rig: DaemonRig) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(rig.channel)


def request(prompt: Any = PROMPT, stream: bool = True, **params: Any) -> pb.GenerateRequest:
    params.setdefault("ignore_eos", True)
    params.setdefault("temperature", 0.0)
    request_id = params.pop("request_id", "r")
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
    )


def generate(rig: DaemonRig, *arguments: Any, **named: Any) -> tuple[list[int], Any, list[Any]]:
    """The tokens of a stream, its end, and its chunks."""
    answers = list(stub(rig).Generate(request(*arguments, **named), timeout=60))
    chunks = [each.chunk for each in answers if each.WhichOneof("response") == "chunk"]
    assert [each.WhichOneof("response") for each in answers[len(chunks) :]] == ["complete"]
    return [token for each in chunks for token in each.token_ids], answers[-1].complete, chunks


def refused(rig: DaemonRig, given: pb.GenerateRequest) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as error:
        list(stub(rig).Generate(given, timeout=60))
    return error.value


# -- generating --


def test_a_whole_reply_whose_logprobs_no_message_could_hold_is_refused(rig: DaemonRig) -> None:
    """Before it is computed, where its length is given; at its end, where it is not."""
    ready = rig.daemon.engine.ready
    assert ready is not None
    sampling = Sampling(max_tokens=ready.context_max, logprobs=20)
    most = vllm_values.WHOLE_BYTES_MAX // vllm_values._token_bytes(sampling)
    given = request(stream=False, max_tokens=10**6, logprobs=20)
    context = most + len(PROMPT) + 1
    with pytest.raises(InvalidArgument) as error:
        vllm_values.requested(given, context, 0)
    assert error.value.field == "sampling_params.logprobs"
    assert vllm_values.requested(given, context - 1, 0).choices[0].sampling.logprobs == 20
    given.stream = True
    assert vllm_values.requested(given, 10 * context, 0).is_streamed
    unnamed = request(stream=False, logprobs=20)
    assert vllm_values.requested(unnamed, 10 * context, 0).choices
    alternatives = [Logprob((1 << 28) - 1, -1e30) for _ in range(21)]
    live = LiveTurn(-1, "", 0, 1, finish=FinishReason.LENGTH)
    for number in range(most):
        live.token_ids.append((1 << 28) - 1)
        live.logprobs[number] = (-1e30, alternatives)  # type: ignore[index, assignment]
    whole = vllm_values.complete(live, 0, 0, TurnOptions(sampling), TOKENIZER)
    assert RESPONSE_BYTES_MAX * 0.9 < whole.ByteSize() < RESPONSE_BYTES_MAX
    live.token_ids.append(1)
    with pytest.raises(InvalidArgument):
        vllm_values.complete(live, 0, 0, TurnOptions(sampling), TOKENIZER)


def test_choices_share_what_the_first_has_computed(slow: DaemonRig) -> None:
    prompt = [5 + number % 200 for number in range(500)]
    answers = list(stub(slow).Generate(request(prompt, max_tokens=9, n=4), timeout=60))
    ends = [each.complete for each in answers if each.WhichOneof("response") == "complete"]
    assert sorted(each.cached_tokens for each in ends) == [0, 480, 480, 480]


def test_a_stream_has_the_tokens_of_a_conversation_with_the_same_log(rig: DaemonRig) -> None:
    sampling = conversation_pb2.Sampling(max_tokens=30, ignore_eos=True)
    said = rig.ask("same", SECRET, sampling=sampling)
    prompt = list(rig.messages("same")[0].token_ids)
    tokens, end, chunks = generate(rig, prompt, max_tokens=30)
    assert tokens == said.token_ids == expected(prompt, 30)
    assert {(each.prompt_tokens, each.index) for each in chunks} == {(len(prompt), 0)}
    assert all(each.completion_tokens == len(each.token_ids) for each in chunks)
    assert (end.finish_reason, end.completion_tokens) == ("length", 30)
    assert list(end.output_ids) == list(chunks[-1].token_ids)


def test_without_a_stream_there_is_only_the_end(rig: DaemonRig) -> None:
    (answer,) = stub(rig).Generate(request(stream=False, max_tokens=30), timeout=60)
    assert list(answer.complete.output_ids) == expected(PROMPT, 30)
    assert answer.complete.completion_tokens == 30
    assert answer.complete.prompt_tokens == len(PROMPT)


def test_the_next_request_of_a_chat_finds_what_was_computed(rig: DaemonRig) -> None:
    prompt = [*range(100, 180)]
    tokens, end, _ = generate(rig, prompt, max_tokens=30)
    assert end.cached_tokens == 0
    again = [*prompt, *tokens, *PROMPT]
    tokens, end, chunks = generate(rig, again, max_tokens=5)
    whole = (len(prompt) + 30 - 1) // 32 * 32
    assert {each.cached_tokens for each in chunks} == {end.cached_tokens} == {whole}
    assert tokens == expected(again, 5)


def test_several_choices_come_by_their_index(rig: DaemonRig) -> None:
    answers = list(stub(rig).Generate(request(n=3, max_tokens=20), timeout=60))
    ends = {each.complete.index: each.complete for each in answers if each.HasField("complete")}
    assert sorted(ends) == [0, 1, 2]
    for index in ends:
        chunks = [each.chunk for each in answers if each.HasField("chunk")]
        tokens = [token for each in chunks if each.index == index for token in each.token_ids]
        assert tokens == expected(PROMPT, 20)
        assert ends[index].completion_tokens == 20
    assert rig.num_live == 0


def test_nothing_of_it_is_on_the_disk(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with DaemonRig(data, listening=listening(data)) as rig:
        given = request(PROMPT * 3, max_tokens=40)
        given.tokenized.original_text = SECRET * 3
        list(stub(rig).Generate(given, timeout=60))
        written = on_disk(data)
        assert SECRET.encode() not in written
        assert array("I", PROMPT).tobytes() not in written


def test_each_end_has_its_reason_and_names_a_stop_of_the_request(rig: DaemonRig) -> None:
    log = expected(PROMPT, 60)
    last = log[7]
    tokens, end, _ = generate(rig, max_tokens=60, stop_token_ids=[last])
    assert tokens == log[: log.index(last) + 1]
    assert (end.finish_reason, end.matched_token_id) == ("stop", last)
    word = TOKENIZER.decode(log[:20])[10:14]
    tokens, end, _ = generate(rig, max_tokens=60, stop=["not there", word])
    assert (end.finish_reason, end.matched_stop_str) == ("stop", word)
    assert word in TOKENIZER.decode(tokens)
    assert word not in TOKENIZER.decode(tokens[:-1])
    found = next(number for number in range(200) if END_ID in expected([*PROMPT, number + 9], 60))
    tokens, end, _ = generate(rig, [*PROMPT, found + 9], max_tokens=60, ignore_eos=False)
    assert (end.finish_reason, end.WhichOneof("matched_stop")) == ("stop", None)
    assert tokens[-1] == END_ID


def test_a_reply_without_a_limit_is_as_long_as_the_context(tmp_path: Path) -> None:
    data = tmp_path / "data"
    written = {"context_max": "200"}
    with DaemonRig(data, listening=listening(data), written=written) as rig:
        tokens, end, _ = generate(rig)
        assert (len(tokens), end.finish_reason) == (200 - len(PROMPT), "length")


def test_logprobs_are_those_of_the_chunk(rig: DaemonRig) -> None:
    live = LiveTurn(-1, "", 0, 5, [7, 8, 9], ["", "", ""], [Part.TEXT] * 3)
    live.logprobs = {n: (-0.5 * n, (Logprob(70 + n, -1.0),)) for n in range(3)}
    (answer,) = vllm_values.chunks(live, 1, 3, 0)
    given = answer.chunk.output_logprobs
    assert list(given.token_ids) == [8, 9]
    assert list(given.token_logprobs) == [-0.5, -1.0]
    assert [list(each.token_ids) for each in given.top_logprobs] == [[71], [72]]
    live.finish = FinishReason.LENGTH
    end = vllm_values.complete(live, 0, 0, TurnOptions(), TOKENIZER).complete
    assert list(end.output_logprobs.token_logprobs) == [0.0, -0.5, -1.0]


def test_a_model_says_the_same_from_kv_that_it_found_as_from_none(tmp_path: Path) -> None:
    """Chats that grow, share and lose KV in tiers that are too small, beside the same prompts of tenants
    that find nothing."""
    data = tmp_path / "data"
    written = {"device_cache": "900t", "host_cache": "600t", "threads": "1"}
    with DaemonRig(data, listening=listening(data), program=ENGINE, written=written) as rig:
        num_cached = 0
        for chat in range(4):
            prompt = [*PROMPT, chat + 300]
            for turn in range(3):
                (answer,) = stub(rig).Generate(
                    request(prompt, stream=False, max_tokens=40, logprobs=2), timeout=60
                )
                end = answer.complete
                num_cached += end.cached_tokens
                alone = run(
                    rig,
                    prompt,
                    TurnOptions(Sampling(max_tokens=40, ignore_eos=True)),
                    tenant=f"{chat}-{turn}",
                )
                assert alone.cached_tokens == 0
                assert list(end.output_ids) == alone.token_ids
                logprobs = end.output_logprobs
                assert list(logprobs.token_ids) == alone.token_ids
                for each, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
                    assert each == max(top.values) <= 0.0
                    assert len(top.values) == 2
                prompt += [*end.output_ids, *PROMPT]
        assert num_cached > 500
        assert rig.call(rig.daemon.check()) == []


def test_a_long_reply_comes_in_several_chunks() -> None:
    num_tokens = vllm_values.PIECE_TOKENS * 2 + 1
    live = LiveTurn(-1, "", 0, 5, [7] * num_tokens)
    sizes = [len(each.chunk.token_ids) for each in vllm_values.chunks(live, 0, num_tokens, 0)]
    assert sizes == [4096, 4096, 1]


def test_the_sampling_is_what_the_protocol_says() -> None:
    def sampling(**params: Any) -> Sampling:
        given = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=[1]),
            sampling_params=pb.SamplingParams(**params),
        )
        return vllm_values.requested(given, 100, 8).choices[-1].sampling

    plain = Sampling(temperature=1.0, max_tokens=100)
    assert sampling() == plain
    assert sampling(temperature=0.0, max_tokens=5) == Sampling(max_tokens=5)
    assert sampling(seed=0) == replace(plain, seed=1)
    assert sampling(seed=7, n=3) == replace(plain, seed=10)
    assert sampling(stop=["x"], stop_token_ids=[3], min_tokens=2, ignore_eos=True) == replace(
        plain, stop=("x",), stop_token_ids=(3,), min_tokens=2, ignore_eos=True
    )
    assert sampling(logit_bias={5: -1.0, 3: 2.0}).logit_bias == ((3, 2.0), (5, -1.0))
    assert sampling(logprobs=0).logprobs == 0
    assert sampling(top_k=40, presence_penalty=0.5, frequency_penalty=0.25, min_p=0.5) == replace(
        plain, top_k=40, presence_penalty=0.5, frequency_penalty=0.25, min_p=0.5
    )


def test_a_token_with_a_low_priority_gives_it_to_its_requests() -> None:
    given = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1]))
    assert vllm_values.requested(given, 100, 8).choices[0].priority == 0
    assert vllm_values.requested(given, 100, -3).choices[0].priority == -3


@pytest.mark.parametrize(
    ("params", "constraint"),
    [
        ({"json_schema": "{}"}, Constraint(ConstraintKind.JSON_SCHEMA, "{}")),
        ({"regex": "a*"}, Constraint(ConstraintKind.REGEX, "a*")),
        ({"json_object": True}, Constraint(ConstraintKind.JSON_OBJECT)),
        ({"json_object": False}, None),
        ({"choice": pb.ChoiceConstraint(choices=["a", "b"])}, choice_of(("a", "b"))),
    ],
)
def test_constraints_are_those_of_sendmessage(
    params: dict[str, Any], constraint: Constraint | None
) -> None:
    given = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=[1]), sampling_params=pb.SamplingParams(**params)
    )
    (options,) = vllm_values.requested(given, 100, 8).choices
    assert options.constraint == constraint


def test_a_hopeless_constraint_is_refused(rig: DaemonRig) -> None:
    error = refused(rig, request(regex="(((", ignore_eos=False))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


# -- refusals --


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"structural_tag": "{}"}, "sampling_params.structural_tag"),
        ({"prompt_logprobs": 1}, "sampling_params.prompt_logprobs"),
        ({"truncate_prompt_tokens": 5}, "sampling_params.truncate_prompt_tokens"),
        ({"n": 17}, "sampling_params.n"),
        ({"seed": -1}, "sampling_params.seed"),
        ({"logprobs": -1}, "sampling.logprobs"),
        ({"top_p": 2.0}, "sampling.top_p"),
        ({"prompt": [TOKENIZER.vocab_size]}, "prompt"),
        ({"prompt": []}, "tokenized.input_ids"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    rig: DaemonRig, params: dict[str, Any], field: str
) -> None:
    error = refused(rig, request(**params))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(error)["BadRequest"].field_violations[0].field == field


@pytest.mark.parametrize(
    "more",
    [
        {"mm_inputs": pb.MultimodalInputs()},
        {"kv_transfer_params": pb.KvTransferParams()},
        {"kv_transfer_params_json": "{}"},
        {"data_parallel_rank": 1},
        {"text": "hello"},
    ],
)
def test_input_that_is_not_supported_is_refused_by_name(
    rig: DaemonRig, more: dict[str, Any]
) -> None:
    given = request()
    given.MergeFrom(pb.GenerateRequest(**more))
    field = "tokenized.input_ids" if "text" in more else next(iter(more))
    assert field in str(refused(rig, given).details())


def test_a_prompt_that_does_not_fit_is_out_of_range(rig: DaemonRig) -> None:
    assert refused(rig, request([3] * 100_000)).code() is grpc.StatusCode.OUT_OF_RANGE


def test_what_is_not_there_says_so(rig: DaemonRig) -> None:
    with pytest.raises(grpc.RpcError) as error:
        stub(rig).Embed(pb.EmbedRequest())
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_it_is_off_unless_it_is_wanted(tmp_path: Path) -> None:
    with DaemonRig(tmp_path / "data") as rig:
        error = refused(rig, request())
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def test_it_needs_a_token_where_tokens_are_needed_and_tenants_are_apart(tmp_path: Path) -> None:
    data = tmp_path / "data"
    tokens = tuple(
        auth.Token(hashlib.sha256(name.encode()).digest(), tenant=name, limits=limits)
        for name, limits in (("one", Limits(turns_max=1)), ("two", Limits()))
    )
    config = DaemonConfig(limits=auth.limits_of(tokens), grace_seconds=3600)
    guarded = listening(data, tokens=tokens)
    with DaemonRig(data, listening=guarded, config=config, program=SLOW) as rig:
        api = stub(rig)
        for call in (
            lambda: list(api.Generate(request())),
            lambda: api.Abort(pb.AbortRequest(request_ids=["r"])),
            lambda: api.HealthCheck(pb.HealthCheckRequest()),
            lambda: api.GetModelInfo(pb.GetModelInfoRequest()),
            lambda: api.GetLoads(pb.GetLoadsRequest()),
            lambda: list(api.GetTokenizer(common.GetTokenizerRequest())),
        ):
            with pytest.raises(grpc.RpcError) as error:
                call()
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        running = api.Generate(request(max_tokens=MANY), metadata=AUTHORIZED)
        next(running)
        with pytest.raises(grpc.RpcError) as error:
            list(api.Generate(request(), metadata=AUTHORIZED))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        other = (("authorization", "Bearer two"),)
        api.Abort(pb.AbortRequest(request_ids=["r"]), metadata=other)
        assert all(next(running).HasField("chunk") for _ in range(20)), "it is another tenant's"
        api.Abort(pb.AbortRequest(request_ids=["r"]), metadata=AUTHORIZED)
        assert list(running)[-1].complete.finish_reason == "abort"


# -- ends --


def test_an_abort_ends_a_request_with_what_it_has(slow: DaemonRig) -> None:
    running = stub(slow).Generate(request(max_tokens=MANY, n=2))
    other = stub(slow).Generate(request(max_tokens=40, request_id="other"))
    next(running)
    stub(slow).Abort(pb.AbortRequest(request_ids=["unknown", "r"]))
    rest = list(running)
    ends = [each.complete for each in rest if each.HasField("complete")]
    assert [each.finish_reason for each in ends] == ["abort", "abort"]
    assert [each.complete.finish_reason for each in other][-1] == "length"
    assert slow.num_live == 0
    stub(slow).Abort(pb.AbortRequest(request_ids=["r"]))


def test_a_client_that_leaves_ends_its_request_at_once(slow: DaemonRig) -> None:
    running = stub(slow).Generate(request(max_tokens=MANY, n=2))
    next(running)
    assert slow.num_live == 2
    running.cancel()
    wait_for(lambda: slow.num_live == 0)


def test_a_choice_that_may_not_begin_takes_the_others_with_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    config = DaemonConfig(grace_seconds=3600, turns_max=2)
    with DaemonRig(data, listening=listening(data), config=config, program=SLOW) as rig:
        error = refused(rig, request(max_tokens=MANY, n=3))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        wait_for(lambda: rig.num_live == 0)
        assert len(generate(rig, max_tokens=3)[0]) == 3


def test_an_engine_that_dies_is_unavailable_and_comes_back(slow: DaemonRig) -> None:
    running = stub(slow).Generate(request(max_tokens=MANY))
    next(running)
    os.kill(slow.daemon.engine.pid or 0, signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as error:
        list(running)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert details(error.value)["RetryInfo"].retry_delay.ToMilliseconds() == 200
    wait_for(lambda: stub(slow).HealthCheck(pb.HealthCheckRequest()).healthy)
    assert generate(slow, max_tokens=5)[0] == expected(PROMPT, 5)


def test_a_daemon_that_drains_says_so_and_refuses(slow: DaemonRig) -> None:
    slow.call(slow.daemon.drain(0.0))
    assert not stub(slow).HealthCheck(pb.HealthCheckRequest()).healthy
    assert stub(slow).GetServerInfo(pb.GetServerInfoRequest()).is_paused
    assert refused(slow, request()).code() is grpc.StatusCode.UNAVAILABLE


# -- what it says of itself --


def test_it_says_which_model_it_is(rig: DaemonRig) -> None:
    info = stub(rig).GetModelInfo(pb.GetModelInfoRequest())
    config = json.loads((MODEL_PATH / "config.json").read_text())
    assert (info.served_model_name, info.is_generation) == ("builtin", True)
    assert info.max_context_length == rig.daemon.context_max == info.max_req_input_len + 1
    assert info.vocab_size == TOKENIZER.vocab_size
    assert (info.model_type, list(info.architectures)) == (
        config["model_type"],
        config["architectures"],
    )
    assert list(info.eos_token_ids) == sorted(TOKENIZER.eos_token_ids)
    assert str(MODEL_PATH) not in str(info), "a name, and not where it lies"


def test_the_tokenizer_comes_whole_and_without_weights(rig: DaemonRig, tmp_path: Path) -> None:
    from pensieve.text import Tokenizer

    pieces = list(stub(rig).GetTokenizer(common.GetTokenizerRequest()))
    data = b"".join(each.data for each in pieces)
    assert [each.sha256 for each in pieces[:-1]] == [""] * (len(pieces) - 1)
    assert pieces[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".safetensors")]
        archive.extractall(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint() == TOKENIZER.fingerprint()


def test_it_says_how_much_it_has_to_do(slow: DaemonRig) -> None:
    def load() -> Any:
        answer = stub(slow).GetLoads(pb.GetLoadsRequest())
        assert (answer.dp_rank_count, len(answer.loads)) == (1, 1)
        return answer.loads[0]

    idle = load()
    assert (idle.num_total_reqs, idle.num_used_tokens, idle.token_usage) == (0, 0, 0.0)
    assert idle.max_total_num_tokens == 4096 * 32
    running = stub(slow).Generate(request(max_tokens=MANY))
    next(running)
    busy = load()
    assert (busy.num_running_reqs, busy.num_total_reqs) == (1, 1)
    assert len(PROMPT) < busy.num_used_tokens < MANY
    assert 0 < busy.token_usage < 1
    running.cancel()
    wait_for(lambda: load().num_total_reqs == 0)
    assert load().token_usage == 0.0, "idle KV gives way"


def test_health_and_reflection_know_it(rig: DaemonRig) -> None:
    check = rig.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=status_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=status_pb2.HealthCheckResponse.FromString,
    )
    name = "vllm.grpc.engine.VllmEngine"
    status = check(status_pb2.HealthCheckRequest(service=name)).status
    assert status == status_pb2.HealthCheckResponse.SERVING_STATUS_SERVING
    talk = rig.channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=status_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=status_pb2.ServerReflectionResponse.FromString,
    )
    questions = [
        status_pb2.ServerReflectionRequest(list_services="*"),
        status_pb2.ServerReflectionRequest(file_containing_symbol=f"{name}.Generate"),
    ]
    services, file = talk(iter(questions))
    assert name in {each.name for each in services.list_services_response.service}
    assert len(file.file_descriptor_response.file_descriptor_proto) >= 1
