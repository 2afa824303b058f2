"""Wrong invocations of the command line, by what is wrong about them.

What is named in braces is made for each test: `{model}` a tiny model, `{data}` rows with passages, `{store}` a store,
`{keys}` a file of keys, `{tmp}` an empty folder, `{file}` a text file, `{broken}` damaged JSON, `{list}` JSON that is a
list, `{surrogate}` rows with a lone surrogate, `{busy}` a port that is taken.
"""

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from hypothesis import strategies as st

from cacheblend.serve.keys import add_key
from cacheblend.store import open_store
from tiny_folder import TinyShape, build_tiny

PASSAGE = "The lighthouse was lit in 1871 and its keepers wrote down the weather."
SHAPE = TinyShape(layers=2, width=32, mlp_width=48, heads=2, kv_heads=1, vocab_size=300, context_length=256)

ASK = "ask -m {model} -s memory -q Why?"
WARM = "warm -m {model} -s {tmp}/s -d {data}"
EVALUATE = "evaluate -m {model} -d {data}"
SERVE = "serve -m {model} --port 0"
CALIBRATE = "calibrate -m {model} -s {tmp}/s --out {tmp}/cost.json"
PLAN = "plan -m {model} --prefill-s 1"
GATE = "doctor --quality -m {model} -d {data} --dry-run"
TTFT = "bench ttft --shape tiny"
INSPECT = "inspect -m {model} -q Why? -p text"

WRONG = {
    "unknown": [
        "nonsense",
        "--nonsense",
        "profile",
        "store nonsense",
        "keys nonsense",
        "bench nonsense",
        "ask --nonsense",
        "demo extra",
        "doctor --model {model} extra",
        "evaluate --nonsense 3",
        "bench ttft -z",
    ],
    "renamed": [
        "evaluate --rows 3",
        "evaluate --arm full",
        "evaluate --check-layer 1",
        "doctor --rows 3",
        "warm --rows 3",
        "ask --check-layer 1",
        "calibrate --rounds 3",
        "plan --machine x.json",
        "bench ttft --json out.json",
        "evaluate --json out.json",
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
        "serve",
        "doctor",
        "keys add",
        "keys rm",
        "store ls",
        "store prune {store}",
        "store pin {store}",
        "bench ttft",
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
        f"{EVALUATE} --ratio 7",
        f"{EVALUATE} --check-layers x",
        f"{EVALUATE} --seed -3",
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
        "demo --seed 10",
        f"{TTFT} --threads 0",
        f"{TTFT} --threads x",
        f"{TTFT} --chunks 0",
        f"{TTFT} --chunks 99999999999",
        f"{TTFT} --chunk-tokens -1",
        f"{TTFT} --question-tokens 0",
        f"{TTFT} --ratio nan",
        f"{TTFT} --runs 0",
        f"{TTFT} --seed -1",
        "serve -m {model} --shadow -0.1",
        "serve -m {model} --shadow 0.1 --shadow-floor 0.99999",
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
        "sync -m {model} -s {tmp}/s --source {tmp}/none",
        "sync -m {model} -s {tmp}/s --source {broken}",
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
        "serve -m {model} --port 0 -s tape://x",
        "calibrate -m {model} -s tape://x --out {tmp}/c.json",
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
        "plan -m {model} --prefill-s 1 --cost-model {file}",
        f"{TTFT} --plot x.png",
        "bench ttft --model {model} --shape tiny",
        "serve -m {model} --shadow-floor 0.9",
        f"{ASK} --selector head -r 0.5,0.2 --check-layers 0,1",
        f"{ASK} -r 0.2,0.5 --check-layers 0,1",
        f"{ASK} --selector threshold",
    ],
}

WRONG_LAB = {
    "unknown": [
        "nonsense",
        "vllm nonsense",
        "ttft --nonsense",
        "train --nonsense",
        "core --out x",
    ],
    "renamed": [
        "inspect --max-tokens 9",
        "plan --json=out.json",
    ],
    "missing": [
        "inspect -m {model} -q Why?",
        "train",
        "paper",
        "paper -m {model}",
        "paper -d {data}",
        "evaluate",
        "memory",
        "load",
        "controller",
        "evict",
        "sync",
        "agent",
        "peers",
        "vllm replay",
    ],
    "numbers": [
        f"{EVALUATE} --deviation-rows -1",
        "suite nano --suite-seed -1",
        f"{INSPECT} --layers 9",
        f"{INSPECT} --layers 3-1",
        f"{INSPECT} --max-prompt-tokens 0",
        "memory --shape tiny --threads 0",
        "load --shape tiny --threads 0",
        "cuda --dry-run --minutes 0",
        "load --shape tiny --ratio 1.01",
        "controller --shape tiny --chunks 0",
        "controller --shape tiny --runs 0",
        "core --threads 0",
        "plan --chunks 0",
        "plan --runs 0",
        "plan --chunks 60000 --chunk-tokens 60000",
        "match --stored 0",
        "match --stored 1",
        "match --stored 99999999 --chunk-tokens 4096",
        "store --blocks 0",
        "store --blocks -7",
        "evict --trace {tmp} --size 2",
        "evict --trace {tmp} --size nan",
        "train --out {tmp}/x --shorten 0",
        "train --out {tmp}/x --seed -1",
        "codecs --suite-seed 9",
        "codecs --limit 0",
        "random-shapes --gain 0",
        "random-shapes --prompts 0",
        "serve --clients 0",
        "routing --servers 1",
        "serve --shadow 1.5",
        "vllm ttft --batched-tokens 0",
        "vllm ttft --dtype int8",
        "vllm shadow --shadow 1.5",
        "vllm shadow --requests 0",
        "vllm replay --trace {tmp} --rate 0",
        "vllm faults --tried 0",
        "agent --data {tmp} --turns 2",
        "agent --data {tmp} --reorder 1.5",
        "peers --data {tmp} --chunks 0",
    ],
    "names": [
        "suite micro",
        "suite nano --part swap",
        "random-shapes --shape round",
        "random-shapes --dtype int8",
        "load --shape tiny --kv-shape round",
        "cuda --dry-run --part round",
    ],
    "files": [
        f"{INSPECT} --out {{file}}",
        "memory --shape tiny --json-file {tmp}",
        "plan --json-file {tmp}",
        "match --json-file {tmp}",
        "store --folder {tmp}/none",
        "load --shape tiny --folder {file}",
        "cuda --dry-run --folder {file}",
        "evict --trace {tmp}/none",
        "sync --data {tmp}/none",
        "agent --shape tiny --data {tmp}/none",
        "agent --shape tiny --data {broken}",
        "agent --shape tiny --data {data} --model {tmp}/none",
        "peers --shape tiny --data {tmp}/none",
        "peers --shape tiny --data {broken}",
        "peers --model {tmp}/none --data {data}",
        "evict --trace {tmp} --plot {tmp}/x.txt",
        "serve --model {tmp}/none",
        "serve --trace {tmp}",
        "vllm ttft --model {tmp}/none",
        "vllm shadow --model {tmp}/none",
        "vllm replay --trace {tmp}/none",
        "vllm faults --only nothing",
        "vllm faults --json-file {tmp}",
        "codecs --json-file {tmp}",
    ],
    "stores": [
        "inspect -m {model} -q Why? -p text -s memory://x",
        "plan --store tape://x",
    ],
    "contradictions": [
        "suite nano -d {data}",
        "suite nano --methods full",
        "paper -m {model} -d {data} --ratio 0.1,0.2",
        "paper -m {model} -d {data} -d {data}",
        "serve --model {model} --shape tiny",
        "routing --model {model} --shape tiny",
        "serve --shape tiny --plot x.png",
        "vllm latency --model {model} --shape tiny",
    ],
}
"""Of `python -m lab`."""


JUNK = ["", "0", "-1", "nan", "inf", "-inf", "1e400", "99999999999999999999", "x", "é", "😀", "\udcff", "\x1b[2J"]
JUNK += ["[/b]", "/", ".", "~", "@", ",", "1,", "a=b", "s3://", "file:///nonexistent/x", "--", "-", "None", "{}", "%s"]


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


def commands_of(app: typer.Typer) -> list[tuple[tuple[str, ...], list[str]]]:
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


def check_junk(
    app: typer.Typer, main: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    """Junk in any option is no traceback. The command does not get as far as its work: an option that does not exist
    follows."""
    names, options = data.draw(st.sampled_from(commands_of(app)))
    value = data.draw(st.one_of(st.sampled_from(JUNK), st.text(max_size=20)))
    option = data.draw(st.sampled_from([*options, "--nonsense"]))
    with pytest.raises(SystemExit) as left:
        main([*names, f"{option}={value}", "--no-such-option"])
    captured = capsys.readouterr()
    check(int(left.value.code or 0), captured.out, captured.err)
