"""Wrong invocations of every command: exit code 2, one line on stderr, nothing on stdout, no traceback.

What is named in braces is made for each test: `{model}` a tiny model, `{data}` rows with passages, `{store}` a store,
`{keys}` a file of keys, `{tmp}` an empty folder, `{file}` a text file, `{broken}` damaged JSON, `{surrogate}` rows with
a lone surrogate, `{busy}` a port that is taken.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend.cli import app, main
from cacheblend.serve.keys import add_key
from cacheblend.store import open_store
from command_line import Run, runner
from tiny_folder import TinyShape, build_tiny

PASSAGE = "The lighthouse was lit in 1871 and its keepers wrote down the weather."
SHAPE = TinyShape(layers=2, width=32, mlp_width=48, heads=2, kv_heads=1, vocab_size=300, context_length=256)

ASK = "ask -m {model} -s memory -q Why?"
WARM = "warm -m {model} -s {tmp}/s -d {data}"
EVALUATE = "evaluate -m {model} -d {data}"
INSPECT = "inspect -m {model} -q Why? -p text"
SERVE = "serve -m {model} --port 0"
CALIBRATE = "calibrate -m {model} -s {tmp}/s --out {tmp}/cost.json"
PLAN = "plan -m {model} --prefill-s 1"
GATE = "doctor --quality -m {model} -d {data} --dry-run"
TTFT = "bench ttft --shape tiny"

WRONG = {
    "unknown": [
        "nonsense",
        "--nonsense",
        "profile",
        "store nonsense",
        "keys nonsense",
        "bench nonsense",
        "bench vllm nonsense",
        "ask --nonsense",
        "demo extra",
        "doctor --model {model} extra",
        "evaluate --nonsense 3",
        "bench ttft -z",
        "bench core --out x",
    ],
    "renamed": [
        "evaluate --rows 3",
        "evaluate --arm full",
        "evaluate --check-layer 1",
        "doctor --rows 3",
        "warm --rows 3",
        "ask --check-layer 1",
        "inspect --max-tokens 9",
        "calibrate --rounds 3",
        "plan --machine x.json",
        "bench ttft --json out.json",
        "evaluate --json out.json",
        "bench plan --json=out.json",
    ],
    "missing": [
        "ask",
        "ask -m {model}",
        "ask -m {model} -s memory",
        "warm -m {model} -s {tmp}/s",
        "warm -s {tmp}/s -d {data}",
        "calibrate -m {model}",
        "plan -m {model}",
        "evaluate",
        "evaluate -d {data}",
        "inspect -m {model} -q Why?",
        "serve",
        "doctor",
        "keys add",
        "keys rm",
        "store ls",
        "store prune {store}",
        "store pin {store}",
        "bench ttft",
        "bench memory",
        "bench load",
        "bench controller",
        "bench evict",
        "bench sync",
        "bench agent",
        "bench peers",
        "bench vllm replay",
        "sync",
        "sync -m {model} -s {tmp}/s",
        "ask -m",
        "doctor --quality -m {model}",
    ],
    "numbers": [
        f"{ASK} -r 1.5",
        f"{ASK} -r nan",
        f"{ASK} -r -0.1",
        f"{ASK} -r much",
        f"{ASK} -r 0.1 -r 0.2",
        f"{ASK} -r 0.2,0.1",
        f"{ASK} -n 0",
        f"{ASK} -n 1e3",
        f"{ASK} -n 99999999999999999999",
        f"{ASK} --temperature -1",
        f"{ASK} --temperature nan",
        f"{ASK} --temperature inf",
        f"{ASK} --seed -1",
        f"{ASK} --seed 99999999999999999999999",
        f"{ASK} --row -1",
        f"{ASK} -d {{data}} --row 9",
        f"{ASK} --check-layers 9",
        f"{ASK} --check-layers 1;2",
        f"{ASK} --check-layers 2,1",
        f"{ASK} --check-layers -1",
        f"{ASK} --block-size 0",
        f"{ASK} --threshold nan",
        f"{ASK} --selector threshold --threshold inf",
        f"{WARM} --limit 0",
        f"{WARM} --batch-tokens 0",
        f"{WARM} --block-size -5",
        f"{CALIBRATE} --runs 0",
        f"{CALIBRATE} --length 0",
        f"{CALIBRATE} --length 99999999999",
        f"{PLAN} --context 1",
        f"{PLAN} --ratio 2",
        f"{PLAN} --stored-tokens nan",
        f"{PLAN} --device nvme:nan:1",
        f"{PLAN} --device nvme:inf:1",
        f"{PLAN} --device nvme",
        "plan -m {model} --prefill-s 0",
        "plan -m {model} --prefill-s -inf",
        f"{EVALUATE} --limit 0",
        f"{EVALUATE} --top-k 0",
        f"{EVALUATE} --chunk-tokens 0",
        f"{EVALUATE} --deviation-rows -1",
        f"{EVALUATE} --ratio 7",
        f"{EVALUATE} --check-layers x",
        f"{EVALUATE} --seed -3",
        "evaluate --suite nano --suite-seed -1",
        f"{INSPECT} --layers 9",
        f"{INSPECT} --layers 3-1",
        f"{INSPECT} --max-prompt-tokens 0",
        f"{GATE} --threshold 1",
        f"{GATE} --threshold nan",
        f"{GATE} --confidence 2",
        f"{GATE} --ratio 3",
        f"{GATE} --max-tokens 0",
        f"{SERVE} --active 0",
        f"{SERVE} --waiting -1",
        f"{SERVE} --chunk-tokens 0",
        f"{SERVE} --timeout 0",
        f"{SERVE} --timeout nan",
        f"{SERVE} --drain -1",
        f"{SERVE} --tool-call-parser gpt",
        f"{SERVE} --max-prompt-tokens 0",
        f"{SERVE} --max-tokens 0",
        f"{SERVE} --store-quota much",
        f"{SERVE} --pin-quota -1",
        "demo --ratio 2",
        "demo --ratio nan",
        "demo --questions 0",
        "demo --questions 13",
        "demo --seed x",
        f"{TTFT} --threads 0",
        f"{TTFT} --threads x",
        f"{TTFT} --chunks 0",
        f"{TTFT} --chunks 99999999999",
        f"{TTFT} --chunk-tokens -1",
        f"{TTFT} --question-tokens 0",
        f"{TTFT} --ratio nan",
        f"{TTFT} --runs 0",
        f"{TTFT} --seed -1",
        "bench memory --shape tiny --threads 0",
        "bench load --shape tiny --threads 0",
        "bench cuda --dry-run --minutes 0",
        "bench load --shape tiny --ratio 1.01",
        "bench controller --shape tiny --chunks 0",
        "bench controller --shape tiny --runs 0",
        "bench core --threads 0",
        "bench plan --chunks 0",
        "bench plan --runs 0",
        "bench plan --chunks 60000 --chunk-tokens 60000",
        "bench match --stored 0",
        "bench match --stored 1",
        "bench match --stored 99999999 --chunk-tokens 4096",
        "bench store --blocks 0",
        "bench store --blocks -7",
        "bench evict --trace {tmp} --size 2",
        "bench evict --trace {tmp} --size nan",
        "bench codecs --suite-seed 9",
        "bench codecs --limit 0",
        "bench random-shapes --gain 0",
        "bench random-shapes --prompts 0",
        "bench serve --clients 0",
        "bench routing --servers 1",
        "bench serve --shadow 1.5",
        "serve -m {model} --shadow -0.1",
        "serve -m {model} --shadow 0.1 --shadow-floor 0.99999",
        "bench vllm ttft --batched-tokens 0",
        "bench vllm ttft --dtype int8",
        "bench vllm shadow --shadow 1.5",
        "bench vllm shadow --requests 0",
        "bench vllm replay --trace {tmp} --rate 0",
        "bench vllm faults --tried 0",
        "bench agent --data {tmp} --turns 2",
        "bench agent --data {tmp} --reorder 1.5",
        "bench peers --data {tmp} --chunks 0",
        "store prune {store} --max-bytes -1",
        "store prune {store} --max-bytes 1e9",
    ],
    "names": [
        f"{ASK} --selector best",
        f"{ASK} --measure q",
        f"{ASK} --codec zip",
        f"{ASK} --anchor there",
        f"{ASK} --dtype int8",
        f"{ASK} --device moon",
        f"{ASK} --device meta",
        f"{ASK} --chat",
        f"{WARM} --engine tgi",
        f"{WARM} --codec int3",
        f"{WARM} --frame nothing",
        f"{CALIBRATE} --codec none",
        f"{PLAN} --codec none",
        f"{EVALUATE} --format musique",
        f"{EVALUATE} --methods blnd",
        f"{EVALUATE} --selector hkvdd",
        f"{EVALUATE} --scorer bleu",
        f"{EVALUATE} --template none",
        f"{EVALUATE} --anchor there",
        "evaluate --suite micro",
        "evaluate --suite nano --part swap",
        f"{GATE} --selector best",
        f"{GATE} --format musique",
        f"{SERVE} --anchor system",
        f"{SERVE} --selector best",
        "doctor --shape round",
        "doctor --model nano --dtype int8",
        f"{TTFT} --arms full,blnd",
        f"{TTFT} --store tape",
        f"{TTFT} --sweep time",
        "bench ttft --shape round",
        "bench random-shapes --shape round",
        "bench random-shapes --dtype int8",
        "bench load --shape tiny --kv-shape round",
        "bench cuda --dry-run --part round",
        "keys add 😀 --file {tmp}/no/keys.json",
        "store unpin {store} ünbekannt",
        "store pin {store} 😀",
        "ask -m {model} -s memory -q Why? -p @{tmp}/ﬀ",
    ],
    "files": [
        "ask -m {tmp}/none -s memory -q ?",
        "ask -m {tmp} -s memory -q ?",
        "ask -m {file} -s memory -q ?",
        f"{ASK} -d {{tmp}}/none.json",
        f"{ASK} -d {{broken}}",
        f"{ASK} -p @{{tmp}}",
        f"{ASK} --profile {{tmp}}/none.json",
        f"{ASK} --profile {{broken}}",
        f"{ASK} --profile {{tmp}}",
        f"{ASK} --cost-model {{tmp}}/none.json",
        f"{ASK} --cost-model {{broken}}",
        f"{ASK} --cost-model {{tmp}}",
        f"{ASK} --cost-model {{list}}",
        "warm -m {model} -s {tmp}/s -d {broken}",
        "warm -m {model} -s {tmp}/s -d {tmp}",
        "plan -m {model} --cost-model {list}",
        "plan -m {tmp} --prefill-s 1",
        f"{PLAN} --plot {{tmp}}/x.txt",
        f"{PLAN} --plot {{tmp}}/no/x.png",
        "calibrate -m {model} -s {tmp}/s --out {tmp}",
        "calibrate -m {model} -s {tmp}/s --out {tmp}/no/c.json",
        "evaluate -m {model} -d {broken}",
        "evaluate -m {model} -d {tmp}",
        "evaluate -m {tmp}/none -d {data}",
        f"{EVALUATE} --templates {{broken}}",
        f"{EVALUATE} --templates {{tmp}}/none.toml",
        f"{EVALUATE} --out {{file}}",
        f"{EVALUATE} --json-file {{tmp}}",
        f"{EVALUATE} --json-file {{tmp}}/no/x.json",
        f"{INSPECT} --out {{file}}",
        "doctor -m {tmp}/none",
        "doctor --quality -m {model} -d {data} --profile {tmp}/no/p.json",
        "demo --plot {tmp}/x.txt",
        "demo --keep {tmp}",
        f"{SERVE} --keys {{tmp}}/none.json",
        f"{SERVE} --keys {{broken}}",
        f"{SERVE} --keys {{tmp}}",
        "keys ls --file {tmp}/nope.json",
        "keys ls --file {broken}",
        "keys ls --file {tmp}",
        "keys ls --file {list}",
        "keys rm x --file {tmp}/nope.json",
        "keys rm nobody --file {keys}",
        "keys add x --file {tmp}",
        "keys add known --file {keys}",
        f"{TTFT} --json-file {{tmp}}/no/r.json",
        f"{TTFT} --data {{tmp}}/none.txt",
        "bench memory --shape tiny --json-file {tmp}",
        "bench plan --json-file {tmp}",
        "bench match --json-file {tmp}",
        "bench store --folder {tmp}/none",
        "bench load --shape tiny --folder {file}",
        "bench cuda --dry-run --folder {file}",
        "bench evict --trace {tmp}/none",
        "bench sync --data {tmp}/none",
        "bench agent --shape tiny --data {tmp}/none",
        "bench agent --shape tiny --data {broken}",
        "bench agent --shape tiny --data {data} --model {tmp}/none",
        "bench peers --shape tiny --data {tmp}/none",
        "bench peers --shape tiny --data {broken}",
        "bench peers --model {tmp}/none --data {data}",
        "sync -m {model} -s {tmp}/s --source {tmp}/none",
        "sync -m {model} -s {tmp}/s --source {broken}",
        "bench evict --trace {tmp} --plot {tmp}/x.txt",
        "bench serve --model {tmp}/none",
        "bench serve --trace {tmp}",
        "bench vllm ttft --model {tmp}/none",
        "bench vllm shadow --model {tmp}/none",
        "bench vllm replay --trace {tmp}/none",
        "bench vllm faults --only nothing",
        "bench vllm faults --json-file {tmp}",
        "bench codecs --json-file {tmp}",
        "bench ttft --model {tmp}",
    ],
    "stores": [
        "store ls {tmp}/none",
        "store ls {file}",
        "store ls {tmp}",
        "store stat memory",
        "store verify memory://",
        "store stat file://host/x",
        "store stat file://",
        "store stat gs://bucket",
        "store ls s3://",
        "store ls redis://",
        "store ls redis://127.0.0.1:1?timeout=0.2",
        "store ls redis://127.0.0.1:notaport",
        "store ls redis://127.0.0.1:99999",
        "store ls s3://b?endpoint=http://127.0.0.1:1&timeout=0.2",
        "store ls file://{store}?max_bytes=much",
        "store ls file://{store}?speed=3",
        "store ls {store} {tmp}",
        "store pin {store} x --all",
        "store rm {store} 00ff",
        "warm -m {model} -s memory -d {data}",
        "sync -m {model} -s memory --source {tmp}",
        "warm -m {model} -s http://x -d {data}",
        "ask -m {model} -q Why? -s {file}",
        "ask -m {model} -q Why? -s ftp://x",
        "ask -m {model} -q Why? -s memory://x",
        "ask -m {model} -q Why? -s memory://?max_bytes=-1",
        "ask -m {model} -q Why? -s memory://?ttl=soon",
        "ask -m {model} -q Why? -s memory://?evict=random",
        "ask -m {model} -q Why? -s file://{tmp}/a?direct=maybe",
        "ask -m {model} -q Why? -s redis://127.0.0.1:6379?timeout=nan",
        "ask -m {model} -q Why? -s kvfoo?max_bytes=1MiB",
        "ask -m {model} -q Why? -s memory,./kvx",
        "ask -m {model} -q Why? -s memory,memory",
        "ask -m {model} -q Why? -s memory,",
        "ask -m {model} -q Why? -s ,",
        "ask -m {model} -q Why? -s Memory",
        "ask -m {model} -q Why? -s file:",
        "ask -m {model} -q Why? -s mem:",
        "ask -m {model} -q Why? -s ~nobody-of-this-name/x",
        "evaluate -m {model} -d {data} -s tape://x",
        "inspect -m {model} -q Why? -p text -s memory://x",
        "serve -m {model} --port 0 -s tape://x",
        "calibrate -m {model} -s tape://x --out {tmp}/c.json",
        "bench plan --store tape://x",
    ],
    "network": [
        "serve -m {model} --port 99999",
        "serve -m {model} --port -1",
        "serve -m {model} --port http",
        "serve -m {model} --port {busy}",
        "serve -m {model} --port 0 --host 300.1.1.1",
        "serve -m {model} --port 0 --host 192.0.2.1",
        "serve -m {model} --port 0 --host no..host",
        "serve -m {model} --port 0 --host [::1",
    ],
    "contradictions": [
        f"{ASK} --profile {{file}} --ratio 0.2",
        "doctor -m {model} --shape tiny",
        "doctor -m {model} -d {data}",
        "doctor --quality --shape tiny -d {data}",
        "evaluate --suite nano -d {data}",
        "evaluate --suite nano --methods full",
        "evaluate --part main -m {model} -d {data}",
        "plan -m {model} --prefill-s 1 --cost-model {file}",
        f"{TTFT} --plot x.png",
        "bench ttft --model {model} --shape tiny",
        "bench serve --model {model} --shape tiny",
        "bench routing --model {model} --shape tiny",
        "serve -m {model} --shadow-floor 0.9",
        "bench serve --shape tiny --plot x.png",
        "bench vllm latency --model {model} --shape tiny",
        f"{ASK} --selector head -r 0.5,0.2 --check-layers 0,1",
        f"{ASK} -r 0.2,0.5 --check-layers 0,1",
        f"{ASK} --selector threshold",
    ],
}
EMPTY = [
    ["ask", "-m", "", "-s", "memory", "-q", "?"],
    ["ask", "-m", "{model}", "-s", "", "-q", "?"],
    ["ask", "-m", "{model}", "-s", "memory", "-q", ""],
    ["ask", "-m", "{model}", "-s", "memory", "-q", "?", "-p", ""],
    ["ask", "-m", "{model}", "-s", "memory", "-q", "?", "--device="],
    ["warm", "-m", "{model}", "-s", "{tmp}/s", "-d", ""],
    ["keys", "add", ""],
    ["keys", "add", "a b\x1b[2J", "--file", ""],
    ["store", "ls", ""],
    [""],
    ["serve", "-m", "{model}", "--host", ""],
    ["evaluate", "-m", "{model}", "-d", "{data}", "--methods", ","],
    ["bench", "ttft", "--shape", "tiny", "--arms", " "],
    ["ask", "-m", "{model}", "-s", "memory", "-q", "?", "-p", "word " * 900],
    ["store", "ls", "none\udcff"],
    ["ask", "-m", "{model}", "-s", "memory", "-q", "Why?", "-p", "\udcff"],
    ["ask", "-m", "{model}", "-s", "memory", "-q", "Why?", "--salt=\udcff"],
    ["ask", "-m", "{model}", "-s", "memory", "-q", "Why?", "--json", "-p", "a\ud800b" * 200],
    ["warm", "-m", "{model}", "-s", "{tmp}/\udcff", "-d", "{data}"],
    ["warm", "-m", "{model}", "-s", "{tmp}/s", "-d", "{surrogate}"],
    ["evaluate", "-m", "{model}", "-d", "{surrogate}"],
    ["ask", "-m", "{model}", "-s", "memory", "-d", "{surrogate}"],
    ["ask", "-m", "a\x00b", "-s", "memory", "-q", "?"],
]
CASES = [(line.split(" "), kind) for kind, lines in WRONG.items() for line in lines] + [(each, "odd") for each in EMPTY]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    root = tmp_path_factory.mktemp("wrong")
    build_tiny(root / "tiny-llama", [PASSAGE], SHAPE)
    made = {"model": root / "tiny-llama", "store": root / "store"}
    made |= {name: root / f"{name}.json" for name in ("data", "keys", "file", "broken", "list", "surrogate")}
    made["data"].write_text(f'[{{"ctxs": [{{"title": "", "text": "{PASSAGE}"}}], "question": "When?"}}]')
    made["file"].write_text("text")
    made["broken"].write_text('{"format": 1, "keys": [')
    made["list"].write_text("[1]")
    made["surrogate"].write_text('[{"question": "Why?", "passages": [{"text": "a"}, {"text": "b \\ud800"}]}]')
    add_key(made["keys"], "known")
    open_store(made["store"]).close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield {name: str(path) for name, path in made.items()} | {"busy": str(taken.getsockname()[1])}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the command line in this process, in an empty folder."""
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return runner(capsys)


def filled(arguments: list[str], places: dict[str, str], tmp: Path) -> list[str]:
    names = places | {"tmp": str(tmp)}
    return [re.sub(r"\{(\w+)\}", lambda found: names[found[1]], argument) for argument in arguments]


def check(code: int, out: str, err: str) -> None:
    assert code == 2, (out, err)
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ") and len(lines[0]) > 20
    assert "Traceback" not in err


def test_there_are_enough_of_them_and_every_command_is_among_them() -> None:
    assert len(CASES) >= 120
    assert len({tuple(arguments) for arguments, _ in CASES}) == len(CASES)
    assert {names for names, _ in commands()} <= {
        tuple(arguments[:length]) for arguments, _ in CASES for length in (1, 2, 3)
    }


@pytest.mark.parametrize(("arguments", "kind"), CASES, ids=[f"{k}: {' '.join(a)[-50:]}" for a, k in CASES])
def test_a_wrong_invocation_is_one_line(
    run: Run, places: dict[str, str], tmp_path: Path, arguments: list[str], kind: str
) -> None:
    (tmp_path / "empty").mkdir()
    result = run(*filled(arguments, places, tmp_path / "empty"))
    check(result.code, result.out, result.err)
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize(
    "line",
    ["ask -m {model} -s gs://x -q ?", "serve -m {model} --port {busy}", "bench ttft --threads 0", "store ls {tmp}/a"],
)
def test_the_same_in_a_process(places: dict[str, str], tmp_path: Path, line: str) -> None:
    program = [sys.executable, "-c", "from cacheblend.cli import main; main()"]
    arguments = filled(line.split(" "), places, tmp_path)
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, cwd=tmp_path)
    check(done.returncode, done.stdout, done.stderr)


def test_a_bucket_without_credentials_names_the_keys(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    result = run("store", "ls", "s3://bucket/kv?timeout=0.3")
    check(result.code, result.out, result.err)
    assert "AWS_ACCESS_KEY_ID" in result.err and "169.254" not in result.err


@pytest.mark.parametrize("line", ["ttft", "latency", "replay --trace {tmp}"])
def test_without_vllm_its_benchmarks_end_before_they_make_weights(
    run: Run, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr("cacheblend.bench.vllm_server.find_spec", lambda name: None)
    monkeypatch.setattr("cacheblend.bench.vllm_server.build_shape", lambda *_, **__: pytest.fail("made weights"))
    result = run("bench", "vllm", *filled(line.split(" "), places, tmp_path))
    check(result.code, result.out, result.err)
    assert "make vllm" in result.err


def test_a_port_of_zero_is_told_as_the_one_that_was_taken(
    run: Run, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: seen.append(sockets[0].getsockname()[1]))
    result = run("serve", "-m", places["model"], "--port", 0)
    assert f"http://127.0.0.1:{seen[0]}/v1" in result.err


def test_bytes_that_are_no_text_are_named(run: Run, places: dict[str, str]) -> None:
    result = run("ask", "-m", places["model"], "-s", "memory", "-q", "Why?", "-p", "\udcff")
    assert "argument 9" in result.err and "UTF-8" in result.err
    result = run("ask", "-m", places["model"], "-s", "memory", "-d", places["surrogate"])
    assert "row 0, passages[1], field 'text': the text has a lone surrogate at character 2 (U+D800)" in result.err


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("config.json", '"hidden_size": "wide"', "'hidden_size' expected int"),
        ("config.json", '"vocab_size": 290', "the weights do not fit config.json"),
        ("config.json", '"model_type": "unheard"', "model type `unheard`"),
        ("tokenizer.json", "{", "has no tokenizer that transformers can open"),
        ("model.safetensors", "x", "deserializing header"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(
    run: Run, places: dict[str, str], tmp_path: Path, file: str, text: str, reason: str
) -> None:
    model = Path(shutil.copytree(places["model"], tmp_path / "model"))
    config = (model / file).read_bytes()
    changed = json.loads(config) | json.loads(f"{{{text}}}") if file == "config.json" else None
    (model / file).write_text(text if changed is None else json.dumps(changed))
    result = run("ask", "-m", model, "-s", "memory", "-q", "Why?", "-p", "text")
    check(result.code, result.out, result.err)
    assert reason.lower() in result.err.lower()
    assert "with_tokenizer" not in result.err and "above report" not in result.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan -m {model} --prefill-s 0", "--prefill-s 0: the seconds of a full prefill must be above 0"),
        ("plan -m {model} --prefill-s -2", "--prefill-s -2: the seconds of a full prefill must be above 0"),
        (f"{TTFT} --methods full,foo", "there is no method 'foo' here; choose from full, prefix, reuse, blend, miss"),
        (f"{TTFT} --store redis", "there is no store 'redis' here; choose from memory, disk"),
        ("keys add x --file {nothing}", "is empty and has no keys; delete it"),
        ("keys add x --file {tmp}", "is a folder; name a file"),
        ("keys ls --file {tmp}", "is a folder; name a file"),
        ("warm -m {model} -s {tmp}/s -d {tmp}/none", "there is no such file; passages come as .json"),
        ("warm -m {model} -s {tmp}/s -d {tmp}/none.csv", "there is no such file; passages come as .json"),
        ("warm -m {model} -s {tmp}/s -d {nothing}", "the name has no ending; passages come as .json"),
        ("warm -m {model} -s {tmp}/s -d {pipe}", "it is a pipe or a device, not a file"),
        (f"{ASK} --threshold 0.5", "--threshold 0.5 has no effect without --selector threshold"),
        (f"{ASK} --hops 1", "--hops 1 has no effect without --selector query or hybrid; add it"),
        (f"{ASK} --selector hybrid --hops 5", "--hops"),
        (f"{ASK} --selector query --hops 1 --hop-spans 9", "--hop-spans"),
        (f"{EVALUATE} --selector query:hops=9", "hops must be a whole number, 0 to 4 (0: only the question), got 9"),
        (f"{ASK} --threshold 0.5 --selector hkvd", "--threshold 0.5 has no effect without --selector threshold"),
        (f"{EVALUATE} --selector hkvd:foo=1", "there is no setting 'foo' here; settings are measure"),
    ],
)
def test_the_line_says_what_is_wrong(run: Run, places: dict[str, str], tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "nothing").touch()
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    made = places | {name: str(tmp_path / name) for name in ("nothing", "pipe")}
    result = run(*filled(line.split(" "), made, tmp_path / "empty"))
    check(result.code, result.out, result.err)
    assert message in result.err
    assert "Error(" not in result.err and "('" not in result.err


@pytest.mark.parametrize(
    ("command", "wrong"), [("plan", "load only what"), ("bench ttft", "evaluate also"), ("evaluate", "bench ttft")]
)
def test_help_speaks_of_its_own_command(run: Run, command: str, wrong: str) -> None:
    assert wrong not in " ".join(run(*command.split(" "), "--help").out.replace("│", " ").split())


# ---- at random ----------------------------------------------------------------------------------------------

JUNK = ["", "0", "-1", "nan", "inf", "-inf", "1e400", "99999999999999999999", "x", "é", "😀", "\udcff", "\x1b[2J"]
JUNK += ["[/b]", "/", ".", "~", "@", ",", "1,", "a=b", "s3://", "file:///nonexistent/x", "--", "-", "None", "{}", "%s"]


def commands() -> list[tuple[tuple[str, ...], list[str]]]:
    """Every command by its names, and its options that take a value."""
    found = []

    def visit(command: object, names: tuple[str, ...]) -> None:
        for name, below in getattr(command, "commands", {}).items():
            visit(below, (*names, name))
        if not hasattr(command, "commands"):
            takes = [p.opts[0] for p in command.params if p.opts[0].startswith("--") and not p.is_flag]  # type: ignore[attr-defined]
            found.append((names, takes))

    visit(typer.main.get_command(app), ())
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_junk_in_any_option_is_no_traceback(capsys: pytest.CaptureFixture[str], data: st.DataObject) -> None:
    """A command never gets as far as its work: an option that does not exist follows the junk."""
    names, options = data.draw(st.sampled_from(commands()))
    value = data.draw(st.one_of(st.sampled_from(JUNK), st.text(max_size=20)))
    option = data.draw(st.sampled_from([*options, "--nonsense"]))
    with pytest.raises(SystemExit) as left:
        main([*names, f"{option}={value}", "--no-such-option"])
    captured = capsys.readouterr()
    check(int(left.value.code or 0), captured.out, captured.err)
